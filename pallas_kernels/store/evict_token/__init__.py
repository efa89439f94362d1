"""Online eviction: every head gives up the token with the lowest score, and the newest token moves to its slot."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.quantised import Quantised
from pallas_kernels.store.evict_token import pallas_triton, reference

__all__ = ["EVICT_TOKEN", "Kept", "evict_token"]

EVICT_TOKEN = Operation(
    "evict_token",
    {
        "pallas_triton": Implementation(pallas_triton.evict_token, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.evict_token),
    },
)


class Kept(NamedTuple):
    """The arrays of a cache after an eviction."""

    key: jax.Array | Quantised  # [B, H, S, D], as it was given
    value: jax.Array | Quantised  # [B, H, S, D]
    position: jax.Array  # int32 [B, H, S]
    cursor: jax.Array  # int32 [B]
    score: jax.Array | None  # float32 [B, H, S], moved with the tokens; None if no head has its own


def evict_token(
    key: jax.Array | Quantised,
    value: jax.Array | Quantised,
    position: jax.Array,
    cursor: jax.Array,
    score: jax.Array | None,
    *,
    budget: jax.Array | int,
    gain: jax.Array | None = None,
    first: int = 0,
    recent: jax.Array | int = 0,
    implementation: str | None = None,
    platform: str | None = None,
) -> Kept:
    """Evict one token of every head in rows with more than ``budget`` slots in use; other rows stay as they are.

    The token with the lowest score goes, and of equal scores the newest one. The newest token of all, which is in slot
    ``cursor - 1`` of every head, moves to its slot, so bounded storage stays dense without a shift. If no token may go, the
    token in slot 0 goes.

    Differentiable: through ``xla``, the keys, values and scores only.

    Args:
        key: [B, H, S, D], an array or codes.
        value: [B, H, S, D], same dtype.
        position: int32 [B, H, S], negative for an empty slot.
        cursor: int32 [B], slots in use; from there on all are empty, in every head.
        score: float32 [B, H, S], not NaN; or [B, 1, S], the same of all heads, which does not move with the tokens. None
            takes the position as score, so the oldest token goes.
        budget: tokens to keep, an integer or a traced int32 scalar.
        gain: float32 [B, H, S], added to ``score`` before the eviction, in every row; only with a score of each head.
        first: tokens at positions below this may not go.
        recent: how many of the newest positions may not go, an integer or a traced int32 scalar.
        implementation: "pallas_triton" (GPU; D a power of two, S at most 16384: one kernel, in place where the caller gives
            the arrays up), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        `Kept`.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    slots, scores = key.shape[:3], [x for x in (score, gain) if x is not None]
    if key.ndim != 4 or value.shape != key.shape or position.shape != slots or cursor.shape != slots[:1]:
        raise ValueError(
            f"evict_token: got key {key.shape}, value {value.shape}, position {position.shape}, cursor {cursor.shape}, "
            "expected [B, H, S, D] twice, [B, H, S], [B]"
        )
    one = (slots[0], 1, slots[2]) if gain is None else slots  # heads may share a score
    wrong = any(x.shape not in (slots, one) or x.dtype != jnp.float32 for x in scores)
    if wrong or (score is None and gain is not None):
        got = [f"{x.dtype} {x.shape}" for x in scores]
        raise ValueError(
            f"evict_token: got score and gain {got}, expected float32 {slots}, a score with a gain, or without one {one}"
        )
    kept = EVICT_TOKEN.run(
        key,
        value,
        position,
        cursor,
        score,
        budget=budget,
        gain=gain,
        first=first,
        recent=recent,
        implementation=implementation,
        platform=platform,
    )
    return Kept(*kept)
