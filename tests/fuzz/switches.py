"""JAX's own switches and transformations: whatever is switched on or around a call, the tokens are the same.

A case is a draw of a random structure of `tests.fuzz.laws` under some switches at once, in one way of calling, or with a
budget out of range. Each of these compiles programs of its own for a structure, which its draws share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.testing.subject import ROOM, STEPS, padded
from tests.fuzz import laws
from tests.fuzz.report import Outcome
from tests.fuzz.verdicts import verify

DRAWS, _WAYS = 8, 3  # of each structure
_NO_JIT = "jax_disable_jit"
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
}


def check(seed: int, number: int) -> Iterator[Outcome]:
    """Give the outcomes of a structure: its draws in some ways, with budgets out of range, and under some switches at once.

    Programs are compiled for the first draw, and the others run them. The caches are cleared before switches are set, because
    what is compiled is not traced again: a switch would change nothing.
    """
    rng = np.random.default_rng([seed, 9, number])
    jax.clear_caches()
    structure = laws.Structure.random(seed, number)
    structure = dataclasses.replace(structure, method=laws.resident(structure.method))
    draws = [laws.Draw(structure, seed, number * laws.DRAWS + draw) for draw in range(DRAWS)]
    want = [np.asarray(draw.base[1].tokens) for draw in draws]
    ways = Ways(structure.model)
    for name in [str(x) for x in rng.permutation(ways.names(draws[0]))][:_WAYS]:
        some = slice(1 if name == "closure" else None)  # a constant cache makes a program of its own
        for draw, tokens in zip(draws[some], want[some], strict=True):
            yield _same(f"{name}: {draw.about()}", functools.partial(getattr(ways, name), draw), tokens)
    if isinstance(vars(structure.method).get("budget"), (int, jax.Array)):
        for draw in draws:
            yield ways.odd_budget(draw, rng)
    names = sorted(str(x) for x in rng.choice(list(_SWITCH), rng.integers(1, len(_SWITCH)), replace=False))
    yield from _switched(names, draws, want)
    if structure.model.num_layers == 1 and number % 4 == 0:  # operation by operation, each of them is a program
        yield from _switched([_NO_JIT], draws[:1], want[:1])


def _switched(names: Sequence[str], draws: Sequence[laws.Draw], want: Sequence[np.ndarray]) -> Iterator[Outcome]:
    """Give the outcome of each draw under all of these switches."""
    jax.clear_caches()
    for at, (draw, tokens) in enumerate(zip(draws, want, strict=True)):

        def switched(draw: laws.Draw = draw, first: bool = at == 0) -> Any:
            with contextlib.ExitStack() as stack:
                for name in names:
                    stack.enter_context(_SWITCH[name]() if name != _NO_JIT else jax.disable_jit())
                if first and any(word in name for word in _OF_KEYS for name in names):
                    _check_drawn(draw)
                return draw.go_on(draw.read()).tokens

        yield _same(f"under {' and '.join(names)}: {draw.about()}", switched, tokens)


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


class Ways:
    """Ways of calling the functions of kvjax, which all give the same tokens. Each is compiled once for all draws.

    Args:
        model: the model of all draws.
    """

    def __init__(self, model: Any) -> None:
        self._jitted = jax.jit(functools.partial(_run, model))
        self._mapped = jax.jit(functools.partial(_mapped, model))
        self._vmapped = jax.jit(jax.vmap(functools.partial(_run, model), (None, None, None, 0)))
        self._scanned = jax.jit(_scan)
        self._budgeted = jax.jit(functools.partial(_budgeted, model))

    @staticmethod
    def names(draw: laws.Draw) -> list[str]:
        """The ways that a draw can go."""
        of_methods = ("vmap_over_methods", "map_over_methods") if jax.tree.leaves(draw.method) else ()
        return ["closure", "method_as_argument", *of_methods, "scan_over_steps", "streamed", "in_64_bits"]

    def closure(self, draw: laws.Draw) -> Any:
        """A jitted function that closes over a cache."""
        cache, options = draw.read(), {"max_new_tokens": STEPS, "eos_token_ids": ()}
        return jax.jit(lambda params: kvjax.generate(params, cache, **options).tokens)(draw.params)

    def method_as_argument(self, draw: laws.Draw) -> Any:
        """A jitted function of everything."""
        return self._jitted(draw.params, *padded(draw.prompts), draw.method)

    def vmap_over_methods(self, draw: laws.Draw) -> Any:
        """The second of two equal methods."""
        return self._vmapped(draw.params, *padded(draw.prompts), _stacked(draw))[1]

    def map_over_methods(self, draw: laws.Draw) -> Any:
        """The first of two equal methods."""
        return self._mapped(draw.params, *padded(draw.prompts), _stacked(draw))[0]

    def scan_over_steps(self, draw: laws.Draw) -> Any:
        """`kvjax.decode_step` in `jax.lax.scan`."""
        return self._scanned(draw.params, draw.read()).T

    def streamed(self, draw: laws.Draw) -> Any:
        """Blocks of three tokens."""
        made = kvjax.stream(draw.params, draw.read(), max_new_tokens=STEPS, block=3, eos_token_ids=())
        return np.concatenate([np.asarray(block) for block in made], axis=1)

    def in_64_bits(self, draw: laws.Draw) -> Any:
        """Prompts and lengths in int64, as NumPy makes them."""
        tokens, lengths = padded(draw.prompts)
        options = {"config": draw.model, "method": draw.method, "max_new_tokens": ROOM, "pad_multiple": 1}
        cache = kvjax.prefill(draw.params, tokens.astype(np.int64), lengths=lengths.astype(np.int64), **options)
        return draw.go_on(cache).tokens

    def odd_budget(self, draw: laws.Draw, rng: np.random.Generator) -> Outcome:
        """A traced budget out of range is clamped: logits are finite, and between one token and all are attended to."""
        budget = int(rng.choice((0, 1, -5, 3, 10**6, 2**31 - 1)))

        def right(got: Any) -> str | None:
            tokens, logits, attended, length = map(np.asarray, got)
            if not (np.isfinite(logits).all() and (0 <= tokens).all() and (tokens < draw.model.vocab_size).all()):
                return f"logits {logits.min()} to {logits.max()}, tokens {tokens.tolist()}"
            inside = ((0 < attended) & (attended < length + 0.5)).all()
            return None if inside else f"attended to {attended.tolist()} of {length.tolist()} tokens"

        run = functools.partial(self._budgeted, draw.params, *padded(draw.prompts), draw.method, np.int32(budget))
        return verify(f"a traced budget of {budget}: {draw.about()}", run, right=right, named=None)


def _generated(model: Any, params: Any, tokens: Any, lengths: Any, method: Any) -> kvjax.Generation:
    options = {"config": model, "lengths": lengths, "method": method, "max_new_tokens": STEPS, "pad_multiple": 1}
    cache = kvjax.prefill(params, tokens, **options)
    return kvjax.generate(params, cache, max_new_tokens=STEPS, eos_token_ids=())


def _run(model: Any, params: Any, tokens: Any, lengths: Any, method: Any) -> jax.Array:
    return _generated(model, params, tokens, lengths, method).tokens


def _mapped(model: Any, params: Any, tokens: Any, lengths: Any, methods: Any) -> jax.Array:
    return jax.lax.map(functools.partial(_run, model, params, tokens, lengths), methods)


def _budgeted(model: Any, params: Any, tokens: Any, lengths: Any, method: Any, budget: jax.Array) -> tuple[Any, ...]:
    made = _generated(model, params, tokens, lengths, dataclasses.replace(method, budget=budget))
    return made.tokens, made.cache.logits, made.stats.attended, made.stats.length


def _scan(params: Any, cache: kvjax.Cache) -> jax.Array:
    """Feed the most probable token."""

    def step(cache: kvjax.Cache, _: None) -> tuple[kvjax.Cache, jax.Array]:
        tokens = cache.logits.argmax(axis=1).astype(jnp.int32)
        return kvjax.decode_step(params, cache, tokens), tokens

    return jax.lax.scan(step, cache, length=STEPS)[1]


def _stacked(draw: laws.Draw) -> Any:
    """Two copies of the method's traced values, on a first axis."""
    return jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), draw.method)
