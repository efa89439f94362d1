"""The kernel of `pallas_triton` in Triton's own language. Only `jax_triton` imports this module."""

from __future__ import annotations

from pallas_kernels._triton.jax_triton_language import attend, begin, jit, row, store, tl


@jit
def _partial(
    query,  # [B, H, G, D]
    key,  # [B, H, S, D]
    value,
    position,  # [B, H, S]
    limit,  # [B]
    out,  # float32 [B, H, SPLITS, G, D]
    lse,  # float32 [B, H, SPLITS, G]
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FILLED: tl.constexpr,  # GROUP, rounded up to a power of two
    DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    MAPPED: tl.constexpr,
):
    b, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # The first row of this head in keys, values and positions.
    of_key, of_value = (row(1, ROWS, MAPPED) * HEADS + h) * SLOTS, (row(2, ROWS, MAPPED) * HEADS + h) * SLOTS
    of_position = (row(3, ROWS, MAPPED) * HEADS + h) * SLOTS
    head = tl.arange(0, FILLED)
    dim = tl.arange(0, DIM)
    at = (row(0, ROWS, MAPPED) * HEADS + h) * GROUP + head
    q = tl.load(query + at[:, None] * DIM + dim[None, :], mask=head[:, None] < GROUP, other=0.0)
    total, maximum, sums = begin(FILLED, DIM)
    # The blocks below the row's limit, shared out evenly among the programs of a head.
    end = tl.minimum(tl.maximum(tl.load(limit + row(4, ROWS, MAPPED)), 0), SLOTS)
    blocks = (end + BLOCK - 1) // BLOCK
    first = split * blocks // tl.num_programs(2)
    last = (split + 1) * blocks // tl.num_programs(2)
    for step in range(first, last):
        # If the block size does not divide S, the last block starts early; slots that the block before had are hidden.
        start = tl.minimum(step * BLOCK, SLOTS - BLOCK)
        slot = start + tl.arange(0, BLOCK)
        held = (tl.load(position + of_position + slot) >= 0) & (slot >= step * BLOCK) & (slot < end)
        k = tl.load(key + (of_key + slot)[:, None] * DIM + dim[None, :])
        v = tl.load(value + (of_value + slot)[:, None] * DIM + dim[None, :])
        total, maximum, sums = attend(q, k, v, held, total, maximum, sums, SCALE, PRECISION)
    at = ((b * HEADS + h) * tl.num_programs(2) + split) * GROUP + head
    store(out, lse, at, head < GROUP, total, maximum, sums, DIM)
