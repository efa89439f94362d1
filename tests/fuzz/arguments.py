"""What takes values: the fields of methods and models, and the arguments of public functions; bad values must be refused.

Rules of arguments are written here a second time, from docstrings; those of fields come from annotations and declared limits.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

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
from tests.fuzz.values import Rule, among, arrays, boolean, either, finite, none, nothing, rows, tuples, whole
from tests.fuzz.verdicts import judge

_WORDS = {  # what a refusal may tell in place of the name
    "questions": ("token",), "max_new_tokens": ("more exceed",), "method": ("no module", "the module"),
    "knob": ("page_size", "budget"),
}  # fmt: skip
_ROWS, _ROOM, _WIDTH = 2, 8, 6
_MODEL = ModelConfig(
    vocab_size=61, hidden_size=16, intermediate_size=16, num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=8,
    max_position_embeddings=64, eos_token_ids=(60,),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Argument:
    """Something that takes a value.

    Attributes:
        owner: a class or a function.
        name: of the argument, which a refusal tells, in the singular too and in capitals; see also `_WORDS`.
        allowed: the rule; values that it allows are not tried.
        call: takes the argument by its name.
        more: values that it should refuse, beside random ones.
    """

    owner: str
    name: str
    allowed: Rule
    call: Callable[..., Any]
    more: tuple[Any, ...] = ()

    def bad_values(self) -> st.SearchStrategy[Any]:
        """Draw a value that must be refused."""
        options = values.anything() | st.sampled_from(self.more) if self.more else values.anything()
        return options.filter(lambda value: not self.allowed(value))

    def refuse(self, value: Any) -> None:
        """Judge the refusal of a bad value."""
        about = f"{self.owner}({self.name}=...) given {values.shown(value)}"
        words = self.name.rstrip("s"), *_WORDS.get(self.name, ())
        judge(about, lambda: self.call(**{self.name: value}), named=words, errors=(ValueError, TypeError))


class World:
    """A tiny model and what the functions need of it, made when they are used first; one for all cases."""

    config = _MODEL
    prompts = ((1, 2, 3, 4, 5, 6), (7, 8, 9))

    @functools.cached_property
    def params(self) -> Any:
        """Of `config`."""
        return random_params(self.config, jax.random.key(0))

    @functools.cached_property
    def _filled(self) -> kvjax.Cache:
        return self.prefill()

    @property
    def cache(self) -> kvjax.Cache:
        """A cache of its own, with two rows."""
        return kvjax.fork(self._filled)

    @functools.cached_property
    def consumed(self) -> kvjax.Cache:
        """A cache that cannot be used any more."""
        cache = self.cache
        kvjax.decode_step(self.params, cache, [1, 2])
        return cache

    def prefill(self, **options: Any) -> kvjax.Cache:
        """`kvjax.prefill` with some arguments changed."""
        sizes = {"config": self.config, "max_new_tokens": _ROOM, "pad_multiple": 1, **options}
        return kvjax.prefill(sizes.pop("params", self.params), sizes.pop("tokens", self.prompts), **sizes)

    def sweep(self, **options: Any) -> Any:
        """`kvjax.sweep` with some arguments changed."""
        sizes = {"config": self.config, "max_new_tokens": 2, **options}
        return kvjax.sweep(self.params, sizes.pop("tokens", self.prompts), sizes.pop("methods", ["full"]), **sizes)

    def needed(self, **options: Any) -> Any:
        """`kvjax.memory_needed` with some arguments changed."""
        sizes = {"batch": 1, "prompt_slots": 8, "max_new_tokens": 4, **options}
        return kvjax.memory_needed(sizes.pop("method", "full"), sizes.pop("config", self.config), **sizes)

    def call(self, function: Callable[..., Any], **options: Any) -> Any:
        """A function of params and a cache, with some arguments changed."""
        cache = options.pop("cache") if "cache" in options else self.cache
        return function(options.pop("params", self.params), cache, **options)


@functools.cache
def world() -> World:
    """The world of this process."""
    return World()


def check(data: st.DataObject, folder: pathlib.Path) -> Iterator[None]:
    """Give one bad value to one field or argument."""
    argument = data.draw(st.sampled_from(fields()) | st.sampled_from(functions()))
    argument.refuse(data.draw(argument.bad_values()))
    yield


# ---- fields -------------------------------------------------------------------------------------------------------


@functools.cache
def fields() -> tuple[Argument, ...]:
    """The fields of all methods, wrappers and descriptions of models."""
    quest, full = Quest(budget=16), Full()
    share = finite(0, 1, above=0.0)
    wrappers: tuple[tuple[type, dict[str, Any], dict[str, Rule]], ...] = (
        (Stages, {"evict": full, "retrieve": quest}, {"evict": nothing, "retrieve": nothing}),
        (DenseBelow, {"length": 9, "method": quest}, {"method": nothing, "length": whole(1)}),
        (Periodic, {"evict": SnapKV()}, {"evict": nothing, "interval": whole(1)}),
        (Twilight, {"method": quest}, {"method": nothing, "mass": either(share, arrays(share))}),
        (LayerBudgets, {"method": quest, "shares": (1.0,)}, {"method": nothing, "shares": tuples(finite(above=0.0))}),
        (Prefill, {"method": quest}, {"method": nothing, "pattern": nothing}),
        (PerLayer, {"layers": {0: full}, "default": full}, {"layers": among({}), "default": nothing}),
    )
    declared = [_field(cls, field) for cls in registry.classes().values() for field in dataclasses.fields(cls)]
    declared += [
        Argument(cls.__name__, name, rule, functools.partial(cls, **options))
        for cls, options, rules in wrappers
        for name, rule in rules.items()
    ]
    sampling = {"temperature": finite(0), "top_k": whole(1), "top_p": share}
    for name, rule in sampling.items():
        sampler = functools.partial(Sampler, **{} if name == "temperature" else {"temperature": 1.0})
        declared.append(Argument("Sampler", name, either(none, rule, arrays(rule)), sampler))
    # A method is a good value where methods are expected, so it is not tried there.
    takes = ("evict", "retrieve", "method", "default")
    is_method = lambda x: isinstance(x, Full)  # noqa: E731
    declared = [dataclasses.replace(x, allowed=either(x.allowed, is_method)) if x.name in takes else x for x in declared]
    return (*declared, *_fields_of_models())


def _field(cls: type, field: dataclasses.Field) -> Argument:
    rule = _rule(field.name, typing.get_type_hints(cls)[field.name], field.metadata.get("limits", Limits()), field.metadata)
    rule = either(none, rule) if field.default is None else rule
    if field.name == "boundary":
        rule = lambda x: x is None or (isinstance(x, (np.ndarray, jax.Array)) and x.dtype == bool and x.ndim == 1)  # noqa: E731
    if field.name == "offload":
        rule = either(boolean, finite(0, 1))
    return Argument(cls.__name__, field.name, rule, cls)


def _rule(name: str, kind: Any, limits: Limits, metadata: Any) -> Rule:
    """Say what a field of an annotation takes. Whole numbers count something, but for seeds, and are not negative."""
    parts = typing.get_args(kind)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return either(*(_rule(name, part, limits, metadata) for part in parts))
    if typing.get_origin(kind) is tuple:
        return tuples(_rule(name, parts[0], limits, metadata), None if ... in parts else len(parts))
    chosen = [x for x in limits.choices if isinstance(x, str) == (kind is str)]
    if chosen and kind in (str, int):
        return among(*chosen)
    within = lambda x: limits.allow(values.plain(x))  # noqa: E731
    least = 0 if limits.least is None and name != "seed" else -values.INT32 - 1
    integer, number = (lambda x: whole(least)(x) and within(x)), (lambda x: finite()(x) and within(x))
    known = {type(None): none, bool: boolean, str: lambda x: isinstance(x, str), int: integer, float: number}
    if kind is jax.Array and not metadata.get("static"):
        return arrays(either(integer, number))
    return known.get(kind, nothing)


def _fields_of_models() -> Iterator[Argument]:
    config, size = functools.partial(dataclasses.replace, _MODEL), lambda x: type(x) is int and 1 <= x < 2**31
    positive = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool) and finite(above=0.0)(x)  # noqa: E731
    rules: dict[str, Rule] = {
        **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_q_heads"), size),
        **dict.fromkeys(("num_kv_heads", "head_dim", "max_position_embeddings"), size),
        **dict.fromkeys(("rms_norm_eps", "rope_theta", "embedding_multiplier", "residual_multiplier"), positive),
        **dict.fromkeys(("tie_word_embeddings", "qkv_bias", "qk_norm"), boolean),
        "logits_multiplier": positive, "dtype": nothing, "rope_scaling": none,
        "eos_token_ids": tuples(lambda x: isinstance(x, int) and 0 <= x < 61),
    }  # fmt: skip
    yield from (Argument("ModelConfig", name, rule, config) for name, rule in rules.items())
    scaling = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    yield from (Argument("RopeScaling", x, positive, functools.partial(RopeScaling, **scaling)) for x in scaling)


# ---- functions ----------------------------------------------------------------------------------------------------

_TOKENS: tuple[Any, ...] = (
    [1, 2], [[1.5]], [["a"]], [[None]], [[]], [[1], []], np.zeros((2, 0), np.int32), np.zeros((0, 2), np.int32),
    np.ones((2, 3), np.float32), np.ones((2, 3), bool), np.ones((3,), np.int32), [[[1]]], [[2**32 + 5]], [[10**30]],
    np.full((2, 3), 2**40), "text", ["text"], [[True, False]], [[1] * 4, 5], [[61]], [[-1]], [[1] * 100, [1] * 90],
)  # fmt: skip
_METHODS = (Quest, "ques", 3, [Full()], Full, "", object())
_LENGTHS: tuple[Any, ...] = (
    [1], [1, 2, 3], [7, 8], [-1, 2], [2**40, 1], "3", [1.0, 2.0], [True, True], [[1, 2]], ["a", 1], 3,
)  # fmt: skip
_EOS: tuple[Any, ...] = ([61], [-1], 61, [1.5], ["a"], [[1]], [2**32], "60", [None], [True])
_STRANGE = ("ques", "quest ", "a:b", "kvjax:Quest", "..:x", ":", "os:path", "QUEST2")


@functools.cache
def functions() -> tuple[Argument, ...]:
    """The arguments of public functions: rules, and values that must be refused."""
    here, array = world(), np.ones((_ROWS, _WIDTH), np.int32)
    caches, params = (nothing, here.config, {"length": 3}), (nothing, *_wrong_params())
    option = lambda rule: either(none, rule)  # noqa: E731
    number = lambda rule: (either(none, rule, arrays(rule)),)  # noqa: E731
    of_row = lambda least, most: option(rows(_ROWS, whole(least, most)))  # noqa: E731
    known_name = lambda x: isinstance(x, str) and x.strip().lower() in registry.classes()  # noqa: E731
    sequence = lambda x: isinstance(x, (list, tuple, np.ndarray, jax.Array))  # noqa: E731
    wrapped = ["full", Full(), *([x] for x in _METHODS)]
    step = functools.partial(here.call, kvjax.decode_step)
    asked = functools.partial(here.call, kvjax.extend)
    table: dict[str, tuple[Callable[..., Any], dict[str, tuple[Any, ...]]]] = {
        "prefill": (here.prefill, {
            "tokens": (_is_tokens, *_TOKENS), "config": (nothing, "llama", TinyModel, {"vocab_size": 61}), "params": params,
            "method": (_is_method, *_METHODS), "max_new_tokens": (option(whole(1, 58)), 0, 2.5, 2**40),
            "chunk_size": (whole(1), None),
            "pad_multiple": (whole(1),),
        }),
        "prefill of an array": (functools.partial(here.prefill, tokens=array), {"lengths": (of_row(1, _WIDTH), *_LENGTHS)}),
        "pad_tokens": (kvjax.pad_tokens, {"tokens": (sequence,)}),
        "pad_tokens to a width": (functools.partial(kvjax.pad_tokens, array), {"multiple": (whole(1),)}),
        "pad_tokens of an array": (functools.partial(kvjax.pad_tokens, array), {"lengths": (of_row(0, _WIDTH),)}),
        "sweep": (here.sweep, {
            "tokens": (_is_tokens, *_TOKENS), "methods": (_is_methods, *wrapped), "max_new_tokens": (whole(1, 58),),
            "chunk_size": (whole(1),), "eos_token_ids": (_is_eos, *_EOS),
            "questions": (option(_is_questions), *_TOKENS, [[1]], [[1], [2], [3]]),
        }),
        "memory_needed": (here.needed, {
            "method": (either(_is_method, _is_methods), *_METHODS, [], ["ques"]), "config": (nothing, "llama"),
            **dict.fromkeys(("batch", "prompt_slots", "max_new_tokens"), (whole(1),)),
        }),
        "decode_step": (lambda **x: step(**{"tokens": [1, 2], **x}), {
            "tokens": (rows(_ROWS, whole(0, 60)), [1], [1, 61], [2**32 + 5, 1]), "cache": caches, "params": params,
            "active": (lambda x: x is None or rows(_ROWS, boolean, kind="b")(x), [1, 0]),
        }),
        "extend": (lambda **x: asked(**{"tokens": [[1], [2]], **x}), {
            "tokens": (_is_questions, *_TOKENS, [[1]], [[1] * 9, [1]]), "cache": caches,
        }),
        "extend by an array": (functools.partial(asked, tokens=array[:, :3]), {"lengths": (of_row(0, 3), *_LENGTHS)}),
        "fork": (lambda **x: kvjax.fork(**{"cache": here.cache, **x}), {"copies": (whole(1),), "cache": caches}),
        "make": (lambda method: kvjax.make(method), {"method": (known_name, *_STRANGE)}),
        "make quest": (lambda knob: kvjax.make("quest", **{f"bud{values.shown(knob)}": 3}), {"knob": (nothing,)}),
        "resolve": (resolve, {"method": (_is_method, *_METHODS)}),
        "parse_knobs": (lambda knob: parse_knobs("quest", [knob]), {
            "knob": (lambda x: not isinstance(x, str), "12", "budget", "=3", "budget=", "page_size=x", "budget=1.5"),
        }),
        "register": (kvjax.register, {"cls": (nothing, int, Full(), "quest", kvjax.Cache)}),
    }  # fmt: skip
    for name, function in (("generate", kvjax.generate), ("stream", lambda *args, **x: list(kvjax.stream(*args, **x)))):
        run = functools.partial(here.call, function, max_new_tokens=4)
        sampled = functools.partial(run, temperature=1.0, key=jax.random.key(0))
        of_rows = {"limits": (of_row(0, 4), *_LENGTHS)} if name == "generate" else {"block": (whole(1),)}
        table[name] = run, {
            "cache": caches, "params": params, "method": (option(_is_method), *_METHODS, "quest", Quest()),
            "max_new_tokens": (whole(1, _ROOM),), "eos_token_ids": (_is_eos, *_EOS), **of_rows,
        }  # fmt: skip
        table[f"{name} at random"] = sampled, {
            "temperature": number(finite(0)), "top_k": number(whole(1)), "top_p": number(finite(0, 1, above=0.0)),
            "key": (_is_random_key,),
        }  # fmt: skip
        table[f"{name} of a consumed cache"] = functools.partial(_consumed, here, function), {"cache": (nothing,)}
    table["extend of a consumed cache"] = (
        functools.partial(_consumed, here, kvjax.extend, tokens=[[1], [2]]),
        {"cache": (nothing,)},
    )
    return tuple(
        Argument(owner, name, rule, call, tuple(more))
        for owner, (call, rules) in table.items()
        for name, (rule, *more) in rules.items()
    )


def _consumed(here: World, function: Callable[..., Any], cache: Any, **options: Any) -> Any:
    """Use a cache that was consumed, whatever ``cache`` is."""
    return function(here.params, here.consumed, **options)


def _wrong_params() -> tuple[Any, ...]:
    fewer = dataclasses.replace(_MODEL, num_layers=2, hidden_size=8)
    shapes, right = (random_params(config, jax.random.key(0)) for config in (fewer, _MODEL))
    integers = jax.tree.map(lambda x: x.astype(jnp.int32), right)
    return (shapes, {}, None, {"embed": np.array(["a"])}, integers, {"params": right}, [1, 2])


def _is_questions(x: Any) -> bool:
    """Whether these may follow two prompts; rows may be empty."""
    if isinstance(x, (np.ndarray, jax.Array)):
        return x.ndim == 2 and len(x) == _ROWS and (not x.size or _is_tokens(x))
    return (
        isinstance(x, list) and len(x) == _ROWS and all(isinstance(row, list) and (not row or _is_tokens([row])) for row in x)
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
    right = lambda row: row.dtype.kind in "iu" and 0 <= row.min() and row.max() < 61 and row.shape[-1] < 50  # noqa: E731
    return all(row.ndim == (1 if listed else 2) and row.size and right(row) for row in flat)


def _is_method(x: Any) -> bool:
    return isinstance(x, kvjax.methods.Full) or (isinstance(x, str) and x.strip().lower() == "full")


def _is_methods(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and bool(x) and all(map(_is_method, x))


def _is_eos(x: Any) -> bool:
    fine = whole(0, 60)
    if x is None or fine(x) or (isinstance(x, (list, tuple, range)) and all(map(fine, x))):
        return True
    if not isinstance(x, (np.ndarray, jax.Array)) or x.ndim > 1:
        return False
    return not x.size or arrays(fine)(x) and x.dtype.kind in "iu"


def _is_random_key(x: Any) -> bool:
    return values.is_key(x) or isinstance(x, (np.ndarray, jax.Array)) and x.dtype == np.uint32
