"""Shared by the tests of kvjax: an example of every method, and a tiny model that counts its traces."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import pytest

import kvjax
from kvjax import registry
from kvjax.methods import H2O, Quest, SnapKV, StreamingLLM, ThinK
from kvjax.methods.stretched import Stretched
from kvjax.protocol.families import AppendOnly
from kvjax.protocol.method import Method
from kvjax.protocol.typing import pytree
from kvjax.testing.layer import Drive as Drive
from kvjax.testing.layer import drive as drive
from kvjax.testing.layer import frequencies as frequencies
from kvjax.testing.layer import random_tokens as random_tokens
from kvjax.testing.layer import stored as stored
from kvjax.testing.subject import padded as padded
from kvjax.testing.subject import random_prompts as prompts
from kvjax.wrappers import DenseBelow, LayerBudgets, Pattern, Periodic, PerLayer, Prefill, Reuse, Stages, Twilight
from models import ModelConfig, random_params

NAMES = sorted(registry.builtin())
TRACES: list[tuple[int, ...]] = []  # shape of the tokens of every trace of a `CountingConfig` model


def oracle(name: str) -> Any:
    """The oracle module of a method. A method without an oracle fails here."""
    return importlib.import_module(f"tests.oracles.{name}")


@functools.cache
def with_constants(cls: type, **constants: Any) -> type:
    """A subclass in which constants of the class, which the papers fix, have values that suit small models."""
    return pytree(type(cls.__name__, (cls,), {**constants, "__doc__": cls.__doc__, "__module__": cls.__module__}))


def small(cls: type, **knobs: Any) -> Any:
    """A method of the class or of a subclass; what is no field among the knobs is a constant of the class."""
    constants = {name: value for name, value in knobs.items() if name not in cls.__dataclass_fields__ and name in dir(cls)}
    changed = {name: value for name, value in constants.items() if value != getattr(cls, name)}
    return (with_constants(cls, **changed) if changed else cls)(**{x: knobs[x] for x in knobs if x not in constants})


def example(name: str, **knobs: Any) -> kvjax.methods.Full:
    """The method at the small setting its oracle declares, some knobs changed."""
    return small(registry.builtin()[name], **{**oracle(name).KNOBS, **knobs})


def knobs_of(name: str, heads: int) -> dict[str, Any]:
    """The small setting that the method's oracle declares, for layers of so many KV heads."""
    knobs = oracle(name).KNOBS
    if "scores" in knobs:
        knobs = {**knobs, "scores": tuple((row * heads)[:heads] for row in knobs["scores"])}
    return knobs


SMALL_PATTERNS = {"window": 4, "num_sink": 1, "num_recent": 1, "block": 4, "stride": 2, "chunk": 16}  # of `Prefill`

WRAPPERS = {
    "stages": Stages(evict=SnapKV(budget=20, obs_window=5), retrieve=Quest(budget=8, page_size=4, num_dense_layers=0)),
    "thinned": Stages(evict=SnapKV(budget=20, obs_window=5), retrieve=small(ThinK, obs_window=5, num_recent=6)),
    "per_layer": PerLayer(layers={0: small(StreamingLLM, budget=12, chunk=8)}, default=H2O(budget=12)),
    "dense_below": DenseBelow(length=20, method=Quest(budget=8, page_size=4, num_dense_layers=0)),
    "periodic": Periodic(evict=SnapKV(budget=12, obs_window=5), interval=4),
    "layer_budgets": LayerBudgets(method=SnapKV(budget=12, obs_window=5), shares=(0.5, 1.5)),
    "twilight": Twilight(method=Quest(budget=12, page_size=4, num_dense_layers=0), mass=0.7),
    "reuse": Reuse(method=Quest(budget=12, page_size=4, num_dense_layers=0), every=2, steps=3),
    "prefill": Prefill(method=SnapKV(budget=12, obs_window=5), pattern=Pattern(columns=3, diagonals=3), **SMALL_PATTERNS),
    "verified": kvjax.Verified(draft=SnapKV(budget=12, obs_window=5), depth=2, worth=None),
}


def group(name: str, *more: Any) -> Any:
    """A parameter whose tests run on the same worker, so that they share compiled programs."""
    return pytest.param(name, *more, marks=pytest.mark.xdist_group(name))


def kinds(wanted: Callable[[Any], bool]) -> tuple[str, ...]:
    """The names of the methods whose class is as wanted."""
    return tuple(name for name in NAMES if wanted(registry.builtin()[name]))


# Which methods meet their oracles where. Some follow from the classes; the rest is a choice for speed.
# Reads its prompt twice: by default only methods/test_kvzip.py runs it.
TWICE = kinds(lambda cls: cls.reread is not Method.reread)
# Scores under one mechanism, whose laws always run for SnapKV in "stages": by default only test_prompt_eviction.py runs them,
# and test_periodic.py those that go on while decoding.
ONCE = kinds(lambda cls: issubclass(cls, AppendOnly) and cls.evicts and cls is not SnapKV and not cls.spans_layers)
# Full under other angles: by default only methods/test_positions.py looks at these.
ANGLES = kinds(lambda cls: issubclass(cls, Stretched))
# Retrieval by scans, guesses and pages with rules of their own, and keys of fewer numbers: they are slow tests.
SLOWLY = (
    "freekv", "infinigen", "magicpig", "oracle", "pqcache", "retrievalattention", "retroinfer", "shadowkv", "socket", "think",
)  # fmt: skip
ELSEWHERE = (*ONCE, *ANGLES, *SLOWLY, *TWICE)
# A choice for speed. Laws of these run under --thorough: each shares its code with a method or wrapper whose laws always run.
REPEATED = (
    "full", "snapkv", "h2o", "infllm", "keydiff", "streamingllm", "selfextend", "per_layer", "dense_below", "periodic",
    "twilight", "reuse", "layer_budgets", "thinned", "prefill", "verified", *ELSEWHERE,
)  # fmt: skip


def law(params: Any) -> list[Any]:
    """Parameters of a law, the `REPEATED` ones only under ``--thorough``."""
    return repeated(params, but=[x.values[0] for x in params if x.values[0] not in REPEATED])


def repeated(params: Any, but: Any) -> list[Any]:
    """Parameters of a law: the names in ``but`` run always, all other names only under ``--thorough``."""
    return [x if x.values[0] in but else pytest.param(*x.values, marks=[*x.marks, pytest.mark.thorough]) for x in params]


# Two methods that are most unlike: one evicts tokens, the other retrieves pages. Coded tokens and sentences are retrieved as
# pages are, and their oracles say which.
MOST_UNLIKE = ("tova", "quest")
LONG = ("mosaickv", "chess")  # one packs layers and tokens, the other spans layers: twice as many programs, each longer


def whole(params: Any, but: Any = (*MOST_UNLIKE, "stages")) -> list[Any]:
    """Parameters of a law of the whole model: the names in ``but`` run by default, and those in `LONG` as slow tests."""
    slow = [pytest.param(*x.values, marks=[*x.marks, pytest.mark.slow]) for x in params if x.values[0] in LONG]
    return slow + repeated([x for x in params if x.values[0] not in LONG], but=but)


def but_once(params: Any) -> list[Any]:
    """Parameters of a test that is no law: the names in `ELSEWHERE` run only under ``--thorough``, `SLOWLY` as slow tests."""
    slow = [pytest.param(*x.values, marks=[*x.marks, pytest.mark.slow]) for x in params if x.values[0] in SLOWLY]
    others = [x for x in params if x.values[0] not in SLOWLY]
    return slow + repeated(others, but=[x.values[0] for x in others if x.values[0] not in ELSEWHERE])


METHODS = [group(name) for name in NAMES]
ONE_LAYER = [x for x in METHODS if not registry.builtin()[x.values[0]].spans_layers]  # can be driven layer by layer
ALL = METHODS + [group(name) for name in WRAPPERS]


def any_example(name: str) -> Any:
    """An example of a method or of a wrapper."""
    return WRAPPERS[name] if name in WRAPPERS else example(name)


def generous(name: str) -> Any:
    """The example with room for everything in any test here; None if nothing limits it."""
    big = 96
    snapkv, quest = SnapKV(budget=big, obs_window=5), Quest(budget=big, page_size=4, num_dense_layers=0)
    wrappers = {
        "verified": kvjax.Verified(draft=snapkv, depth=2, worth=None),
        "stages": Stages(evict=snapkv, retrieve=quest),
        "thinned": Stages(evict=snapkv, retrieve=small(ThinK, channels=1.0, obs_window=5)),
        "per_layer": PerLayer(layers={0: small(StreamingLLM, budget=big, chunk=8)}, default=H2O(budget=big)),
        "periodic": Periodic(evict=snapkv, interval=4),
        "layer_budgets": LayerBudgets(method=SnapKV(budget=2 * big, obs_window=5), shares=(0.5, 1.5)),
        "dense_below": DenseBelow(length=big, method=Quest(budget=8, page_size=4, num_dense_layers=0)),
        # Fewer diagonals than slots, or the prompt would be read densely.
        "prefill": Prefill(method=snapkv, pattern=Pattern(diagonals=60), **SMALL_PATTERNS),
        "twilight": Twilight(method=quest, mass=1.0),
        "reuse": Reuse(method=quest, every=2, steps=3),
    }
    if name in wrappers:
        return wrappers[name]
    everything = {
        "chess": {"ratios": (1.0, 1.0, 1.0)},
        "duoattention": {"num_recent": big},
        "headkv": {"budget": big, "beta": 1e3},
        "infllm": {"num_local": big},
        "magicpig": {"num_sink": big},
        "mosaickv": {"channels": 1.0, "fraction": 1.0},
        "ntk": {"factor": 1.0},
        "pi": {"factor": 1.0},
        "pqcache": {"num_sink": big},
        "pyramidkv": {"budget": big, "beta": 1},
        "retroinfer": {"fraction": 1.0},
        "selfextend": {"window": big},
        "shadowkv": {"budget": big, "rank": 16},
        "think": {"channels": 1.0},
    }
    return example(name, **everything.get(name, {"budget": big} if "budget" in oracle(name).KNOBS else {}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountingConfig(ModelConfig):
    """A model description that notes every time it is traced."""

    def apply(self, params: Any, tokens: jax.Array, attend: Any, states: tuple, **options: Any):
        TRACES.append(tokens.shape)
        return ModelConfig.apply(self, params, tokens, attend, states, **options)


TINY = CountingConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=8,
    qk_norm=True, max_position_embeddings=160, eos_token_ids=(60,),
)  # fmt: skip


@functools.cache
def tiny_params() -> Any:
    """Parameters of `TINY`, large enough that attention is not flat."""
    with jax.ensure_compile_time_eval():  # the first call may be inside a trace
        params = random_params(TINY, jax.random.key(1))
        return jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, params)


def read(method: Any, rows: Any = None, max_new_tokens: int = 24, **options: Any) -> kvjax.Cache:
    """`kvjax.prefill` of the tiny model on ``rows`` (the three prompts), padded to one width."""
    tokens, lengths = padded(prompts() if rows is None else rows)
    options = {"pad_multiple": 1, "config": TINY, **options}
    return kvjax.prefill(tiny_params(), tokens, lengths=lengths, method=method, max_new_tokens=max_new_tokens, **options)
