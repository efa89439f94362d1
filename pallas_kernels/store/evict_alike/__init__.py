"""Online eviction in KeyDiff: every head gives up the key most alike to the mean direction of the keys that it holds."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.quantised import Quantised
from pallas_kernels.store.evict_alike import pallas_triton, reference

__all__ = ["EVICT_ALIKE", "Kept", "direction_sum", "evict_alike"]

EVICT_ALIKE = Operation(
    "evict_alike",
    {
        "pallas_triton": Implementation(pallas_triton.evict_alike, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.evict_alike),
    },
)


class Kept(NamedTuple):
    """The arrays of a cache after an eviction."""

    key: jax.Array | Quantised  # [B, H, S, D], as it was given
    value: jax.Array | Quantised  # [B, H, S, D]
    position: jax.Array  # int32 [B, H, S]
    cursor: jax.Array  # int32 [B]
    total: jax.Array  # int32 [B, H, 2, D], `direction_sum` of the tokens that are left
    done: jax.Array  # int32 [B], zeros


def direction_sum(key: jax.Array, position: jax.Array) -> jax.Array:
    """Sum the directions of all stored keys, in integers.

    A sum of integers does not depend on the order, and adding and subtracting a key leaves no error. A channel has two
    integers: the direction rounded to about 2^-19 (with 1,024 slots), and the rounded remainder.

    Args:
        key: [B, H, S, D], floating point; empty slots may hold anything, NaN included.
        position: int32 [B, H, S], negative for an empty slot.

    Returns:
        int32 [B, H, 2, D].
    """
    return reference.direction_sum(key, position)


def evict_alike(
    key: jax.Array | Quantised,
    value: jax.Array | Quantised,
    position: jax.Array,
    cursor: jax.Array,
    total: jax.Array,
    done: jax.Array,
    *,
    newest: jax.Array,
    budget: jax.Array | int,
    implementation: str | None = None,
    platform: str | None = None,
) -> Kept:
    """Evict one token of every head in rows with more than ``budget`` slots in use; other rows stay as they are.

    The key with the largest cosine to the sum of all directions goes, and the newest token may go too. All else is as in
    `evict_token`: of equal cosines the newest token goes, and the newest token of all, in slot ``cursor - 1`` of every head,
    moves to the free slot.

    Differentiable: through ``xla``, the keys and values only.

    Args:
        key: [B, H, S, D], an array or codes; empty slots may hold anything, NaN included.
        value: [B, H, S, D], same dtype.
        position: int32 [B, H, S], negative for an empty slot.
        cursor: int32 [B], slots in use.
        total: int32 [B, H, 2, D], `direction_sum` of the stored tokens without the newest one.
        done: int32 [B], zeros. A kernel counts here which of its programs are done.
        newest: int32 [B], negative in rows where ``total`` has all tokens, because none was stored since.
        budget: tokens to keep, an integer or a traced int32 scalar.
        implementation: "pallas_triton" (GPU; D a power of two, S at most 16384: one kernel, in place where the caller gives
            the arrays up), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        `Kept`.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    rows, heads = position.shape[:1], position.shape[:2]
    if (
        key.ndim != 4
        or value.shape != key.shape
        or position.shape != key.shape[:3]
        or total.shape != (*heads, 2, key.shape[3])
    ):
        raise ValueError(
            f"evict_alike: got key {key.shape}, value {value.shape}, position {position.shape}, total {total.shape}, "
            "expected [B, H, S, D] twice, [B, H, S], [B, H, 2, D]"
        )
    if any(x.shape != rows for x in (cursor, done, newest)) or total.dtype != jnp.int32 or done.dtype != jnp.int32:
        raise ValueError(
            f"evict_alike: got cursor {cursor.shape}, done {done.dtype} {done.shape}, newest {newest.shape}, total "
            f"{total.dtype}, expected {rows} three times, and int32"
        )
    kept = EVICT_ALIKE.run(
        key,
        value,
        position,
        cursor,
        total,
        done,
        newest=newest,
        budget=budget,
        implementation=implementation,
        platform=platform,
    )
    return Kept(*kept)
