"""JAX's own switches and transformations: whatever is switched on or around a call, the tokens are the same.

A case is a random structure of `tests.fuzz.laws` under one switch, or in one way of calling; each of them compiles programs
of its own, so these cases are the slowest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.testing.subject import STEPS, padded
from tests.fuzz import laws
from tests.fuzz.report import Outcome
from tests.fuzz.verdicts import verify

_SWITCHES, _WAYS = 2, 2  # of each structure
_WHERE = {"max_new_tokens": STEPS, "pad_multiple": 1}
_OF_KEYS = ("key", "prng", "threefry", "x64")
_Switch = Callable[[], contextlib.AbstractContextManager[Any]]
_SWITCH: dict[str, _Switch] = {
    "jax_enable_x64": lambda: jax.enable_x64(True),
    "jax_debug_nans": lambda: jax.debug_nans(True),
    "jax_numpy_rank_promotion=raise": lambda: jax.numpy_rank_promotion("raise"),
    "jax_numpy_dtype_promotion=strict": lambda: jax.numpy_dtype_promotion("strict"),
    "jax_default_matmul_precision=highest": lambda: jax.default_matmul_precision("highest"),
    "jax_default_device=cpu": lambda: jax.default_device(jax.devices("cpu")[0]),
    "jax_check_tracer_leaks": lambda: jax.checking_leaks(),
    "jax_debug_key_reuse": lambda: jax.debug_key_reuse(True),
    "jax_default_prng_impl=rbg": lambda: jax.default_prng_impl("rbg"),
    "jax_legacy_prng_key=error": lambda: jax.legacy_prng_key("error"),
    "jax_enable_checks": lambda: jax.enable_checks(True),
    "jax_threefry_partitionable=false": lambda: jax.threefry_partitionable(False),
    "jax_disable_jit": jax.disable_jit,
}


def check(seed: int, number: int) -> Iterator[Outcome]:
    """Give the outcomes of a structure: under some switches, in some ways, and with a budget out of range."""
    rng = np.random.default_rng([seed, 9, number])
    jax.clear_caches()
    structure = laws.Structure.random(seed, number)
    structure = dataclasses.replace(structure, method=laws.resident(structure.method))
    draw = laws.Draw(structure, seed, number * laws.DRAWS)
    about = draw.about()
    want = np.asarray(draw.base[1].tokens)
    names = [str(x) for x in rng.permutation(list(_SWITCH))]
    if structure.model.num_layers > 1 or structure.number % 4:  # operation by operation, each of them is a program
        names.remove("jax_disable_jit")
    for name in names[:_SWITCHES]:

        def switched(name: str = name) -> Any:
            with _SWITCH[name]():
                if any(word in name for word in _OF_KEYS):
                    _check_drawn(draw)
                return draw.go_on(draw.read()).tokens

        yield _same(f"under {name}: {about}", switched, want)
    for way in rng.permutation(len(_WAYS_OF_CALLING))[:_WAYS]:
        call = _WAYS_OF_CALLING[way]
        yield _same(f"{call.__name__.strip('_')}: {about}", functools.partial(call, draw), want)
    yield from _odd_budget(draw, about, rng)


def _check_drawn(draw: laws.Draw) -> None:
    """Refuse random tokens that are none of the vocabulary, or that a key does not give twice."""
    options = {"max_new_tokens": STEPS, "eos_token_ids": (), "temperature": 1.0, "top_p": 0.9}
    first, second = (kvjax.generate(draw.params, draw.read(), key=jax.random.key(7), **options).tokens for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_less(first, draw.model.vocab_size)


def _same(about: str, call: Callable[[], Any], want: np.ndarray) -> Outcome:
    def right(got: Any) -> str | None:
        return None if np.array_equal(got, want) else f"tokens {np.asarray(got).tolist()}, expected {want.tolist()}"

    return verify(about, call, right=right, named=None)


# ---- ways of calling ----------------------------------------------------------------------------------------------


def _tokens(draw: laws.Draw, method: Any) -> jax.Array:
    return draw.go_on(draw.read(method)).tokens


def _closure(draw: laws.Draw) -> Any:
    """A jitted function that closes over a cache."""
    cache = draw.read()
    return jax.jit(lambda params: kvjax.generate(params, cache, max_new_tokens=STEPS, eos_token_ids=()).tokens)(draw.params)


def _method_as_argument(draw: laws.Draw) -> Any:
    return jax.jit(lambda method: _tokens(draw, method))(draw.method)


def _stacked(draw: laws.Draw) -> Any:
    """Two copies of the method's traced values, on a first axis."""
    return jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), draw.method)


def _vmap_over_methods(draw: laws.Draw) -> Any:
    if not jax.tree.leaves(draw.method):
        return draw.base[1].tokens
    return jax.vmap(lambda method: _tokens(draw, method))(_stacked(draw))[1]


def _map_over_methods(draw: laws.Draw) -> Any:
    if not jax.tree.leaves(draw.method):
        return draw.base[1].tokens
    return jax.lax.map(lambda method: _tokens(draw, method), _stacked(draw))[0]


def _scan_over_steps(draw: laws.Draw) -> Any:
    """`kvjax.decode_step` in `jax.lax.scan`, which feeds the most probable token."""

    def step(cache: kvjax.Cache, _: None) -> tuple[kvjax.Cache, jax.Array]:
        tokens = cache.logits.argmax(axis=1).astype(jnp.int32)
        return kvjax.decode_step(draw.params, cache, tokens), tokens

    run = jax.jit(lambda cache: jax.lax.scan(step, cache, length=STEPS)[1])
    return run(draw.read()).T


def _streamed(draw: laws.Draw) -> Any:
    made = kvjax.stream(draw.params, draw.read(), max_new_tokens=STEPS, block=3, eos_token_ids=())
    return np.concatenate([np.asarray(block) for block in made], axis=1)


def _in_64_bits(draw: laws.Draw) -> Any:
    """Prompts and lengths in int64, as NumPy makes them."""
    tokens, lengths = padded(draw.prompts)
    options = {"config": draw.model, "method": draw.method, **_WHERE}
    cache = kvjax.prefill(draw.params, tokens.astype(np.int64), lengths=lengths.astype(np.int64), **options)
    return draw.go_on(cache).tokens


_WAYS_OF_CALLING = (
    _closure, _method_as_argument, _vmap_over_methods, _map_over_methods, _scan_over_steps, _streamed, _in_64_bits,
)  # fmt: skip


def _odd_budget(draw: laws.Draw, about: str, rng: np.random.Generator) -> Iterator[Outcome]:
    """A traced budget out of range is clamped: the logits are finite, and between one token and all are attended to."""
    if not isinstance(vars(draw.method).get("budget"), (int, jax.Array)):
        return
    budget = int(rng.choice((0, 1, -5, 3, 10**6, 2**31 - 1)))

    def run() -> Any:
        made = jax.jit(lambda x: draw.go_on(draw.read(dataclasses.replace(draw.method, budget=x))))(jnp.int32(budget))
        return made.tokens, made.cache.logits, made.stats.attended, made.stats.length

    def right(got: Any) -> str | None:
        tokens, logits, attended, length = map(np.asarray, got)
        if not (np.isfinite(logits).all() and (0 <= tokens).all() and (tokens < draw.model.vocab_size).all()):
            return f"logits {logits.min()} to {logits.max()}, tokens {tokens.tolist()}"
        inside = ((0 < attended) & (attended < length + 0.5)).all()
        return None if inside else f"attended to {attended.tolist()} of {length.tolist()} tokens"

    yield verify(f"a traced budget of {budget}: {about}", run, right=right, named=None)
