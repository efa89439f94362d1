"""Arguments of public functions: values that each refuses by its name. tests/kvjax/test_fields.py has fields of methods."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import kvjax
from kvjax.decoding import Sampler
from kvjax.methods import Full, Quest, SnapKV
from kvjax.registry import parse_knobs, resolve
from kvjax.testing.model import TinyModel
from kvjax.wrappers import DenseBelow, LayerBudgets, Periodic, PerLayer, Prefill, Stages, Twilight
from models import ModelConfig, random_params
from tests.fuzz.values import EMPTY, FRACTIONS, NO_NUMBERS, OBJECTS, no_count, no_row, no_share
from tests.fuzz.verdicts import judge

_WORDS = {  # what a refusal may tell in place of the name
    "questions": ("token",), "max_new_tokens": ("more exceed",), "method": ("no module", "the module"),
    "knob": ("page_size", "budget"), "lengths": ("every prompt needs",),
}  # fmt: skip
_ROWS, _ROOM, _WIDTH = 2, 8, 6
_MODEL = ModelConfig(
    vocab_size=61, hidden_size=16, intermediate_size=16, num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=8,
    max_position_embeddings=64, eos_token_ids=(60,),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of a function or a class.

    Attributes:
        owner: the function or the class, in words.
        name: of the argument, which a refusal tells, in the singular too and in capitals; see also `_WORDS`.
        call: takes the argument by its name.
        bad: draws values that must be refused.
        known: some of them.
    """

    owner: str
    name: str
    call: Callable[..., Any]
    bad: st.SearchStrategy[Any]
    known: tuple[Any, ...]

    def refuse(self, value: Any) -> None:
        """Judge the refusal of a bad value."""
        words = self.name.rstrip("s"), *_WORDS.get(self.name, ())
        about = f"{self.owner}({self.name}=...) given {type(value).__name__} {value!r:.120}"
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
        sizes = {"config": self.config, "max_new_tokens": _ROOM, "pad_multiple": 1}
        return kvjax.prefill(**{"params": self.params, "tokens": self.prompts, **sizes, **options})

    def call(self, function: Callable[..., Any], **options: Any) -> Any:
        """A function of params and a cache, with some arguments changed."""
        return function(**{"params": self.params, "cache": None if "cache" in options else self.cache, **options})


@functools.cache
def world() -> World:
    """The world of this process."""
    return World()


def check(data: st.DataObject, folder: pathlib.Path) -> Iterator[None]:
    """Give one bad value to one argument."""
    argument = data.draw(st.sampled_from(arguments()))
    argument.refuse(data.draw(argument.bad | st.sampled_from(argument.known) if argument.known else argument.bad))
    yield


_TOKENS: tuple[Any, ...] = (
    [[1], []], np.zeros((2, 0), np.int32), [1, 2], [[1.5]], [["a"]], [[None]], [[]], np.zeros((0, 2), np.int32),
    np.ones((2, 3), np.float32), np.ones((2, 3), bool), np.ones((3,), np.int32), [[[1]]], [[2**32 + 5]], [[10**30]],
    np.full((2, 3), 2**40), "text", ["text"], [[True, False]], [[1] * 4, 5], [[61]], [[-1]], [[1] * 100, [1] * 90],
)  # fmt: skip
_METHODS = (Quest, "ques", 3, [Full()], Full, "", object())
_STRANGE = ("ques", "a:b", "kvjax:Quest", "..:x", ":", "os:path", "QUEST2")
_LENGTHS: tuple[Any, ...] = (
    [1], [1, 2, 3], [7, 8], [-1, 2], [2**40, 1], "3", [1.0, 2.0], [True, True], [[1, 2]], ["a", 1], 3,
)  # fmt: skip
_EOS: tuple[Any, ...] = ([61], [-1], 61, -1, [1.5], ["a"], [[1]], [2**32], "60", [None], [True])


@functools.cache
def arguments() -> tuple[Argument, ...]:
    """List the arguments, and for each what draws bad values and some of them. Most arguments take None."""
    here, array, quest = world(), np.ones((_ROWS, _WIDTH), np.int32), Quest(budget=16)
    some = FRACTIONS | NO_NUMBERS  # what no argument takes, but for one of truth values
    other = some | st.none() | EMPTY
    method, tokens, size, count = (other, *_METHODS), (other, *_TOKENS), (no_count(),), (no_count() | st.none(),)
    caches, params = (other, here.config, {"length": 3}), (other, *_wrong_params())
    questions = *_TOKENS[2:], [[1]], [[1], [2], [3]]  # the first two may follow two prompts
    step = functools.partial(here.call, kvjax.decode_step, tokens=[1, 2])
    asked = functools.partial(here.call, kvjax.extend, tokens=[[1], [2]])
    sweep = functools.partial(
        kvjax.sweep, params=here.params, tokens=here.prompts, methods=["full"], config=here.config, max_new_tokens=2
    )
    sizes = {"method": "full", "config": here.config, "batch": 1, "prompt_slots": 8, "max_new_tokens": 4}
    table: dict[str, tuple[Callable[..., Any], dict[str, tuple[Any, ...]]]] = {
        "prefill": (here.prefill, {
            "tokens": tokens, "config": (other, "llama", TinyModel, {"vocab_size": 61}), "params": params, "method": method,
            "max_new_tokens": (no_count(most=58), 0, 2.5, 2**40), "chunk_size": count, "pad_multiple": count,
        }),
        "prefill of an array": (functools.partial(here.prefill, tokens=array), {
            "lengths": (no_row(_ROWS, 1, _WIDTH), *_LENGTHS),
        }),
        "pad_tokens": (kvjax.pad_tokens, {"tokens": (OBJECTS | st.none(), 3, 1.5, True)}),
        "pad_tokens to a width": (functools.partial(kvjax.pad_tokens, array), {"multiple": count}),
        "pad_tokens of an array": (functools.partial(kvjax.pad_tokens, array), {"lengths": (no_row(_ROWS, 0, _WIDTH),)}),
        "sweep": (sweep, {
            "tokens": tokens, "methods": (other, "full", Full(), *([x] for x in _METHODS)),
            "max_new_tokens": (no_count(most=58) | st.none(),), "chunk_size": count, "eos_token_ids": (some, *_EOS),
            "questions": (some, *questions),
        }),
        "memory_needed": (functools.partial(kvjax.memory_needed, **sizes), {
            "method": (FRACTIONS | OBJECTS | st.none(), *(x for x in _METHODS if type(x) is not list), [], ["ques"]),
            "config": (other, "llama"), **dict.fromkeys(("batch", "prompt_slots", "max_new_tokens"), count),
        }),
        "decode_step": (step, {
            "tokens": (no_row(_ROWS, 0, 60) | st.none(), [1], [1, 61], [2**32 + 5, 1]), "cache": caches, "params": params,
            "active": (no_row(_ROWS, 0, 1), [1, 0]),
        }),
        "extend": (asked, {
            "tokens": (some | st.none(), *questions, [[1] * 9, [1]]), "cache": caches,
        }),
        "extend by an array": (functools.partial(asked, tokens=array[:, :3]), {"lengths": (no_row(_ROWS, 0, 3), *_LENGTHS)}),
        "fork": (lambda **x: kvjax.fork(**{"cache": here.cache, **x}), {"copies": count, "cache": caches}),
        "make": (lambda method: kvjax.make(method), {"method": (OBJECTS, *_STRANGE)}),
        "make quest": (lambda knob: kvjax.make("quest", **{knob: 3}), {"knob": (st.text(max_size=3), "budgets")}),
        "resolve": (resolve, {"method": method}),
        "parse_knobs": (lambda knob: parse_knobs("quest", [knob]), {
            "knob": (st.text("ab c", max_size=3), "12", "budget", "=3", "budget=", "page_size=x", "budget=1.5"),
        }),
        "register": (kvjax.register, {"cls": (other, int, Full(), "quest", kvjax.Cache)}),
        "Stages": (functools.partial(Stages, evict=SnapKV(), retrieve=quest), {"evict": method, "retrieve": method}),
        "DenseBelow": (functools.partial(DenseBelow, length=9), {"method": method}),
        "Periodic": (Periodic, {"evict": method}),
        "Twilight": (Twilight, {"method": method}),
        "Prefill": (functools.partial(Prefill, method=quest), {"method": method, "pattern": method}),
        "PerLayer": (functools.partial(PerLayer, layers={0: Full()}, default=Full()), {
            "layers": (FRACTIONS | st.none() | EMPTY, {"a": 1}), "default": method,
        }),
        "LayerBudgets": (functools.partial(LayerBudgets, method=quest, shares=(1.0,)), {
            "method": method, "shares": (other, (0.0,), (-1.0,), ("a",), (float("nan"),)),
        }),
    }  # fmt: skip
    number, biases = (no_share(float("inf")),), (FRACTIONS, {-1: 1.0}, {1: "a"}, {1.5: 1.0}, np.ones(3, np.int32), [1.0])
    table["Sampler"] = functools.partial(Sampler, temperature=1.0), {
        "min_p": (*number, 1.5), "repetition_penalty": (*number, 0.0), "no_repeat_ngram": size, "logit_bias": biases,
        "processor": (FRACTIONS,),
    }  # fmt: skip
    table["Sampler.read"] = Sampler().read, {"tokens": (OBJECTS | st.none(), 3, 1.5, True)}
    for name, function in (("generate", kvjax.generate), ("stream", lambda **x: list(kvjax.stream(**x)))):
        run = functools.partial(here.call, function, max_new_tokens=4)
        of_rows = {"limits": (no_row(_ROWS, 0, 4), *_LENGTHS)} if name == "generate" else {"block": count}
        table[name] = run, {
            "cache": caches, "params": params, "method": (some, *_METHODS, "quest", quest),
            "max_new_tokens": (no_count(most=_ROOM) | st.none(),), "eos_token_ids": (some, *_EOS), **of_rows,
            "sampler": (some, {"temperature": 1.0}, Sampler(repetition_penalty=1.1)),
        }  # fmt: skip
        table[f"{name} at random"] = functools.partial(run, temperature=1.0, key=jax.random.key(0)), {
            "temperature": (no_share(float("inf")),), "top_k": size, "top_p": (no_share(1.0),), "key": (other,),
        }  # fmt: skip
        table[f"{name} of a consumed cache"] = functools.partial(_consumed, here, function), {"cache": (st.none(),)}
    consumed = functools.partial(_consumed, here, kvjax.extend, tokens=[[1], [2]])
    table["extend of a consumed cache"] = consumed, {"cache": (st.none(),)}
    return tuple(
        Argument(owner, name, call, bad, tuple(known))
        for owner, (call, rows) in table.items()
        for name, (bad, *known) in rows.items()
    )


def _consumed(here: World, function: Callable[..., Any], cache: Any, **options: Any) -> Any:
    """Use a cache that was consumed, whatever ``cache`` is."""
    return here.call(function, cache=here.consumed, **options)


def _wrong_params() -> tuple[Any, ...]:
    fewer = dataclasses.replace(_MODEL, num_layers=2, hidden_size=8)
    shapes, right = (random_params(config, jax.random.key(0)) for config in (fewer, _MODEL))
    integers = jax.tree.map(lambda x: x.astype(jnp.int32), right)
    return (shapes, {}, {"embed": np.array(["a"])}, integers, {"params": right}, [1, 2])
