"""The kernel of `pallas_triton` in Triton itself; imported only by `jax_triton`."""

from __future__ import annotations

try:
    import triton.language as tl
except ImportError:  # optional: the module can still be imported, only not compiled
    tl = None


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
    FILLED: tl.constexpr,  # GROUP up to a power of two
    DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    cache = (b * HEADS + h).to(tl.int64) * SLOTS
    head = tl.arange(0, FILLED)
    dim = tl.arange(0, DIM)
    at = (b * HEADS + h) * GROUP + head
    q = tl.load(query + at[:, None] * DIM + dim[None, :], mask=head[:, None] < GROUP, other=0.0)
    total = tl.zeros((FILLED,), tl.float32)
    maximum = tl.full((FILLED,), float("-inf"), tl.float32)
    sums = tl.zeros((FILLED, DIM), tl.float32)
    end = tl.minimum(tl.maximum(tl.load(limit + b), 0), SLOTS)
    blocks = (end + BLOCK - 1) // BLOCK
    first = split * blocks // tl.num_programs(2)
    last = (split + 1) * blocks // tl.num_programs(2)
    for step in range(first, last):
        # Where the block does not divide S the last one starts early; what it shares with the one before is hidden.
        start = tl.minimum(step * BLOCK, SLOTS - BLOCK)
        slot = start + tl.arange(0, BLOCK)
        held = (tl.load(position + cache + slot) >= 0) & (slot >= step * BLOCK) & (slot < end)
        row = cache + slot
        k = tl.load(key + row[:, None] * DIM + dim[None, :])
        v = tl.load(value + row[:, None] * DIM + dim[None, :])
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE
        logits = tl.where(held[None, :], logits, float("-inf"))
        risen = tl.maximum(maximum, tl.max(logits, 1))
        shift = tl.where(risen == float("-inf"), 0.0, risen)
        decay = tl.exp(maximum - shift)
        weight = tl.exp(logits - shift[:, None])
        total = total * decay + tl.sum(weight, 1)
        v = tl.where(held[:, None], v, 0.0).to(v.dtype)
        sums = sums * decay[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        maximum = risen
    at = ((b * HEADS + h) * tl.num_programs(2) + split) * GROUP + head
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + at[:, None] * DIM + dim[None, :], sums, mask=head[:, None] < GROUP)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    tl.store(lse + at, shift + tl.log(total), mask=head < GROUP)
