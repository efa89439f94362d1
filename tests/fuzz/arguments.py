"""What takes values: the fields of methods and models, and the arguments of public functions, with rules of their own.

The rules are written here a second time, from annotations, declared limits and docstrings, so that they do not agree with the
checks of the library by calling them.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import registry
from kvjax.decoding.sampling import Sampler
from kvjax.methods import Full, Quest, SnapKV
from kvjax.protocol.fields import Limits
from kvjax.registry import parse_knobs, resolve
from kvjax.testing.model import TinyModel
from kvjax.wrappers import DenseBelow, LayerBudgets, Periodic, PerLayer, Prefill, Stages, Twilight
from models import ModelConfig, RopeScaling, random_params
from tests.fuzz import values
from tests.fuzz.values import (
    Argument,
    Rule,
    among,
    arrays,
    boolean,
    either,
    finite,
    none,
    nothing,
    rows,
    tuples,
    whole,
)

_ROWS, _ROOM, _WIDTH = 2, 8, 6
_SIGNED = ("seed",)  # whole numbers that may be negative; all others count something
_MODEL = ModelConfig(
    vocab_size=61, hidden_size=16, intermediate_size=16, num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=8,
    max_position_embeddings=64, eos_token_ids=(60,),
)  # fmt: skip


class World:
    """A tiny model and what the functions need of it; made when they are used first."""

    config = _MODEL
    prompts = ((1, 2, 3, 4, 5, 6), (7, 8, 9))

    @functools.cached_property
    def params(self) -> Any:
        """Of `config`."""
        return random_params(self.config, jax.random.key(0))

    @functools.cached_property
    def _made(self) -> kvjax.Cache:
        return self.prefill()

    @property
    def cache(self) -> kvjax.Cache:
        """A cache of its own, with two rows."""
        return kvjax.fork(self._made)

    @functools.cached_property
    def consumed(self) -> kvjax.Cache:
        """A cache that cannot be used any more."""
        cache = self.cache
        kvjax.decode_step(self.params, cache, [1, 2])
        return cache

    def prefill(self, **options: Any) -> kvjax.Cache:
        """`kvjax.prefill` with some arguments changed."""
        given = {"params": self.params, "tokens": self.prompts, "config": self.config, "max_new_tokens": _ROOM}
        given |= {"pad_multiple": 1, **options}
        return kvjax.prefill(given.pop("params"), given.pop("tokens"), **given)

    def call(self, function: Callable[..., Any], **options: Any) -> Any:
        """A function of params and a cache, with some arguments changed."""
        given = {"params": self.params, "cache": self.cache, **options}
        return function(given.pop("params"), given.pop("cache"), **given)


def fields_of_methods() -> list[Argument]:
    """The fields of all methods, wrappers and descriptions of models."""
    made = [_field(cls, field.name) for cls in registry.classes().values() for field in dataclasses.fields(cls)]
    made += [_sampler(name) for name in Sampler.__dataclass_fields__]
    quest, full = Quest(budget=16), Full()
    both = {"evict": full, "retrieve": quest}
    made += [_argument("Stages", name, nothing, lambda **x: Stages(**{**both, **x})) for name in both]
    made.append(_argument("DenseBelow", "method", nothing, lambda **x: DenseBelow(length=9, **x)))
    made.append(_argument("DenseBelow", "length", whole(1), lambda **x: DenseBelow(method=quest, **x)))
    made.append(_argument("Periodic", "evict", nothing, lambda **x: Periodic(**x)))
    made.append(_argument("Periodic", "interval", whole(1), lambda **x: Periodic(evict=SnapKV(), **x)))
    made.append(_argument("Twilight", "method", nothing, lambda **x: Twilight(**x)))
    share = either(finite(0, 1, above=0.0), arrays(finite(0, 1, above=0.0)))
    made.append(_argument("Twilight", "mass", share, lambda **x: Twilight(method=quest, **x)))
    made.append(_argument("LayerBudgets", "method", nothing, lambda **x: LayerBudgets(shares=(1.0,), **x)))
    shares = tuples(finite(0, above=0.0))
    made.append(_argument("LayerBudgets", "shares", shares, lambda **x: LayerBudgets(method=quest, **x)))
    made.append(_argument("Prefill", "method", nothing, lambda **x: Prefill(**x)))
    made.append(_argument("Prefill", "pattern", nothing, lambda **x: Prefill(method=quest, **x)))
    made.append(_argument("PerLayer", "layers", among({}), lambda **x: PerLayer(default=full, **x)))
    made.append(_argument("PerLayer", "default", nothing, lambda **x: PerLayer(layers={0: full}, **x)))
    return [dataclasses.replace(x, allowed=_no_method(x)) for x in made] + _models()


def _no_method(argument: Argument) -> Rule:
    """A method is a good value where methods are expected, so it is not tried there."""
    takes = argument.name in ("evict", "retrieve", "method", "default")
    return lambda x: argument.allowed(x) or (takes and isinstance(x, kvjax.methods.Full))


def _field(cls: type, name: str) -> Argument:
    field = cls.__dataclass_fields__[name]
    limits = field.metadata.get("limits", Limits())
    hints = typing.get_type_hints(cls)
    kinds = hints[name]
    kinds = typing.get_args(kinds) if typing.get_origin(kinds) in (types.UnionType, typing.Union) else (kinds,)
    rule = either(*(_rule(name, kind, limits, bool(field.metadata.get("static"))) for kind in kinds))
    rule = either(none, rule) if field.default is None else rule
    if name == "boundary":
        rule = lambda x: x is None or (isinstance(x, (np.ndarray, jax.Array)) and x.dtype == bool and x.ndim == 1)  # noqa: E731
    if name == "offload":
        rule = either(boolean, finite(0, 1))
    return _argument(cls.__name__, name, rule, lambda **x: cls(**x))


def _rule(name: str, kind: Any, limits: Limits, static: bool) -> Rule:
    if typing.get_origin(kind) is tuple:
        parts = typing.get_args(kind)
        first = parts[0]
        options = typing.get_args(first) if typing.get_origin(first) in (types.UnionType, typing.Union) else (first,)
        return tuples(either(*(_rule(name, x, limits, static) for x in options)), None if ... in parts else len(parts))
    if kind is type(None):
        return none
    if kind is bool:
        return boolean
    numbers = [x for x in limits.choices if not isinstance(x, str)]
    if kind is str:
        texts = [x for x in limits.choices if isinstance(x, str)]
        return among(*texts) if texts else (lambda x: isinstance(x, str))
    if kind is int and numbers:
        return among(*numbers)
    least = -values.INT32 - 1 if name in _SIGNED else 0
    low = least if limits.least is None else limits.least
    high = values.INT32 if limits.most is None else limits.most
    if kind is int:
        return whole(low, high, limits.odd)
    above = -np.inf if limits.above is None else limits.above
    number = finite(
        -values.FLOAT32 if limits.least is None else limits.least,
        values.FLOAT32 if limits.most is None else limits.most,
        float(above),
    )
    if kind is float:
        return number
    if kind is jax.Array and not static:
        return arrays(either(whole(low, high), number))
    return nothing


def _sampler(name: str) -> Argument:
    rule = {"temperature": finite(0), "top_k": whole(1), "top_p": finite(0, 1, above=0.0)}[name]
    allowed = either(none, rule, arrays(rule))
    base = {} if name == "temperature" else {"temperature": 1.0}
    return _argument("Sampler", name, allowed, lambda **x: Sampler(**{**base, **x}))


def _models() -> list[Argument]:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_q_heads", "num_kv_heads", "head_dim")
    made = [
        _argument(
            "ModelConfig",
            name,
            lambda x: type(x) is int and 1 <= x < 2**31,
            lambda **x: dataclasses.replace(_MODEL, **x),
        )
        for name in (*sizes, "max_position_embeddings")
    ]
    positive = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool) and finite(above=0.0)(x)  # noqa: E731
    scaling = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    for name in ("rms_norm_eps", "rope_theta", "embedding_multiplier", "residual_multiplier", "logits_multiplier"):
        made.append(_argument("ModelConfig", name, positive, lambda **x: dataclasses.replace(_MODEL, **x)))
    for name in ("tie_word_embeddings", "qkv_bias", "qk_norm"):
        made.append(_argument("ModelConfig", name, boolean, lambda **x: dataclasses.replace(_MODEL, **x)))
    ids = tuples(lambda x: isinstance(x, int) and 0 <= x < 61)
    made.append(_argument("ModelConfig", "eos_token_ids", ids, lambda **x: dataclasses.replace(_MODEL, **x)))
    made.append(_argument("ModelConfig", "dtype", nothing, lambda **x: dataclasses.replace(_MODEL, **x)))
    made.append(_argument("ModelConfig", "rope_scaling", none, lambda **x: dataclasses.replace(_MODEL, **x)))
    for name in scaling:
        made.append(_argument("RopeScaling", name, positive, lambda **x: RopeScaling(**{**scaling, **x})))
    return made


def functions(world: World) -> list[Argument]:
    """The arguments of public functions."""
    return [*_of_prompts(world), *_of_caches(world), *_of_names(world)]


def _of_prompts(world: World) -> list[Argument]:
    array = np.ones((_ROWS, _WIDTH), np.int32)
    length = rows(_ROWS, whole(1, _WIDTH))
    config = {"config": world.config}

    def sweep(**x: Any) -> Any:
        given = {"tokens": world.prompts, "methods": ["full"], **config, "max_new_tokens": 2, **x}
        return kvjax.sweep(world.params, given.pop("tokens"), given.pop("methods"), **given)

    def needed(**x: Any) -> Any:
        sizes = {"batch": 1, "prompt_slots": 8, "max_new_tokens": 4, **x}
        return kvjax.memory_needed(sizes.pop("method", "full"), sizes.pop("config", world.config), **sizes)

    made = [
        _argument("prefill", "tokens", _is_tokens, world.prefill, *_TOKENS),
        _argument("prefill", "config", nothing, world.prefill, "llama", TinyModel, {"vocab_size": 61}),
        _argument("prefill", "method", _is_method, world.prefill, *_METHODS),
        _argument("prefill", "params", nothing, world.prefill, *_wrong_params()),
        _argument("prefill", "max_new_tokens", either(whole(1, 58), none), world.prefill),
        _argument("prefill", "chunk_size", whole(1), world.prefill),
        _argument("prefill", "pad_multiple", whole(1), world.prefill),
        _argument("prefill", "lengths", either(length, none), lambda **x: world.prefill(tokens=array, **x), *_LENGTHS),
        _argument("pad_tokens", "tokens", lambda x: isinstance(x, (list, tuple, np.ndarray, jax.Array)), kvjax.pad_tokens),
        _argument(
            "pad_tokens",
            "lengths",
            either(rows(_ROWS, whole(0, _WIDTH)), none),
            lambda **x: kvjax.pad_tokens(array, **x),
        ),
        _argument("sweep", "tokens", _is_tokens, sweep, *_TOKENS),
        _argument("sweep", "methods", _is_methods, sweep, *([x] for x in _METHODS)),
        _argument("sweep", "max_new_tokens", whole(1, 58), sweep),
        _argument("sweep", "chunk_size", whole(1), sweep),
        _argument("sweep", "questions", either(none, _is_questions), sweep, *_TOKENS, [[1]], [[1], [2], [3]]),
        _argument("sweep", "eos_token_ids", _is_eos, sweep, *_EOS),
        _argument("memory_needed", "method", either(_is_method, _is_methods), needed, *_METHODS, [], ["ques"]),
        _argument("memory_needed", "config", nothing, needed, "llama"),
    ]
    made += [_argument("memory_needed", name, whole(1), needed) for name in ("batch", "prompt_slots", "max_new_tokens")]
    return made


def _of_caches(world: World) -> list[Argument]:
    made: list[Argument] = []
    caches = (world.config, {"length": 3})
    sampled = {"temperature": 1.0, "key": jax.random.key(0)}
    number = lambda rule: either(none, rule, arrays(rule))  # noqa: E731
    limits = either(none, rows(_ROWS, whole(0, 4)))
    for name, function in (("generate", kvjax.generate), ("stream", _streamed)):

        def run(function: Callable[..., Any] = function, **x: Any) -> Any:
            return world.call(function, **{"max_new_tokens": 4, **x})

        def draw(function: Callable[..., Any] = function, **x: Any) -> Any:
            return world.call(function, **{"max_new_tokens": 4, **sampled, **x})

        made += [
            _argument(name, "cache", nothing, run, *caches),
            _argument(name, "params", nothing, run, *_wrong_params()),
            _argument(name, "method", either(none, _is_method), run, *_METHODS, "quest", Quest()),
            _argument(name, "max_new_tokens", whole(1, _ROOM), run),
            _argument(name, "eos_token_ids", _is_eos, run, *_EOS),
            _argument(name, "temperature", number(finite(0)), draw),
            _argument(name, "top_k", number(whole(1)), draw),
            _argument(name, "top_p", number(finite(0, 1, above=0.0)), draw),
            _argument(name, "key", _is_key, draw),
        ]
    one = either(rows(_ROWS, whole(0, 60)))
    step = lambda **x: world.call(kvjax.decode_step, **{"tokens": [1, 2], **x})  # noqa: E731
    made += [
        _argument("generate", "limits", limits, lambda **x: world.call(kvjax.generate, max_new_tokens=4, **x), *_LENGTHS),
        _argument("stream", "block", whole(1), lambda **x: world.call(_streamed, max_new_tokens=4, **x)),
        _argument("decode_step", "tokens", one, step, [1], [1, 61], [2**32 + 5, 1]),
        _argument("decode_step", "cache", nothing, step, *caches),
        _argument("decode_step", "params", nothing, step, *_wrong_params()),
        _argument("decode_step", "active", _is_active, step, [1, 0]),
        _argument("extend", "tokens", _is_questions,
                  lambda **x: world.call(kvjax.extend, **x), *_TOKENS, [[1]], [[1] * 9, [1]]),
        _argument("extend", "cache", nothing, lambda **x: world.call(kvjax.extend, tokens=[[1], [2]], **x), *caches),
        _argument("extend", "lengths", either(none, rows(_ROWS, whole(0, 3))),
                  lambda **x: world.call(kvjax.extend, tokens=np.ones((_ROWS, 3), np.int32), **x), *_LENGTHS),
        _argument("fork", "copies", whole(1), lambda copies: kvjax.fork(world.cache, copies)),
        _argument("fork", "cache", nothing, lambda cache: kvjax.fork(cache), *caches),
    ]  # fmt: skip
    for name, function in (("generate", kvjax.generate), ("stream", _streamed), ("extend", kvjax.extend)):
        given = {"tokens": [[1], [2]]} if name == "extend" else {}
        spent = lambda function=function, given=given, **x: function(world.params, world.consumed, **given)  # noqa: E731
        made.append(_argument(name, "cache", nothing, spent))
    return made


def _streamed(*args: Any, **kwargs: Any) -> list:
    return list(kvjax.stream(*args, **kwargs))


def _of_names(world: World) -> list[Argument]:
    texts = lambda x: isinstance(x, str) and x.strip().lower() in registry.classes()  # noqa: E731
    strange = ("ques", "quest ", "a:b", "kvjax:Quest", "..:x", ":", "os:path", "QUEST2")
    return [
        _argument("make", "name", texts, lambda name: kvjax.make(name), *(x for x in strange if not texts(x))),
        _argument("make", "knob", nothing, lambda knob: kvjax.make("quest", **{f"bud{values.shown(knob)}": 3})),
        _argument("resolve", "method", _is_method, lambda method: resolve(method), *_METHODS),
        _argument(
            "parse_knobs", "budget", nothing, _parsed, "12", "budget", "=3", "budget=", "page_size=x", "budget=1.5"
        ),
        _argument("register", "cls", nothing, lambda cls: kvjax.register(cls), int, Full(), "quest", kvjax.Cache),
    ]


def _parsed(budget: Any) -> Any:
    if budget in ("12",) if isinstance(budget, str) else True:
        raise ValueError("not a text, which parse_knobs need not take; got nothing")
    return parse_knobs("quest", [budget])


def _argument(owner: str, name: str, allowed: Rule, call: Callable[..., Any], *more: Any) -> Argument:
    return Argument(f"{owner}({name}=...)", name, allowed, lambda value: call(**{name: value}), more)


_TOKENS: tuple[Any, ...] = (
    [1, 2], [[1.5]], [["a"]], [[None]], [[]], [[1], []], np.zeros((2, 0), np.int32), np.zeros((0, 2), np.int32),
    np.ones((2, 3), np.float32), np.ones((2, 3), bool), jnp.ones((3,), jnp.int32), [[[1]]], [[2**32 + 5]], [[10**30]],
    np.full((2, 3), 2**40), "text", ["text"], [[True, False]], [[1] * 4, 5], [[61]], [[-1]], [[1] * 100, [1] * 90],
)  # fmt: skip
_METHODS = (Quest, "ques", 3, [Full()], Full, "", object())
_LENGTHS: tuple[Any, ...] = (
    [1], [1, 2, 3], [7, 8], [-1, 2], [2**40, 1], "3", [1.0, 2.0], [True, True], [[1, 2]], ["a", 1], 3,
)  # fmt: skip
_EOS: tuple[Any, ...] = ([61], [-1], 61, [1.5], ["a"], [[1]], [2**32], "60", [None], [True])


def _wrong_params() -> tuple[Any, ...]:
    fewer = dataclasses.replace(_MODEL, num_layers=2, hidden_size=8)
    shapes = random_params(fewer, jax.random.key(0))
    right = random_params(_MODEL, jax.random.key(0))
    return (shapes, {}, None, jax.tree.map(lambda x: x.astype(jnp.int32), right), {"params": right}, [1, 2])


def _is_questions(x: Any) -> bool:
    """Whether these may follow two prompts; rows may be empty."""
    if isinstance(x, (np.ndarray, jax.Array)):
        return x.ndim == 2 and len(x) == _ROWS and (not x.size or _is_tokens(x))
    return (
        isinstance(x, list)
        and len(x) == _ROWS
        and all(isinstance(row, list) and (not row or _is_tokens([row])) for row in x)
    )


def _is_tokens(x: Any) -> bool:
    """Whether these may be prompts; careful, because what it allows is not tried."""
    listed = isinstance(x, (list, tuple)) and all(isinstance(row, (list, tuple, np.ndarray, jax.Array)) for row in x)
    if not x if isinstance(x, (list, tuple)) else not isinstance(x, (np.ndarray, jax.Array)):
        return False
    try:
        flat = [np.asarray(row) for row in x] if listed else [np.asarray(x)]
    except (ValueError, TypeError):
        return False
    dimensions = 1 if listed else 2
    return all(
        row.ndim == dimensions
        and row.size
        and row.dtype.kind in "iu"
        and 0 <= row.min()
        and row.max() < 61
        and row.shape[-1] < 50
        for row in flat
    )


def _is_method(x: Any) -> bool:
    return isinstance(x, kvjax.methods.Full) or (isinstance(x, str) and x.strip().lower() == "full")


def _is_methods(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and bool(x) and all(map(_is_method, x))


def _is_eos(x: Any) -> bool:
    fine = whole(0, 60)
    if x is None or fine(x) or (isinstance(x, (list, tuple, range)) and all(map(fine, x))):
        return True
    empty = isinstance(x, (np.ndarray, jax.Array)) and x.ndim == 1 and not x.size
    return empty or arrays(fine)(x) and x.ndim <= 1 and x.dtype.kind in "iu"


def _is_active(x: Any) -> bool:
    return x is None or rows(_ROWS, boolean, kind="b")(x)


def _is_key(x: Any) -> bool:
    if not isinstance(x, (np.ndarray, jax.Array)):
        return False
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or x.dtype == np.uint32
