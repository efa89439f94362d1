"""Online eviction: every head gives up the token with the lowest score, and the newest token moves to its slot."""

from typing import Annotated, NamedTuple

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.formats.quantised import Quantised
from pallas_kernels.signature import declared, forward
from pallas_kernels.store.evict_token import pallas_mosaic_gpu, pallas_triton, reference

__all__ = ["EVICT_TOKEN", "Kept", "evict_token"]

EVICT_TOKEN = Operation.of("evict_token", pallas_triton, pallas_mosaic_gpu, reference, in_place=True)


class Kept(NamedTuple):
    """The arrays of a cache after an eviction."""

    key: Array | Quantised  # [B, H, S, D], as it was given
    value: Array | Quantised  # [B, H, S, D]
    position: Array  # int32 [B, H, S]
    cursor: Array  # int32 [B]
    score: Array | None  # float32 [B, H, S], moved with the tokens; None if no head has its own


@declared(EVICT_TOKEN, derivative="through ``xla``, the keys, values and scores only")
def evict_token(
    key: Annotated[Array | Quantised, "B H S D"],
    value: Annotated[Array | Quantised, "like key"],
    position: Annotated[Array, "int32 B H S"],
    cursor: Annotated[Array, "int32 B"],
    score: Annotated[Array | None, "float32 B H|1 S; B H S with gain"],
    *,
    budget: Annotated[Array | int, "int32 []"],
    gain: Annotated[Array | None, "float32 B H S"] = None,
    first: int = 0,
    recent: Annotated[Array | int, "int32 []"] = 0,
    implementation: str | None = None,
    platform: str | None = None,
) -> Kept:
    """Evict one token of every head in rows with more than ``budget`` slots in use; other rows stay as they are.

    The token with the lowest score goes, and of equal scores the newest one. The newest token of all, which is in slot
    ``cursor - 1`` of every head, moves to its slot, so bounded storage stays dense without a shift. If no token may go, the
    token in slot 0 goes.

    Args:
        key: keys or codes.
        cursor: slots in use; from there on all are empty, in every head.
        score: not NaN. One of all heads does not move with the tokens. None takes the position as score, so the oldest token
            goes.
        budget: tokens to keep; may be traced.
        gain: added to ``score`` before the eviction, in every row; only with a score of each head.
        first: tokens at positions below this may not go.
        recent: how many of the newest positions may not go; may be traced.
        implementation: "pallas_triton" is one kernel, in place where the caller gives the arrays up; D a power of two, S at
            most 16384.
    """
    if score is None and gain is not None:
        raise ValueError("evict_token: got gain and no score, expected a score of each head with it")
    return forward(lambda arrays: Kept(*arrays))
