"""JAX's own switches and transformations: whatever is switched on or around a call, the tokens are the same.

A case is a random structure of `tests.fuzz.laws`: its draws in some ways of calling, with a budget out of range, and under
some switches at once. Each of these compiles programs of its own for a structure, which its draws share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import kvjax
from kvjax.testing.subject import ROOM, STEPS, padded
from tests.fuzz import laws
from tests.fuzz.verdicts import judge

DRAWS, _WAYS = 8, 3  # of each structure
_FREE = {"max_new_tokens": STEPS, "eos_token_ids": ()}  # no token ends a row
_OF_KEYS = ("key", "prng", "threefry", "x64")
_SWITCHES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
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
}


def check(data: st.DataObject, folder: pathlib.Path) -> Iterator[None]:
    """Check the draws of a structure.

    Programs are compiled for the first draw, and the others run them. The caches are cleared before switches are set, because
    what is compiled is not traced again: a switch would change nothing.
    """
    structure = laws.Structure.random(data.draw(laws.NUMBERS))
    rng = np.random.default_rng([structure.number, 9])
    jax.clear_caches()
    structure = dataclasses.replace(structure, method=laws.resident(structure.method))
    draws = [laws.Draw(structure, number) for number in range(DRAWS)]
    want = [np.asarray(draw.base[1].tokens) for draw in draws]
    ways = [name for name in WAYS if jax.tree.leaves(structure.method) or "over_methods" not in name]
    for name in [str(x) for x in rng.permutation(ways)][:_WAYS]:
        some = slice(1 if name == "closure" else None)  # a constant cache makes a program of its own
        for draw, tokens in zip(draws[some], want[some], strict=True):
            _same(f"{name}: {draw.about()}", functools.partial(WAYS[name], draw), tokens)
            yield
    if isinstance(vars(structure.method).get("budget"), (int, jax.Array)):
        for draw in draws:
            _odd_budget(draw, int(rng.choice((0, 1, -5, 3, 10**6, 2**31 - 1))))
            yield
    names = sorted(str(x) for x in rng.choice(list(_SWITCHES), rng.integers(1, len(_SWITCHES)), replace=False))
    yield from _switched(names, draws, want)
    if structure.model.num_layers == 1 and structure.number % 4 == 0:  # operation by operation, each of them is a program
        with jax.disable_jit():
            yield from _switched([], draws[:1], want[:1])


def _switched(names: Sequence[str], draws: Sequence[laws.Draw], want: Sequence[np.ndarray]) -> Iterator[None]:
    """Check each draw under all of these switches."""
    jax.clear_caches()
    drawn = any(word in name for word in _OF_KEYS for name in names)
    for at, (draw, tokens) in enumerate(zip(draws, want, strict=True)):

        def switched(draw: laws.Draw = draw, first: bool = at == 0) -> Any:
            with contextlib.ExitStack() as stack:
                for name in names:
                    stack.enter_context(_SWITCHES[name]())
                if first and drawn:
                    _check_drawn(draw)
                return draw.go_on(draw.read()).tokens

        _same(f"under {' and '.join(names) or 'no jit'}: {draw.about()}", switched, tokens)
        yield


def _check_drawn(draw: laws.Draw) -> None:
    """Refuse random tokens that are none of the vocabulary, or that a key does not give twice."""
    options = {**_FREE, "temperature": 1.0, "top_p": 0.9}
    first, second = (kvjax.generate(draw.params, draw.read(), key=jax.random.key(7), **options).tokens for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_less(first, draw.model.vocab_size)


def _same(about: str, call: Callable[[], Any], want: np.ndarray) -> None:
    def right(got: Any) -> str | None:
        return None if np.array_equal(got, want) else f"tokens {np.asarray(got).tolist()}, expected {want.tolist()}"

    judge(about, call, right=right)


def _odd_budget(draw: laws.Draw, budget: int) -> None:
    """Check that a traced budget out of range is clamped: logits are finite, and one to all tokens are attended to."""

    def right(out: kvjax.Generation) -> str | None:
        stats = out.stats
        tokens, logits, attended, length = map(np.asarray, (out.tokens, out.cache.logits, stats.attended, stats.length))
        if not (np.isfinite(logits).all() and (0 <= tokens).all() and (tokens < draw.model.vocab_size).all()):
            return f"logits {logits.min()} to {logits.max()}, tokens {tokens.tolist()}"
        inside = ((0 < attended) & (attended < length + 0.5)).all()
        return None if inside else f"attended to {attended.tolist()} of {length.tolist()} tokens"

    arguments = draw.model, draw.params, *padded(draw.prompts), draw.method, np.int32(budget)
    judge(f"a traced budget of {budget}: {draw.about()}", lambda: _budgeted(*arguments), right=right)


# ---- ways of calling, which all give the same tokens; each is compiled once for all draws -------------------------


def _generated(model: Any, params: Any, tokens: Any, lengths: Any, method: Any) -> kvjax.Generation:
    cache = kvjax.prefill(params, tokens, config=model, lengths=lengths, method=method, max_new_tokens=STEPS, pad_multiple=1)
    return kvjax.generate(params, cache, **_FREE)


@functools.partial(jax.jit, static_argnums=0)
def _budgeted(model: Any, params: Any, tokens: Any, lengths: Any, method: Any, budget: jax.Array) -> kvjax.Generation:
    return _generated(model, params, tokens, lengths, dataclasses.replace(method, budget=budget))


@functools.partial(jax.jit, static_argnums=0)
def _tokens(*arguments: Any) -> jax.Array:
    return _generated(*arguments).tokens


@functools.partial(jax.jit, static_argnums=(0, 1))
def _of_methods(mapping: Callable[..., Any], model: Any, params: Any, tokens: Any, lengths: Any, methods: Any) -> jax.Array:
    return mapping(lambda method: _generated(model, params, tokens, lengths, method).tokens, methods)


@jax.jit
def _scanned(params: Any, cache: kvjax.Cache) -> jax.Array:
    """Feed the most probable token."""

    def step(cache: kvjax.Cache, _: None) -> tuple[kvjax.Cache, jax.Array]:
        tokens = cache.logits.argmax(axis=1).astype(jnp.int32)
        return kvjax.decode_step(params, cache, tokens), tokens

    return jax.lax.scan(step, cache, length=STEPS)[1]


def _vmap(function: Callable[..., Any], methods: Any) -> jax.Array:
    return jax.vmap(function)(methods)


def _arguments(draw: laws.Draw, method: Any) -> tuple[Any, ...]:
    return draw.model, draw.params, *padded(draw.prompts), method


def _stacked(draw: laws.Draw) -> Any:
    """Two copies of the method's traced values, on a first axis."""
    return jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), draw.method)


def _closed_over(draw: laws.Draw) -> Any:
    cache = draw.read()
    return jax.jit(lambda params: kvjax.generate(params, cache, **_FREE).tokens)(draw.params)


def _streamed(draw: laws.Draw) -> Any:
    blocks = kvjax.stream(draw.params, draw.read(), block=3, **_FREE)
    return np.concatenate([np.asarray(block) for block in blocks], axis=1)


def _in_64_bits(draw: laws.Draw) -> Any:
    """Prompts and lengths in int64, as NumPy makes them."""
    tokens, lengths = (x.astype(np.int64) for x in padded(draw.prompts))
    options = {"config": draw.model, "method": draw.method, "max_new_tokens": ROOM, "pad_multiple": 1}
    return draw.go_on(kvjax.prefill(draw.params, tokens, lengths=lengths, **options)).tokens


WAYS: dict[str, Callable[[laws.Draw], Any]] = {
    "closure": _closed_over,
    "method_as_argument": lambda draw: _tokens(*_arguments(draw, draw.method)),
    "vmap_over_methods": lambda draw: _of_methods(_vmap, *_arguments(draw, _stacked(draw)))[1],
    "map_over_methods": lambda draw: _of_methods(jax.lax.map, *_arguments(draw, _stacked(draw)))[0],
    "scan_over_steps": lambda draw: _scanned(draw.params, draw.read()).T,
    "streamed": _streamed,
    "in_64_bits": _in_64_bits,
}
