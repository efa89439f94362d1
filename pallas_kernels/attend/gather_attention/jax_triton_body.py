"""The kernel of `pallas_triton` in Triton's own language. Only `jax_triton` imports this module."""

from __future__ import annotations

from pallas_kernels._triton.jax_triton_language import attend, begin, jit, row, store, tl


@jit
def _partial(
    query,  # [B, H, G, D]
    key,  # [B, H, S, D]
    value,
    slots,  # [B, LISTS, K]
    mask,
    position,  # [B, H, S], read if HAS_POSITION
    out,  # float32 [B, H, SPLITS, G, D]
    lse,  # float32 [B, H, SPLITS, G]
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FILLED: tl.constexpr,  # GROUP, rounded up to a power of two
    DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    LISTS: tl.constexpr,
    ITEMS: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    MAPPED: tl.constexpr,
):
    b, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # The first row of this head in keys, values and positions.
    of_key, of_value = (row(1, ROWS, MAPPED) * HEADS + h) * SLOTS, (row(2, ROWS, MAPPED) * HEADS + h) * SLOTS
    of_position = (row(5, ROWS, MAPPED) * HEADS + h) * SLOTS
    shared = h if LISTS > 1 else 0  # the head's own list, or the one that all heads share
    of_list, of_mask = (row(3, ROWS, MAPPED) * LISTS + shared) * ITEMS, (row(4, ROWS, MAPPED) * LISTS + shared) * ITEMS
    head = tl.arange(0, FILLED)
    dim = tl.arange(0, DIM)
    at = (row(0, ROWS, MAPPED) * HEADS + h) * GROUP + head
    q = tl.load(query + at[:, None] * DIM + dim[None, :], mask=head[:, None] < GROUP, other=0.0)
    total, maximum, sums = begin(FILLED, DIM)
    # Each program has a contiguous share of the list; the last one may have fewer blocks.
    left = (ITEMS * PAGE + BLOCK - 1) // BLOCK - split * STEPS
    for step in range(0, tl.minimum(left, STEPS)):
        entry = (split * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        inside = entry < ITEMS * PAGE
        item = tl.where(inside, entry // PAGE, 0)
        listed = inside & (tl.load(mask + of_mask + item) != 0)
        # A page number becomes a slot. Masked entries may hold anything: they read row 0, which is harmless.
        slot = tl.load(slots + of_list + item)
        slot = tl.minimum(tl.maximum(slot, 0), (SLOTS - 1) // PAGE) * PAGE + entry % PAGE
        listed = listed & (slot < SLOTS)
        slot = tl.where(listed, slot, 0)
        if HAS_POSITION:
            listed = listed & (tl.load(position + of_position + slot) >= 0)
        k = tl.load(key + (of_key + slot)[:, None] * DIM + dim[None, :])
        v = tl.load(value + (of_value + slot)[:, None] * DIM + dim[None, :])
        total, maximum, sums = attend(q, k, v, listed, total, maximum, sums, SCALE, PRECISION)
    at = ((b * HEADS + h) * tl.num_programs(2) + split) * GROUP + head
    store(out, lse, at, head < GROUP, total, maximum, sums, DIM)
