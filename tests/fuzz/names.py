"""Methods as text, as commands take them: `twilight(quest, mass=0.85)`; with a fault, or as the method that they name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import kvjax
from kvjax.methods import H2O, Full, Knorm, Quest, SnapKV, StreamingLLM
from kvjax.wrappers import DenseBelow, Periodic, PerLayer, Stages, Twilight
from tests.fuzz.report import Outcome
from tests.fuzz.verdicts import verify
from tests.fuzz.words import one

_Named = tuple[str, Any]  # a text and the method that it names


def check(seed: int, number: int) -> Iterator[Outcome]:
    """Give the outcome of one text."""
    rng = np.random.default_rng([seed, 10, number])
    text, want = _any(rng)
    if rng.random() < 0.5:
        yield verify(
            repr(text), lambda: kvjax.make(text), named=None,
            right=lambda got: None if got == want else f"made {got}, expected {want}",
        )  # fmt: skip
        return
    spoilt, told = one(rng, _FAULTS)(text, rng)
    yield verify(f"{spoilt!r:.200}", lambda: kvjax.make(spoilt), right=None, named=told, expected=(ValueError,))


def _any(rng: np.random.Generator) -> _Named:
    return one(rng, (_plain, _plain, *_WRAPPERS))(rng)


def _call(rng: np.random.Generator, name: str, parts: list[str]) -> str:
    """Write a call with random spaces and capitals, its keyword parts in any order."""
    loose = [part for part in parts if "=" not in part.partition("(")[0]]
    named = [part for part in parts if part not in loose]
    rng.shuffle(named)
    space = one(rng, ("", " ", "  "))
    written = one(rng, (name, name.upper(), name.title()))
    return f"{written}({f',{space}'.join([*loose, *named])})" if parts else written


def _plain(rng: np.random.Generator) -> _Named:
    cls = one(rng, (Quest, SnapKV, Full, Knorm, H2O, StreamingLLM))
    name = cls.__name__.lower()
    if cls is Full or rng.random() < 0.3:
        return _call(rng, name, []), cls()
    kind, budget = int(rng.integers(3)), int(rng.integers(4, 99)) * 16
    if kind == 0 and cls is not StreamingLLM:
        share = one(rng, ("1/8", "0.125", ".125"))
        return _call(rng, name, [f"budget={share}"]), cls(budget=kvjax.share(1 / 8))
    knobs: dict[str, Any] = {"budget": budget}
    if cls is Quest and kind == 1:
        knobs["page_size"] = int(one(rng, (8, 16, 32)))
    if cls is SnapKV and kind == 1:
        knobs["kernel"] = 7
    return _call(rng, name, [f"{knob}{one(rng, ('=', ' = '))}{value}" for knob, value in knobs.items()]), cls(**knobs)


def _quest(rng: np.random.Generator) -> _Named:
    budget = int(rng.integers(4, 99)) * 16
    return _call(rng, "quest", [f"budget={budget}"]), Quest(budget=budget)


def _snapkv(rng: np.random.Generator) -> _Named:
    budget = int(rng.integers(4, 99)) * 16
    return _call(rng, "snapkv", [f"budget={budget}"]), SnapKV(budget=budget)


def _twilight(rng: np.random.Generator) -> _Named:
    inner, method = _quest(rng)
    mass = float(one(rng, (0.5, 0.85, 1.0)))
    return _call(rng, "twilight", [_by_name(rng, "method", inner), f"mass={mass}"]), Twilight(method=method, mass=mass)


def _periodic(rng: np.random.Generator) -> _Named:
    inner, method = _snapkv(rng)
    interval = int(rng.integers(1, 500))
    made = Periodic(evict=method, interval=interval)
    return _call(rng, "periodic", [_by_name(rng, "evict", inner), f"interval={interval}"]), made


def _stages(rng: np.random.Generator) -> _Named:
    (evict, one_method), (retrieve, other) = _snapkv(rng), _quest(rng)
    parts = [evict, retrieve] if rng.random() < 0.5 else [f"evict={evict}", f"retrieve={retrieve}"]
    return _call(rng, "stages", parts), Stages(evict=one_method, retrieve=other)


def _dense_below(rng: np.random.Generator) -> _Named:
    inner, method = _quest(rng)
    length = int(rng.integers(1, 10**6))
    made = DenseBelow(method=method, length=length)
    return _call(rng, "densebelow", [_by_name(rng, "method", inner), f"length={length}"]), made


def _per_layer(rng: np.random.Generator) -> _Named:
    inner, method = _snapkv(rng)
    layers = [int(x) for x in rng.permutation(8)[: int(rng.integers(1, 4))] - 2]
    made = {at: _plain(rng) for at in layers}
    parts = [_by_name(rng, "default", inner), *(f"{at}={text}" for at, (text, _) in made.items())]
    return _call(rng, "perlayer", parts), PerLayer(layers={at: x for at, (_, x) in made.items()}, default=method)


def _by_name(rng: np.random.Generator, field: str, text: str) -> str:
    return text if rng.random() < 0.5 else f"{field}={text}"


_WRAPPERS: tuple[Callable[[np.random.Generator], _Named], ...] = (_twilight, _periodic, _stages, _dense_below, _per_layer)


# ---- faults: a text that names nothing, and what the refusal says -------------------------------------------------


def _more_brackets(text: str, rng: np.random.Generator) -> tuple[str, str]:
    at = int(rng.integers(1, len(text) + 1))
    return f"{text[:at]}{one(rng, ('(', ')', '()', ')('))}{text[at:]}", ""


def _knob_twice(text: str, rng: np.random.Generator) -> tuple[str, str]:
    space = " " * int(rng.integers(2))
    return one(rng, (f"quest(budget=64, {space}budget=128)", f"snapkv(budget=1/8,{space}budget=1/8)")), "twice"


def _field_twice(text: str, rng: np.random.Generator) -> tuple[str, str]:
    evict = one(rng, ("evict=snapkv", "snapkv"))
    return f"stages({evict}, evict=h2o, retrieve=quest)", "twice"


def _unknown(text: str, rng: np.random.Generator) -> tuple[str, str]:
    return one(rng, (
        ("quezt", "quest"), ("quest(bugdet=64)", "budget"), ("twilight(quezt)", "quest"),
        ("twilight(quest, mas=0.5)", "mass"),
        ("no_such_module:Spread", "no_such_module"), ("kvjax:NoSuchMethod", "NoSuchMethod"), ("", "unknown method ''"),
        ("()", "got '()'"), ("perlayer(snapkv, x=full)", "layers"), ("perlayer(snapkv, \u00b2=full)", "layers"),
        ("perlayer(snapkv, --1=full)", "layers"),
    ))  # fmt: skip


def _bad_value(text: str, rng: np.random.Generator) -> tuple[str, str]:
    knob, value = one(rng, (
        ("budget", "1e3"), ("budget", "nan"), ("budget", "-16"), ("budget", "2**40"), ("budget", "9" * 30), ("budget", "1/0"),
        ("budget", ""), ("budget", "0"), ("budget", "1/2/3"), ("budget", "5/4"), ("page_size", "0"), ("page_size", "1.5"),
        ("offload", "maybe"), ("num_dense_layers", "-1"),
    ))  # fmt: skip
    return f"quest({knob}={value})", ""


def _inside_out(text: str, rng: np.random.Generator) -> tuple[str, str]:
    return one(rng, (
        ("twilight", "method"), ("twilight(quest, quest)", "takes no other method"), ("quest(snapkv)", "takes no method"),
        ("stages(snapkv)", "retrieve"), ("periodic(quest)", "Quest"), ("stages(quest, snapkv)", ""),
        ("perlayer(0=full)", "default"),
        ("twilight(" * 60 + "quest" + ")" * 60, "at most"), ("layerbudgets(snapkv)", "shares"),
        ("full(8)", ""),
    ))  # fmt: skip


_FAULTS: tuple[Callable[[str, np.random.Generator], tuple[str, str]], ...] = (
    _more_brackets, _knob_twice, _field_twice, _unknown, _bad_value, _inside_out,
)  # fmt: skip
