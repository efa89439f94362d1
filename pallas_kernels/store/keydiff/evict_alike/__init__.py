"""Online eviction in KeyDiff: every head gives up the key most alike to the mean direction of the keys that it holds."""

from typing import Annotated, NamedTuple

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.formats.quantised import Quantised
from pallas_kernels.signature import declared, forward
from pallas_kernels.store.keydiff.evict_alike import pallas_triton, reference

__all__ = ["EVICT_ALIKE", "Kept", "direction_sum", "evict_alike"]

EVICT_ALIKE = Operation.of("evict_alike", pallas_triton, reference, in_place=True)


class Kept(NamedTuple):
    """The arrays of a cache after an eviction."""

    key: Array | Quantised  # [B, H, S, D], as it was given
    value: Array | Quantised  # [B, H, S, D]
    position: Array  # int32 [B, H, S]
    cursor: Array  # int32 [B]
    total: Array  # int32 [B, H, 2, D], `direction_sum` of the tokens that are left
    done: Array  # int32 [B], zeros


def direction_sum(key: Array, position: Array) -> Array:
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


@declared(EVICT_ALIKE, derivative="through ``xla``, the keys and values only")
def evict_alike(
    key: Annotated[Array | Quantised, "B H S D"],
    value: Annotated[Array | Quantised, "like key"],
    position: Annotated[Array, "int32 B H S"],
    cursor: Annotated[Array, "int32 B"],
    total: Annotated[Array, "int32 B H 2 D"],
    done: Annotated[Array, "int32 B"],
    *,
    newest: Annotated[Array, "int32 B"],
    budget: Annotated[Array | int, "int32 []"],
    implementation: str | None = None,
    platform: str | None = None,
) -> Kept:
    """Evict one token of every head in rows with more than ``budget`` slots in use; other rows stay as they are.

    The key with the largest cosine to the sum of all directions goes, and the newest token may go too. All else is as in
    `evict_token`: of equal cosines the newest token goes, and the newest token of all, in slot ``cursor - 1`` of every head,
    moves to the free slot.

    Args:
        key: keys or codes; empty slots may hold anything, NaN included.
        cursor: slots in use.
        total: `direction_sum` of the stored tokens without the newest one.
        done: zeros. A kernel counts here which of its programs are done.
        newest: negative in rows where ``total`` has all tokens, because none was stored since.
        budget: tokens to keep; may be traced.
        implementation: "pallas_triton" is one kernel, in place where the caller gives the arrays up; D a power of two, S at
            most 16384.
    """
    return forward(lambda arrays: Kept(*arrays))
