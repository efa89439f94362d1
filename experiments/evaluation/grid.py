"""A grid of a method's hyper-parameters, as methods of an evaluation; settings of equal structure share a program."""

import itertools
from collections.abc import Sequence

from experiments.answering import Choice, budget_tokens, read_knobs
from experiments.evaluation.settings import EvaluationSettings
from kvjax import registry
from kvjax.methods.chess.method import PRESETS

_LONG = 1 << 20  # tokens, to compare budgets that are shares with budgets in tokens


def the_grid(settings: EvaluationSettings, texts: Sequence[str]) -> tuple[Choice, ...]:
    """List all combinations of the values in texts KNOB=V1,V2,... of the settings' only method; the last knob varies fastest.

    The arrays that a method allocates decide its program. So all settings get room for the largest budget, fraction or
    ratios, unless `capacity` is given.

    Raises:
        ValueError: several methods, a malformed text, or a value that the method refuses.
    """
    if len(settings.methods) != 1 or settings.budgets:
        got = f"{', '.join(choice.label for choice in settings.methods)}{' and --budgets' * bool(settings.budgets)}"
        raise ValueError(f"--grid varies the knobs of one method, budgets too: expected one in --methods, got {got}")
    (choice,), varied = settings.methods, {}
    for text in texts:
        knob, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not values:
            raise ValueError(f"--grid takes KNOB=V1,V2,..., got {text!r}")
        if knob in varied:
            raise ValueError(f"--grid names {knob} twice; give all its values at once: {knob}=V1,V2,...")
        if knob in choice.knobs:
            raise ValueError(f"{knob} is given one value and a grid of values, expected one of the two")
        parts = values.split(";" if ";" in values else ",")
        varied[knob] = [read_knobs(choice.name, [f"{knob}={value}"])[knob] for value in parts]
    room = {}
    if "capacity" in {knob.name for knob in registry.knobs(registry.find(choice.name))} - {*varied, *choice.knobs}:
        if sizes := varied.get("budget") or varied.get("fraction"):
            room = {"capacity": max(sizes, key=lambda size: budget_tokens(size, _LONG))}
        elif ratios := varied.get("ratios"):
            named = [PRESETS.get(shares, shares) if isinstance(shares, str) else shares for shares in ratios]
            room = {"capacity": tuple(max(shares) for shares in zip(*named, strict=True))}
    each = itertools.product(*varied.values())
    choices = [
        Choice(choice.name, {**dict(zip(varied, values, strict=True)), **choice.knobs, **room}).check() for values in each
    ]
    # A file's examples have lengths of their own, at which the runner makes the methods.
    for setting, length in itertools.product(choices, settings.lengths if settings.generated else ()):
        setting.at(length, None, None)
    return tuple(choices)
