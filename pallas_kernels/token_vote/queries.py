"""TokenSelect's queries: what scores, what attends, and whether a decode step may reuse its selection."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.token_vote import queries_triton


class StepQuery(NamedTuple):
    """Result of `step_query`."""

    mean: jax.Array  # float32 [B, H, G, D], what scores
    turned: jax.Array  # [B, H, G, D] in the dtype of the query, what attends
    last: jax.Array  # float32 [B, H, G, D], un-rotated, the query that last selected
    ready: jax.Array  # bool [B], whether there is one
    hits: jax.Array  # int32 [B], steps that reused a selection
    refreshes: jax.Array  # int32 [B], steps that selected
    miss: jax.Array  # bool [B], whether this step selects
    stop: jax.Array  # int32 [B], end of this step's candidates, 0 where it does not select
    wanted: jax.Array  # int32 [B], how many of them to select, 0 where it does not select


def _rotated(x, position, inv_freq):
    """Rotate x float32 [B, H, G, T, D] at position int32 [B, T]."""
    angle = position[:, None, None, :, None].astype(jnp.float32) * inv_freq[None, None, None, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _step_xla(query, last, ready, hits, refreshes, cursor, position, budget, theta, inv_freq, *, num_sink, num_local):
    limit = num_sink + budget + num_local
    now = query.astype(jnp.float32)
    axes = (1, 2, 3)
    norm = jnp.sqrt(jnp.sum(now * now, axis=axes) * jnp.sum(last * last, axis=axes))
    cosine = jnp.sum(now * last, axis=axes) / jnp.maximum(norm, 1e-30)
    sparse = (cursor > limit) & (position >= 0)
    hit = sparse & ready & (cosine >= theta)
    miss = sparse & ~hit
    scored = jnp.full((len(query), 1), num_local, jnp.int32)
    asked = jnp.minimum(cursor, limit)[:, None] - 1
    wide = now[..., None, :]
    return StepQuery(
        mean=_rotated(wide, scored, inv_freq)[..., 0, :],
        turned=_rotated(wide, asked, inv_freq)[..., 0, :].astype(query.dtype),
        last=jnp.where(miss[:, None, None, None], now, last),
        ready=ready | miss,
        hits=hits + hit.astype(jnp.int32),
        refreshes=refreshes + miss.astype(jnp.int32),
        miss=miss,
        stop=jnp.where(miss, cursor - num_local, 0),
        wanted=jnp.where(miss, budget, 0),
    )


def _chunk_xla(query, real, first, inv_freq, *, num_local):
    order = jnp.arange(query.shape[3], dtype=jnp.int32)[None]
    now = query.astype(jnp.float32)
    turned = _rotated(now, first[:, None] + order, inv_freq).astype(query.dtype)
    among = (order < real[:, None])[:, None, None, :, None]
    total = jnp.where(among, _rotated(now, num_local + order, inv_freq), 0).sum(axis=3)
    return total / jnp.maximum(real, 1).astype(jnp.float32)[:, None, None, None], turned


STEP_QUERY = Operation(
    "step_query",
    {
        "pallas_triton": Implementation(
            lambda *args, **kwargs: StepQuery(*queries_triton.step_query(*args, **kwargs)),
            ("gpu",),
            queries_triton.check,
        ),
        "xla": Implementation(_step_xla),
    },
)
CHUNK_QUERY = Operation(
    "chunk_query",
    {
        "pallas_triton": Implementation(queries_triton.chunk_query, ("gpu",), queries_triton.check),
        "xla": Implementation(_chunk_xla),
    },
)


def step_query(
    query: jax.Array,
    last: jax.Array,
    ready: jax.Array,
    hits: jax.Array,
    refreshes: jax.Array,
    cursor: jax.Array,
    position: jax.Array,
    *,
    budget: jax.Array | int,
    theta: jax.Array | float,
    inv_freq: jax.Array,
    num_sink: int,
    num_local: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> StepQuery:
    """One decode step's query: rotated to score and to attend, and compared with the one that last selected.

    One kernel on a GPU, where each of its dozen small results would be a launch of its own.

    Args:
        query: [B, H, G, D], un-rotated.
        last: float32 [B, H, G, D], the query that last selected.
        ready: bool [B], whether there is one.
        hits: int32 [B], so far.
        refreshes: int32 [B], so far.
        cursor: int32 [B], tokens stored, this one included.
        position: int32 [B]; a row where it is negative stands still.
        budget: int32 scalar, tokens to select: a row selects when more than ``num_sink + budget + num_local`` are stored.
        theta: float32 scalar; a cosine from here on, over all heads together, reuses the selection.
        inv_freq: float32 [D/2], radians per place.
        num_sink: see ``budget``.
        num_local: place at which the scoring query stands; as many newest tokens are no candidates.
        implementation: "pallas_triton" (GPU; D a power of two), "xla", or None for the first that runs.
        platform: see ``Operation.run``.
    """
    knobs = jnp.asarray(budget, jnp.int32), jnp.asarray(theta, jnp.float32), jnp.asarray(inv_freq)
    args = query, last, ready, hits, refreshes, cursor, position, *knobs
    sizes = {"num_sink": num_sink, "num_local": num_local}
    return STEP_QUERY.run(*args, **sizes, implementation=implementation, platform=platform)


def chunk_query(
    query: jax.Array,
    real: jax.Array,
    first: jax.Array,
    inv_freq: jax.Array,
    *,
    num_local: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The queries of several tokens: their mean, which scores, and each rotated to attend.

    Args:
        query: [B, H, G, T, D], un-rotated.
        real: int32 [B], so many of the T are tokens.
        first: int32 [B], place of the first one; query t attends from ``first + t`` and scores from ``num_local + t``.
        inv_freq: float32 [D/2], radians per place.
        num_local: see ``first``.
        implementation: "pallas_triton" (GPU; D a power of two), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        mean float32 [B, H, G, D] of the real ones, each rotated in float32; turned [B, H, G, T, D] in the dtype of the query.
    """
    args = query, real, first, jnp.asarray(inv_freq)
    return CHUNK_QUERY.run(*args, num_local=num_local, implementation=implementation, platform=platform)
