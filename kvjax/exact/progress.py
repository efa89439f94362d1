"""What each row of an exact decoding call may still get, its next token, and how tokens get into the result (`verify`)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.decoding.decode import Call, Decoded, broken_rows, padding_token
from kvjax.decoding.history import Memory
from kvjax.decoding.log_probs import Seen, log_probs
from kvjax.decoding.sampling import Sampler, has_row_keys, rows_of, split_keys
from kvjax.protocol.typing import not_none
from pallas_kernels import axes

_UNROLL = 8  # keys split in a turn of the loop: on a GPU 6 kernels, and 4 where a turn splits one key


def keys_of_draws(key: Array, steps: int) -> tuple[Array, Array]:
    """Return the keys of ``steps`` draws, as `decode_once` splits them off, and the key that is left."""

    def split(key: Array, _: None) -> tuple[Array, Array]:
        mine, left = split_keys(key)
        return not_none("key", left), not_none("key", mine)

    last, draws = lax.scan(split, key, length=steps, unroll=min(_UNROLL, steps))
    return draws, last


def left_tokens(limits: Array | None, now: Decoded) -> Array:
    """Count the tokens that each row may still get: int32 [B]."""
    return (now.tokens.shape[1] if limits is None else limits) - now.num_tokens


def active_rows(limits: Array | None, now: Decoded) -> Array:
    """Mark the rows that get more tokens: bool [B]. A row that only has as many as this call may give it is not done."""
    return ~now.done & (left_tokens(limits, now) > 0)


def goes_on(limits: Array | None, now: Decoded) -> Array:
    """Tell whether any row, on any device, gets more tokens: a bool scalar."""
    return ~axes.every(~active_rows(limits, now).any())


def largest(limits: Array | None, now: Decoded, count: Array) -> Array:
    """Return the largest ``count`` int32 [B] of the rows, on all devices, that get more tokens: an int32 scalar."""
    return axes.most(jnp.max(jnp.where(active_rows(limits, now), count, 0)), axes.DATA)


def draw(
    sampler: Sampler, logits: Array, draws: Array | None, place: Array, memory: Memory | None = None
) -> tuple[Array, Seen, Any]:
    """Draw tokens int32 [B, T] from logits float32 [B, T, V] for the places int32 [B, T] of the result.

    With a ``memory`` T is 1. Also returns what was drawn from, and the state that the sampler's processor returns.
    """
    keys = None
    if draws is not None:
        at = jnp.minimum(place, len(draws) - 1)
        if has_row_keys(draws, axes_before=1):
            keys = draws[at, jnp.arange(len(place))[:, None]]
        else:
            keys = draws[at]
            row = jnp.broadcast_to(rows_of(len(place))[:, None], place.shape)
            keys = jax.vmap(jax.vmap(jax.random.fold_in))(keys, row)
        keys = keys.reshape(-1, *keys.shape[2:])
    processed, state = sampler.process(logits.reshape(-1, logits.shape[-1]), memory)
    tokens, filtered = sampler.draw_each(processed, keys)
    return tokens.reshape(place.shape), Seen(logits, filtered.reshape(logits.shape)), state


def next_token(call: Call, active: Array, now: Decoded) -> tuple[Array, Array, Seen, Memory | None]:
    """Draw the next token int32 [B] of each row, remember it, and mark bad logits in `Decoded.bad_step`: int32 [B]."""
    logits = now.cache.logits
    token, seen, state = draw(call.sampler, logits[:, None], call.draws, now.num_tokens[:, None], now.memory)
    broken = broken_rows(now, active, seen.filtered[:, 0] if now.memory is not None else logits)
    token = jnp.where(active, token[:, 0], padding_token(now.cache.model))
    memory = None if now.memory is None else now.memory.add(token, active, state)
    return token, jnp.where(broken, now.num_tokens, now.bad_step), seen, memory


def agreed(
    call: Call, logits: Array, tokens: Array, place: Array, order: Array, wanted: Array, memory: Memory | None
) -> tuple[Array, Seen, Memory | None]:
    """Count the drafted tokens of each row up to the first with which Full does not agree: int32 [B].

    Args:
        logits: float32 [B, T, V], Full's behind each of the tokens before the last one.
        tokens: int32 [B, 1 + T], the first one and the drafted ones.
        place: int32 [B, T], of the drafted tokens in the result.
        order: int32 [1, 1 + T], from 0 on.
        wanted: int32 [B], how many were drafted.
        memory: with the first token.

    Returns:
        The counts, what Full's tokens were drawn from, and the memory with the counted tokens.
    """
    if memory is None:
        wished, behind, _ = draw(call.sampler, logits, call.draws, place)
        right = (wished == tokens[:, 1:]) & (order[:, :-1] < wanted[:, None]) & ~ends(tokens[:, :-1], call.eos)
        return jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1), behind, None
    may = (order[:, :-1] < wanted[:, None]) & ~ends(tokens[:, :-1], call.eos)

    def step(carry: tuple[Memory, Array], each: tuple[Array, ...]) -> tuple[tuple[Memory, Array], tuple[Array, Array]]:
        (memory, right), (logit, token, at, may) = carry, each
        wished, behind, state = draw(call.sampler, logit[:, None], call.draws, at[:, None], memory)
        right = right & may & (wished[:, 0] == token)
        return (memory.add(token, right, state), right), (right, behind.filtered[:, 0])

    by_token = tuple(jnp.moveaxis(x, 1, 0) for x in (logits, tokens[:, 1:], place, may))
    (memory, _), (right, filtered) = lax.scan(step, (memory, jnp.ones(wanted.shape, bool)), by_token)
    return jnp.sum(right, axis=0, dtype=jnp.int32), Seen(logits, jnp.moveaxis(filtered, 0, 1)), memory


def ends(tokens: Array, eos: Array) -> Array:
    """Mark the tokens, int32 of any shape, that end a row."""
    return (tokens[..., None] == eos.reshape((1,) * tokens.ndim + (-1,))).any(axis=-1)


def written(call: Call, now: Decoded, tokens: Array, active: Array, accepted: Array, *seen: Seen) -> Decoded:
    """Write the first and the ``accepted`` int32 [B] following ``tokens`` int32 [B, T] of ``active`` rows to the result.

    ``seen`` are parts of what Full drew the tokens from, in their order, of T tokens together.
    """
    order = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    kept = active[:, None] & (order <= accepted[:, None])
    place = jnp.where(kept, now.num_tokens[:, None] + order, now.tokens.shape[1])  # past the end, so it is dropped
    row = jnp.arange(len(tokens))[:, None]
    num_tokens = now.num_tokens + jnp.sum(kept, axis=1, dtype=jnp.int32)
    done = now.done | (kept & ends(tokens, call.eos)).any(axis=1)
    noted = now.log_probs
    if noted is not None:
        whole = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *seen)
        noted = noted.scattered(log_probs(noted, whole, tokens, kept, call.sampler.temperature), place)
    return dataclasses.replace(
        now,
        tokens=now.tokens.at[row, place].set(tokens, mode="drop"),
        num_tokens=num_tokens,
        done=done if call.limits is None else done | (num_tokens >= call.limits),
        step=now.step + 1,
        log_probs=noted,
    )
