"""TokenSelect's lists: sinks, chosen and local tokens side by side, and their keys and values."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.host import take_rows
from pallas_kernels.token_vote import lists_triton


def _list_xla(fresh, length, awake, budget, *old, num_sink, num_local, extra):
    if old:
        miss, chosen = old
        fresh = jnp.where(miss[:, None], fresh, chosen)
    place = jnp.arange(num_sink + fresh.shape[1] + num_local + extra, dtype=jnp.int32)[None]
    limit = num_sink + budget + num_local
    length = length[:, None]
    picked = jnp.pad(fresh, ((0, 0), (num_sink, num_local + extra)))
    token = jnp.where(place < num_sink + budget, picked, length - limit + place)
    token = jnp.where((place < num_sink) | (length <= limit), place, token)
    used = (place < jnp.minimum(length, limit)) & (awake >= 0)[:, None]
    return fresh, jnp.where(used, token, 0), used


def _rows_xla(key, value, token, inv_freq):
    key, value = (take_rows(x, token[:, None]) for x in (key, value))
    angle = jnp.arange(token.shape[1], dtype=jnp.float32)[:, None] * inv_freq[None]
    cos, sin = jnp.cos(angle)[None, None], jnp.sin(angle)[None, None]
    first, second = jnp.split(key.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(key.dtype), value


TOKEN_LIST = Operation(
    "token_list",
    {"pallas_triton": Implementation(lists_triton.token_list, ("gpu",)), "xla": Implementation(_list_xla)},
)
TURNED_ROWS = Operation(
    "turned_rows",
    {
        "pallas_triton": Implementation(lists_triton.turned_rows, ("gpu",), lists_triton.check),
        "xla": Implementation(_rows_xla),
    },
)


def token_list(
    fresh: jax.Array,
    length: jax.Array,
    awake: jax.Array,
    *,
    budget: jax.Array | int,
    miss: jax.Array | None = None,
    chosen: jax.Array | None = None,
    num_sink: int,
    num_local: int,
    extra: int = 0,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tokens to attend, in order and without a gap: the first, the chosen, the newest; or all of a short row.

    Args:
        fresh: int32 [B, K], tokens chosen now, ascending, ``budget`` of them.
        length: int32 [B], tokens stored.
        awake: int32 [B]; a row where it is negative uses nothing.
        budget: int32 scalar, at most K.
        miss: bool [B], whether ``fresh`` replaces ``chosen``; given exactly with it.
        chosen: int32 [B, K], tokens chosen before, or None if there are none to keep.
        num_sink: first tokens.
        num_local: newest tokens.
        extra: entries to add behind, never used.
        implementation: "pallas_triton" (GPU), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        chosen int32 [B, K] as it is now; token int32 [B, E] with E = num_sink + K + num_local + extra, 0 where unused; used
        bool [B, E], the first ``min(length, num_sink + budget + num_local)`` entries.

    Raises:
        ValueError: one of miss and chosen is missing, or the implementation is unknown.
    """
    if (miss is None) != (chosen is None):
        raise ValueError(f"token_list: got miss {miss} and chosen {chosen}, expected both or neither")
    args = fresh, length, awake, jnp.asarray(budget, jnp.int32), *(() if chosen is None else (miss, chosen))
    sizes = {"num_sink": num_sink, "num_local": num_local, "extra": extra}
    return TOKEN_LIST.run(*args, **sizes, implementation=implementation, platform=platform)


def turned_rows(
    key: jax.Array,
    value: jax.Array,
    token: jax.Array,
    inv_freq: jax.Array,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Listed keys and values side by side, the key of entry j rotated at place j.

    Args:
        key: [B, H, S, D].
        value: [B, H, S, D], same dtype, in device memory or in pinned host memory.
        token: int32 [B, E], in [0, S).
        inv_freq: float32 [D/2], radians per place.
        implementation: "pallas_triton" (GPU; D a power of two), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        key and value [B, H, E, D], rotated in float32 and rounded back.
    """
    args = key, value, token, jnp.asarray(inv_freq)
    return TURNED_ROWS.run(*args, implementation=implementation, platform=platform)
