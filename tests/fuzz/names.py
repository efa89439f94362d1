"""Methods as text, as commands take them: `twilight(quest, mass=0.85)`; with a fault, or as the method that they name."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

import kvjax
from kvjax.methods import H2O, Full, Knorm, Quest, SnapKV, StreamingLLM
from kvjax.wrappers import DenseBelow, Periodic, PerLayer, Stages, Twilight
from tests.fuzz.verdicts import judge

_Draw = Callable[[st.SearchStrategy], Any]
_Call = tuple[type, dict[str, Any]]  # a class and its knobs, of which some are calls
_SHARE = kvjax.share(1 / 8)
_BUDGETS = st.integers(4, 98).map(lambda pages: 16 * pages)
# Texts that name nothing, by what the refusal says. tests/experiments/test_settings_files.py has others.
_FAULTS: dict[str, tuple[str, ...]] = {
    "twice": (
        "quest(budget=64, budget=128)", "quest(budget=64,  budget=128)", "snapkv(budget=1/8,budget=1/8)",
        "stages(evict=snapkv, evict=h2o, retrieve=quest)", "stages(snapkv, evict=h2o, retrieve=quest)",
    ),
    "no_such_module": ("no_such_module:Spread",), "NoSuchMethod": ("kvjax:NoSuchMethod",), "unknown method ''": ("",),
    "got '()'": ("()",), "layers": ("perlayer(snapkv, \u00b2=full)", "perlayer(snapkv, --1=full)"),
    "retrieve": ("stages(snapkv)",), "Quest": ("periodic(quest)",), "default": ("perlayer(0=full)",),
    "at most": ("twilight(" * 60 + "quest" + ")" * 60,), "shares": ("layerbudgets(snapkv)",),
    "": (
        "stages(quest, snapkv)", "full(8)", "quest(page_size=0)", "quest(page_size=1.5)", "quest(offload=maybe)",
        "quest(num_dense_layers=-1)", *(f"quest(budget={value})" for value in (
            "1e3", "nan", "-16", "2**40", "9" * 30, "1/0", "", "0", "1/2/3", "5/4",
        )),
    ),
}  # fmt: skip


def _calls(cls: type, *needed: tuple[str, st.SearchStrategy], **knobs: st.SearchStrategy) -> st.SearchStrategy[_Call]:
    return st.tuples(st.just(cls), st.fixed_dictionaries(dict(needed), optional=knobs))


_QUEST = _calls(Quest, budget=_BUDGETS | st.just(_SHARE), page_size=st.just(8))
_SNAPKV = _calls(SnapKV, budget=_BUDGETS | st.just(_SHARE), kernel=st.just(7))
_PLAIN = _QUEST | _SNAPKV | _calls(Full) | _calls(StreamingLLM, budget=_BUDGETS)
_PLAIN |= st.sampled_from((Knorm, H2O)).flatmap(lambda cls: _calls(cls, budget=_BUDGETS | st.just(_SHARE)))
_ANY = _PLAIN | st.one_of(
    _calls(Twilight, ("method", _QUEST), mass=st.sampled_from((0.5, 0.85, 1.0))),
    _calls(Periodic, ("evict", _SNAPKV), interval=st.integers(1, 499), ratio=st.sampled_from((None, 0.125, 1.0))),
    _calls(Stages, ("evict", _SNAPKV), ("retrieve", _QUEST)),
    _calls(DenseBelow, ("method", _QUEST), ("length", st.integers(1, 10**6))),
    _calls(PerLayer, ("default", _PLAIN), ("layers", st.dictionaries(st.integers(-2, 5), _PLAIN, min_size=1, max_size=3))),
)


def check(data: st.DataObject, folder: pathlib.Path) -> Iterator[None]:
    """Read one text, a right one, or one with a fault."""
    draw, named = data.draw, ""
    call = draw(_ANY)
    text, method = _written(draw, call), _made(call)
    kind = draw(st.sampled_from(("right", "brackets", "fault")))
    if kind == "right":
        right = lambda got: None if got == method else f"made {got}, expected {method}"  # noqa: E731
        judge(repr(text), lambda: kvjax.make(text), right=right)
        yield
        return
    if kind == "brackets":
        at, more = draw(st.integers(1, len(text))), draw(st.sampled_from(("(", ")", "()", ")(")))
        text = f"{text[:at]}{more}{text[at:]}"
    else:
        named = draw(st.sampled_from(list(_FAULTS)))
        text = draw(st.sampled_from(_FAULTS[named]))
    judge(f"{text!r:.200}", lambda: kvjax.make(text), named=(named,), errors=(ValueError,))
    yield


def _made(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _made(inner) for name, inner in value.items()}
    return value[0](**_made(value[1])) if isinstance(value, tuple) else value


def _written(draw: _Draw, call: _Call) -> str:
    """Write a call with random spaces and capitals: methods in their order or by names, then knobs in any order."""
    cls, knobs = call
    knobs = {str(at): value for at, value in {**knobs, **knobs.get("layers", {})}.items() if at != "layers"}
    inner = {at: _written(draw, value) for at, value in knobs.items() if isinstance(value, tuple)}
    equals, comma = draw(st.sampled_from(("=", " = "))), draw(st.sampled_from((",", ", ", ",  ")))
    ordered = [field.name for field in dataclasses.fields(cls) if field.name in inner]
    loose = [inner.pop(at) for at in ordered] if draw(st.booleans()) else []
    rest = {at: draw(st.sampled_from(("1/8", "0.125", ".125"))) if x is _SHARE else x for at, x in knobs.items()}
    named = [f"{at}{equals}{inner.get(at, x)}" for at, x in rest.items() if at in inner or not isinstance(x, tuple)]
    name = draw(st.sampled_from((cls.__name__.lower(), cls.__name__.upper(), cls.__name__.title())))
    parts = comma.join([*loose, *draw(st.permutations(named))])
    return f"{name}({parts})" if parts else name
