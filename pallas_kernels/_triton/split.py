"""How split-K attention divides its work: one description for every kernel that reads keys and values in blocks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

LEAST = 16  # slots of the smallest block


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        block: slots read per step, a power of two of at least 16.
        splits: programs per list or KV head.
        num_warps: warps per program.
        num_stages: depth of Triton's software pipeline.
    """

    block: int = 64
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self):
        if self.block < LEAST or self.block & (self.block - 1):
            raise ValueError(f"Config: got block={self.block}, expected a power of two of at least {LEAST}")
        if self.splits < 1:
            raise ValueError(f"Config: got splits={self.splits}, expected at least 1")


def partial_shapes(lists: int, splits: int, group: int, dim: int, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes that `merge_splits` reads, for L = B*H ``lists``: out [L, N, G, D] and lse float32 [L, N, G]."""
    return jax.ShapeDtypeStruct((lists, splits, group, dim), dtype), jax.ShapeDtypeStruct((lists, splits, group), jnp.float32)


def blocks_to_read(limit_ref: Any, gap_ref: Any, at: tuple[Any, Any], slots: int, block: int) -> tuple[Any, Any, Any]:
    """List, in a kernel, the blocks that row and KV head ``at`` has to read.

    Args:
        limit_ref: int32 [B]; slots from there on are not read.
        gap_ref: int32 [B, H, 2], a range of slots in which no token is, or None.
        at: row and KV head.
        slots: S, to which a limit is clipped.
        block: slots per block.

    Returns:
        The clipped limit; the number of blocks to read; a function from 0, 1, ... to the indices of these blocks.
    """
    row, head = at
    limit = jnp.clip(limit_ref[row], 0, slots)
    blocks = jax.lax.div(limit + (block - 1), block)
    if gap_ref is None:
        return limit, blocks, lambda step: step
    start, stop = gap_ref[row, head, 0], jnp.minimum(gap_ref[row, head, 1], limit)
    first = jax.lax.div(start + (block - 1), block)
    left_out = jnp.maximum(jax.lax.div(stop, block) - first, 0)  # whole blocks of the gap
    return limit, blocks - left_out, lambda step: jnp.where(step < first, step, step + left_out)


def powers(width: int) -> list[tuple[int, int]]:
    """Split a width into powers of two, the largest first: the start and the size of each part."""
    sizes = [1 << bit for bit in reversed(range(width.bit_length())) if width & (1 << bit)]
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]
