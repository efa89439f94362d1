"""The contract of a method as tests: `check_method`, for the test file of a method outside of kvjax.

>>> from kvjax.testing import check_method
>>> def test_contract():
...     check_method(Spread, budget=12, page_size=4)
"""

import dataclasses
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from kvjax.methods import Full
from kvjax.plugins import check_hooks
from kvjax.protocol.method import Method
from kvjax.registry import resolve
from kvjax.testing import laws
from kvjax.testing.model import TinyModel
from kvjax.testing.subject import Subject

_BUDGET = 36  # tokens: an observation window of 32 fits, and prompts of 40 tokens are cut
_EVERYTHING = 96  # tokens, more than any run here has
_LAYER = (
    laws.empty_slots_are_never_read, laws.scores_are_numbers, laws.rows_are_independent,
    laws.permuting_heads_permutes_the_output, laws.equal_query_heads_attend_as_one,
    laws.prompt_chunks_do_not_change_results, laws.cost_counts_what_is_attended, laws.outputs_are_attention_over_the_chosen,
)  # fmt: skip
MODEL_LAWS = (  # of a whole model
    laws.setting_does_something,
    laws.ragged_rows_equal_alone,
    laws.generating_in_two_calls_equals_one,
    laws.second_call_does_not_retrace,
    laws.decoding_keeps_structure_shapes_and_dtypes,
    laws.bfloat16_is_kept,
    laws.resident_bytes_are_the_arrays,
    laws.ragged_questions_equal_alone,
)


_NEEDS_VALUES = (  # what JAX raises where Python asks for the value of a traced array
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_JAX = ("jax", "jaxlib", "numpy")


def check_method(
    make: Callable[..., Method],
    /,
    *,
    everything: Mapping[str, Any] | None = None,
    tell: Callable[[str], Any] | None = None,
    **knobs: Any,
) -> tuple[str, ...]:
    """Check the laws that every method of kvjax obeys, on one layer and on a tiny model; takes a minute or two on a CPU.

    The laws do not include an oracle: only a second implementation can tell whether the method is the one of its paper
    (docs/adding_a_method.md). Prompts have 9 to 40 tokens, and 10 tokens follow.

    Args:
        make: the method's class, or a function of ``knobs`` that makes the method.
        everything: knobs under which the method keeps and attends to everything; None takes a large ``budget``, if the
            method has one.
        tell: is called with a line after each law, such as ``print``.
        **knobs: a small setting, which must leave something out of 40 tokens. A method with a ``budget`` gets 36 tokens if
            none is given.

    Returns:
        The names of the laws that were checked.

    Raises:
        AssertionError: laws are broken; the message names each broken law and quotes its docstring or its error.
        TypeError: a function of the method takes other arguments than the function that it replaces.
        ValueError: the method refuses the setting.
    """
    has_budget = "budget" in resolve(make(**knobs)).__dataclass_fields__
    knobs = {**({"budget": _BUDGET} if has_budget else {}), **knobs}
    method = make(**knobs)
    check_hooks(type(method))
    if everything is None and has_budget:
        everything = {"budget": _EVERYTHING}
    unbounded = {knob: value for knob, value in knobs.items() if knob != "capacity"}
    model = TinyModel(num_layers=2 if method.spans_layers else 1)  # a second layer only tests what layers share
    params = model.random_params()
    subject = Subject(
        method,
        model,
        params,
        full=Subject(Full(), model, params),
        everything=None if everything is None else make(**{**unbounded, **everything}),
        nearby=_nearby(method),
        traces=model.traces,
    )
    chosen = [] if method.spans_layers else [*_LAYER]
    chosen += MODEL_LAWS
    if everything is not None:
        chosen.append(laws.everything_kept_equals_full)
    broken: dict[str, tuple[Exception, list[Callable]]] = {}  # by what the error says: one mistake breaks many laws
    for number, law in enumerate(chosen, 1):
        begun, word = time.monotonic(), "holds"
        try:
            law(subject)
        except Exception as error:  # a law is broken, too, if the method cannot run there
            word = "is broken"
            broken.setdefault(_says(error), (error, []))[1].append(law)
        if tell is not None:
            tell(f"{number} of {len(chosen)}, {time.monotonic() - begun:.0f} s: {law.__name__} {word}")
    if broken:
        count = sum(len(mine) for _, mine in broken.values())
        parts = [f"{_named(error, mine)}\n{says}" for says, (error, mine) in broken.items()]
        lines = "\n\n".join([f"{count} of {len(chosen)} laws are broken", *parts])
        raise AssertionError(lines) from next(iter(broken.values()))[0]
    return tuple(law.__name__ for law in chosen)


def _named(error: Exception, mine: Sequence[Callable]) -> str:
    """Name laws that are broken by one error, and say what they require if they could be tried."""
    if not isinstance(error, AssertionError):
        return ", ".join(law.__name__ for law in mine) + ":"
    required = (" ".join((law.__doc__ or "").partition("\n\n")[0].split()) for law in mine)
    return "\n".join(f"{law.__name__}: {text}" for law, text in zip(mine, required, strict=True))


def _says(error: Exception) -> str:
    """Say what a law ran into: in one sentence with the method's own line, if this line needs the value of a traced array."""
    if isinstance(error, AssertionError):
        return str(error)
    if not isinstance(error, _NEEDS_VALUES):
        return f"{type(error).__name__}: {error}"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if frame.f_globals.get("__name__", "").partition(".")[0] not in _JAX]
    frame = own[-1]
    (line,) = traceback.StackSummary.extract([(frame, frame.f_lineno)])
    return (
        f"{frame.f_code.co_qualname} (line {frame.f_lineno} of {line.filename}) needs the value of an array while the method "
        f"is compiled, in {line.line!r}: use jnp.where or jax.lax.cond in place of `if`, functions of jax.numpy in place of "
        "those of Python and NumPy, and a static field for what decides a shape"
    )


def _nearby(method: Method) -> Method | None:
    """Make the method with a budget that is one token smaller, if it has a traced budget and accepts the smaller one."""
    budget = method.__dataclass_fields__.get("budget")
    if budget is None or budget.metadata.get("static"):
        return None
    try:
        return dataclasses.replace(method, budget=vars(method)["budget"] - 1)
    except ValueError:  # the method refuses so few tokens
        return None
