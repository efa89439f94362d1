"""Methods as text, as commands take them: `twilight(quest, mass=0.85)`; with a fault, or as the method that they name."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

import kvjax
from kvjax.methods import H2O, Full, Knorm, Quest, SnapKV, StreamingLLM
from kvjax.wrappers import DenseBelow, Periodic, PerLayer, Stages, Twilight
from tests.fuzz.verdicts import judge

_Draw = Callable[[st.SearchStrategy], Any]
_Named = tuple[str, Any]  # a text and the method that it names
_BUDGETS = st.integers(4, 98).map(lambda pages: 16 * pages)
# Texts that name nothing, by what the refusal says.
_FAULTS: dict[str, tuple[str, ...]] = {
    "twice": (
        "quest(budget=64, budget=128)", "quest(budget=64,  budget=128)", "snapkv(budget=1/8,budget=1/8)",
        "stages(evict=snapkv, evict=h2o, retrieve=quest)", "stages(snapkv, evict=h2o, retrieve=quest)",
    ),
    "quest": ("quezt", "twilight(quezt)"), "budget": ("quest(bugdet=64)",),
    "mass": ("twilight(quest, mas=0.5)",),
    "no_such_module": ("no_such_module:Spread",), "NoSuchMethod": ("kvjax:NoSuchMethod",), "unknown method ''": ("",),
    "got '()'": ("()",),
    "layers": ("perlayer(snapkv, x=full)", "perlayer(snapkv, \u00b2=full)", "perlayer(snapkv, --1=full)"),
    "method": ("twilight",), "takes no other method": ("twilight(quest, quest)",), "takes no method": ("quest(snapkv)",),
    "retrieve": ("stages(snapkv)",), "Quest": ("periodic(quest)",), "default": ("perlayer(0=full)",),
    "at most": ("twilight(" * 60 + "quest" + ")" * 60,), "shares": ("layerbudgets(snapkv)",),
    "": (
        "stages(quest, snapkv)", "full(8)", "quest(page_size=0)", "quest(page_size=1.5)", "quest(offload=maybe)",
        "quest(num_dense_layers=-1)", *(f"quest(budget={value})" for value in (
            "1e3", "nan", "-16", "2**40", "9" * 30, "1/0", "", "0", "1/2/3", "5/4",
        )),
    ),
}  # fmt: skip


def check(data: st.DataObject, folder: pathlib.Path) -> Iterator[None]:
    """Read one text, a right one, or one with a fault."""
    draw = data.draw
    text, method = _any(draw)
    kind = draw(st.sampled_from(("right", "brackets", "fault")))
    if kind == "right":
        right = lambda got: None if got == method else f"made {got}, expected {method}"  # noqa: E731
        judge(repr(text), lambda: kvjax.make(text), right=right)
    elif kind == "brackets":
        at, more = draw(st.integers(1, len(text))), draw(st.sampled_from(("(", ")", "()", ")(")))
        _refuse(f"{text[:at]}{more}{text[at:]}", "")
    else:
        named = draw(st.sampled_from(list(_FAULTS)))
        _refuse(draw(st.sampled_from(_FAULTS[named])), named)
    yield


def _refuse(text: str, named: str) -> None:
    judge(f"{text!r:.200}", lambda: kvjax.make(text), named=(named,), errors=(ValueError,))


def _any(draw: _Draw) -> _Named:
    cls = draw(st.sampled_from((None, Twilight, Periodic, Stages, DenseBelow, PerLayer)))
    if cls is None:
        return _plain(draw)
    (quest, retrieve), (snapkv, evict) = _budgeted(draw, Quest), _budgeted(draw, SnapKV)
    if cls is Twilight:
        mass = draw(st.sampled_from((0.5, 0.85, 1.0)))
        return _around(draw, cls, {"method": quest}, [f"mass={mass}"]), cls(method=retrieve, mass=mass)
    if cls is Periodic:
        interval = draw(st.integers(1, 499))
        return _around(draw, cls, {"evict": snapkv}, [f"interval={interval}"]), cls(evict=evict, interval=interval)
    if cls is Stages:
        return _around(draw, cls, {"evict": snapkv, "retrieve": quest}, []), cls(evict=evict, retrieve=retrieve)
    if cls is DenseBelow:
        length = draw(st.integers(1, 10**6))
        return _around(draw, cls, {"method": quest}, [f"length={length}"]), cls(method=retrieve, length=length)
    layers = {at: _plain(draw) for at in draw(st.sets(st.integers(-2, 5), min_size=1, max_size=3))}
    text = _around(draw, cls, {"default": snapkv}, [f"{at}={inner}" for at, (inner, _) in layers.items()])
    return text, cls(layers={at: method for at, (_, method) in layers.items()}, default=evict)


def _around(draw: _Draw, cls: type, methods: dict[str, str], rest: list[str]) -> str:
    """Write a wrapper with its methods in their order or by their names."""
    if draw(st.booleans()):
        return _call(draw, cls, [*methods.values()], rest)
    return _call(draw, cls, [], [*(f"{name}={text}" for name, text in methods.items()), *rest])


def _plain(draw: _Draw) -> _Named:
    cls = draw(st.sampled_from((Full, Quest, SnapKV, Knorm, H2O, StreamingLLM)))
    kind = draw(st.sampled_from(("default", "budget", "share", "knob")))
    if cls is Full or kind == "default":
        return _call(draw, cls, [], []), cls()
    if kind == "share" and cls is not StreamingLLM:
        share = draw(st.sampled_from(("1/8", "0.125", ".125")))
        return _call(draw, cls, [], [f"budget={share}"]), cls(budget=kvjax.share(1 / 8))
    knobs = {Quest: {"page_size": 8}, SnapKV: {"kernel": 7}}.get(cls, {}) if kind == "knob" else {}
    return _budgeted(draw, cls, **knobs)


def _budgeted(draw: _Draw, cls: type, **knobs: int) -> _Named:
    knobs, equals = {"budget": draw(_BUDGETS), **knobs}, draw(st.sampled_from(("=", " = ")))
    return _call(draw, cls, [], [f"{name}{equals}{value}" for name, value in knobs.items()]), cls(**knobs)


def _call(draw: _Draw, cls: type, loose: list[str], named: list[str]) -> str:
    """Write a call with random spaces and capitals, its keyword parts in any order."""
    name = draw(st.sampled_from((cls.__name__.lower(), cls.__name__.upper(), cls.__name__.title())))
    parts = [*loose, *draw(st.permutations(named))]
    comma = draw(st.sampled_from((",", ", ", ",  ")))
    return f"{name}({comma.join(parts)})" if parts else name
