"""What a researcher types: `prefill`, `extend`, `decode_step`, `generate`, `stream`.

All are jitted with static shapes (one trace per shape), and all but `prefill` consume (donate) the cache they are given: use
the one they return, or `kvjax.fork` it first. Called inside ``jax.jit`` or ``jax.vmap`` they skip the checks that need
concrete numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.cache import Cache
from kvjax.checks import check_cache, check_fits, check_params, check_room, check_vocabulary, is_known
from kvjax.memory import check_memory
from kvjax.method import Method
from kvjax.registry import resolve
from kvjax.sampling import Sampler
from kvjax.stats import Stats, measure
from kvjax.step import Decoded, run_decode, run_extend, run_prefill, run_step
from kvjax.typing import Model, positive_int, pytree

Tokens = Array | np.ndarray | Sequence[Sequence[int]]


@pytree
class Generation:
    """What `generate` returns."""

    tokens: Array  # int32 [B, N], 0 behind a row's end
    num_tokens: Array  # int32 [B], generated tokens per row, a closing EOS included
    cache: Cache  # to go on with: another `generate`, or `extend` for the next turn
    stats: Stats  # what the method cost at the last step


def pad_tokens(tokens: Tokens, lengths: Array | Sequence[int] | None = None, multiple: int = 1) -> tuple[Array, Array]:
    """Right-pad prompts to one length.

    Args:
        tokens: list of token lists, or an integer array [B, T] already padded on the right.
        lengths: [B] real tokens per row of an array; None means all T.
        multiple: round the padded length up to a multiple of this.

    Returns:
        tokens int32 [B, T] and lengths int32 [B].
    """
    if isinstance(tokens, (np.ndarray, jax.Array)):
        if tokens.ndim != 2 or not tokens.shape[0] or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers of shape [B, T], got {tokens.dtype} {list(tokens.shape)}")
        rows, padded = tokens.shape
        _in_range(tokens)
        lengths = jnp.full((rows,), padded, jnp.int32) if lengths is None else jnp.asarray(lengths)
        if not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise ValueError(f"lengths must be integers, got {lengths.dtype}")
        lengths = lengths.astype(jnp.int32)
        if lengths.shape != (rows,):
            raise ValueError(f"lengths must have shape [{rows}], one per row of tokens, got {list(lengths.shape)}")
        if is_known(lengths) and (int(lengths.max()) > padded or int(lengths.min()) < 0):
            raise ValueError(f"lengths must lie between 0 and T={padded}, got {np.asarray(lengths).tolist()}")
        array = jnp.asarray(tokens, jnp.int32)
        return jnp.pad(array, ((0, 0), (0, -padded % multiple))), lengths
    if not isinstance(tokens, Sequence) or isinstance(tokens, str) or not len(tokens):
        raise ValueError(f"tokens must be a list of token lists, one per row (for one prompt: [prompt]), got {tokens!r:.60}")
    rows = [_row(row) for row in tokens]
    if lengths is not None:
        raise ValueError("lengths belong to a padded array of tokens; lists carry their own length")
    sizes = [len(row) for row in rows]
    padded = np.zeros((len(rows), -(-max(sizes) // multiple) * multiple), np.int32)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = values
    return jnp.asarray(padded), jnp.asarray(sizes, jnp.int32)


def _row(row: Any) -> np.ndarray:
    """One row of token ids as an integer array."""
    try:
        array = np.asarray(row)
    except ValueError:  # lists of several lengths
        array = np.zeros(())
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"tokens must be a list of integers per row (for one prompt: [prompt]), got the row {row!r:.60}")
    _in_range(array)
    return array


def _in_range(tokens: Any) -> None:
    """Refuse ids that int32 cannot hold, which would become others."""
    if not is_known(tokens) or not tokens.size or np.can_cast(tokens.dtype, np.int32):
        return
    worst = max((int(x) for x in (np.asarray(tokens).min(), np.asarray(tokens).max())), key=abs)
    if not -(2**31) <= worst < 2**31:
        raise ValueError(f"token ids must be int32, got {worst}")


def prefill(
    params: Any,
    tokens: Tokens,
    *,
    config: Model,
    method: Method | str = "full",
    max_new_tokens: int = 256,
    lengths: Array | Sequence[int] | None = None,
    chunk_size: int = 8192,
    pad_multiple: int = 128,
) -> Cache:
    """Read prompts and return the cache to generate from.

    Attention over the prompt is exact (unless the method says otherwise); the method then compresses or indexes what is
    stored, and storage physically shrinks to what it keeps plus ``max_new_tokens``. Methods with ``offload=True`` do not run
    under ``jax.vmap``.

    Args:
        params: model parameters.
        tokens: list of token lists, or int [B, T] padded on the right with ``lengths``.
        config: the model's description, for example a ``models.ModelConfig``.
        method: a method object or its name; see ``python -m kvjax ls``.
        max_new_tokens: tokens that may follow the prompt, by `extend`, `decode_step` and `generate` together.
        lengths: int [B], real tokens per row of a padded array.
        chunk_size: prompt tokens per pass; bounds activation memory, does not change results. Methods that read the
            prompt in blocks of their own (KeyDiff, StreamingLLM, TokenSelect) take those.
        pad_multiple: prompts are padded to a multiple of this many tokens, so that nearby lengths share one trace.

    Raises:
        ValueError: empty prompt, unknown token id, or more tokens than the model has positions for.
        MemoryError: a method with ``offload=True`` needs more device or host memory than there is.
    """
    method = resolve(method)
    max_new_tokens, chunk_size = positive_int("max_new_tokens", max_new_tokens), positive_int("chunk_size", chunk_size)
    tokens, length = pad_tokens(tokens, lengths, positive_int("pad_multiple", pad_multiple))
    check_vocabulary(tokens, config)
    check_fits(length, max_new_tokens, config, method)
    if method.offload and is_known(tokens):
        sizes = {"batch": len(tokens), "prompt_slots": tokens.shape[1], "max_new_tokens": max_new_tokens}
        check_memory(method, config, chunk_size=chunk_size, **sizes)
    return _prefill(params, tokens, length, method, model=config, max_new_tokens=max_new_tokens, chunk_size=chunk_size)


def decode_step(params: Any, cache: Cache, tokens: Array, *, active: Array | None = None) -> Cache:
    """Feed one token per row; the next token's logits are in the returned cache.

    Args:
        params: model parameters.
        cache: consumed.
        tokens: int32 [B].
        active: bool [B]; rows where it is False stand still. None = all.

    Raises:
        ValueError: wrong shapes or dtypes, no room, or a cache of another model or one that was consumed.
    """
    check_params(params, cache)
    tokens = jnp.asarray(tokens)
    active = jnp.ones((cache.batch,), bool) if active is None else jnp.asarray(active)
    for name, array, kind in (("tokens", tokens, jnp.integer), ("active", active, jnp.bool_)):
        if array.shape != (cache.batch,) or not jnp.issubdtype(array.dtype, kind):
            raise ValueError(
                f"{name} must be {'integers' if name == 'tokens' else 'bool'} of shape [{cache.batch}], one per row of the "
                f"cache, got {array.dtype} {list(array.shape)}"
            )
    check_vocabulary(tokens, cache.model)
    check_room(cache, active.astype(jnp.int32))
    tokens = tokens.astype(jnp.int32)
    return _step(params, cache, tokens[:, None], active[:, None])


def extend(params: Any, cache: Cache, tokens: Tokens, *, lengths: Array | Sequence[int] | None = None) -> Cache:
    """Append tokens to every row: the next turn, or the next question about the same context.

    The tokens, even a single one, attend densely to everything the method has kept (and causally to each other);
    methods that evict online take them in blocks as they would while generating, H2O (in any layer) one by one. Rows may
    have different lengths, zero included.

    Args:
        params: model parameters.
        cache: consumed; `kvjax.fork` it first to ask several questions of one context.
        tokens: list of token lists, or int [B, T] padded on the right with ``lengths``.
        lengths: int [B].
    """
    check_params(params, cache)
    tokens, length = pad_tokens(tokens, lengths)
    if tokens.shape[0] != cache.batch:
        raise ValueError(f"tokens must have {cache.batch} rows like the cache, got {tokens.shape[0]}")
    check_vocabulary(tokens, cache.model)
    check_room(cache, length)
    return _extend(params, cache, tokens, length) if tokens.shape[1] else cache


def generate(
    params: Any,
    cache: Cache,
    *,
    method: Method | str | None = None,
    max_new_tokens: int = 64,
    eos_token_ids: Sequence[int] | None = None,
    temperature: float | Array | None = None,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
    key: Array | None = None,
) -> Generation:
    """Generate up to ``max_new_tokens`` tokens per row, greedily unless a temperature is given.

    Args:
        params: model parameters.
        cache: from `prefill`, `extend` or an earlier `generate`; consumed. ``Generation.cache`` goes on exactly: generating
            5 tokens twice equals generating 10.
        method: None uses the method that made the cache. Another method of the same structure replaces its traced
            hyper-parameters; a different structure is refused.
        max_new_tokens: N, the most tokens to generate.
        eos_token_ids: token ids that end a row; None takes the model's, ``()`` never ends.
        temperature: traced; None is greedy.
        top_k, top_p: traced filters; None leaves them out.
        key: PRNG key, required with a temperature.

    Raises:
        ValueError: not enough room in the cache, a cache of another method, no key.
        FloatingPointError: the logits were not finite.
    """
    max_new_tokens = positive_int("max_new_tokens", max_new_tokens)
    cache = _ready(params, cache, method, max_new_tokens)
    sampler = _sampler(temperature, top_k, top_p, key)
    eos = eos_array(eos_token_ids, cache.model)
    in_trace = not is_known(cache.length)
    end = _decode(
        params,
        cache,
        sampler,
        key,
        eos,
        jnp.zeros((cache.batch,), bool),
        steps=max_new_tokens,
        stop_early=eos.size > 0 and not in_trace,
    )
    return _result(params, end)


def stream(
    params: Any,
    cache: Cache,
    *,
    method: Method | str | None = None,
    max_new_tokens: int = 64,
    eos_token_ids: Sequence[int] | None = None,
    temperature: float | Array | None = None,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
    key: Array | None = None,
    tokenizer: Any = None,
    block: int = 4,
) -> Iterator[list]:
    """Generate and yield as it goes: one list per ``block`` tokens with an entry per row.

    Args:
        tokenizer: with a ``decode(ids)``; entries are then new pieces of text (held back while a character is
            incomplete), otherwise lists of new token ids. EOS tokens are left out of text.
        block: tokens per compiled call; larger is faster, smaller is smoother.

    The other arguments are `generate`'s, and the concatenated tokens equal its tokens.
    """
    block, max_new_tokens = positive_int("block", block), positive_int("max_new_tokens", max_new_tokens)
    cache = _ready(params, cache, method, max_new_tokens)
    sampler = _sampler(temperature, top_k, top_p, key)
    eos = eos_array(eos_token_ids, cache.model)
    return _streamed(params, cache, sampler, key, eos, max_new_tokens, tokenizer, block)


def _streamed(
    params: Any,
    cache: Cache,
    sampler: Sampler,
    key: Array | None,
    eos: Array,
    max_new_tokens: int,
    tokenizer: Any,
    block: int,
) -> Iterator[list]:
    """`stream` after its checks, which are made when it is called and not when its first result is asked for."""
    ends = set(np.asarray(eos).tolist())
    done = jnp.zeros((cache.batch,), bool)
    ids: list[list[int]] = [[] for _ in range(cache.batch)]
    shown = [""] * cache.batch
    for first in range(0, max_new_tokens, block):
        steps = min(block, max_new_tokens - first)
        end = _decode(params, cache, sampler, key, eos, done, steps=steps, stop_early=eos.size > 0)
        cache, key, done = end.cache, end.key, end.done
        _check_finite(end)
        new = [
            row[:count].tolist() for row, count in zip(np.asarray(end.tokens), np.asarray(end.num_tokens), strict=True)
        ]
        last = first + steps >= max_new_tokens or bool(done.all())
        if tokenizer is None:
            yield new
        else:
            pieces = []
            for row, tokens in enumerate(new):
                ids[row] += [token for token in tokens if token not in ends]
                text = tokenizer.decode(ids[row])
                # A byte-level piece of a character decodes to U+FFFD; wait for the rest unless there will be none.
                text = text if last or bool(done[row]) else text.rstrip("\ufffd")
                pieces.append(text[len(shown[row]) :])
                shown[row] = text
            yield pieces
        if last:
            return


def _ready(params: Any, cache: Cache, method: Method | str | None, tokens: int) -> Cache:
    """The cache under ``method``, checked to be of these parameters and this method, with room for ``tokens``."""
    check_params(params, cache)
    if method is not None:
        method = resolve(method)
        check_cache(cache, method)
        # The cache is donated; numbers the caller holds as arrays must not go with it.
        copied = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, method)
        cache = dataclasses.replace(cache, method=copied)
    check_room(cache, tokens)
    return cache


def _sampler(temperature: Any, top_k: Any, top_p: Any, key: Array | None) -> Sampler:
    sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p)
    if temperature is not None and key is None:
        raise ValueError(f"temperature={temperature} needs a PRNG key: pass key=jax.random.key(seed)")
    if key is not None and not isinstance(key, (jax.Array, np.ndarray)):
        raise ValueError(f"key must be a PRNG key such as jax.random.key(seed), got {key!r}")
    return sampler


def eos_array(ids: Sequence[int] | None, model: Model) -> Array:
    """EOS ids as int32 [E]; None takes the model's."""
    ids = model.eos_token_ids if ids is None else ids
    ids = (ids,) if np.ndim(ids) == 0 else tuple(ids)
    wrong = [token for token in ids if not 0 <= int(token) < model.vocab_size]
    if wrong:
        raise ValueError(f"eos_token_ids must lie in [0, vocab_size={model.vocab_size}), got {wrong[0]}")
    return jnp.asarray(ids, jnp.int32).reshape(-1)


def _result(params: Any, end: Decoded) -> Generation:
    _check_finite(end)
    return Generation(tokens=end.tokens, num_tokens=end.num_tokens, cache=end.cache, stats=measure(end.cache, params))


def _check_finite(end: Decoded) -> None:
    if is_known(end.bad_step) and int(end.bad_step.max()) >= 0:
        row = int(jnp.argmax(end.bad_step >= 0))
        raise FloatingPointError(
            f"logits of row {row} are not finite at generated token {int(end.bad_step[row])}; check the "
            "parameters and the dtype (expected finite float32 logits)"
        )


_prefill = functools.partial(jax.jit, static_argnames=("model", "max_new_tokens", "chunk_size"))(run_prefill)
_step = jax.jit(run_step, donate_argnames="cache")
_extend = jax.jit(run_extend, donate_argnames="cache")
_decode = functools.partial(jax.jit, static_argnames=("steps", "stop_early"), donate_argnames="cache")(run_decode)
