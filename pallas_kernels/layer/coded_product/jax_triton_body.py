"""The product in Triton's own language, on tensor cores. Only `jax_triton` imports this module."""

from __future__ import annotations

from pallas_kernels._triton.jax_triton_language import jit, tl


@jit
def product(
    x,  # [VECTORS, WIDTH]
    codes,  # int8 [COUNT, WIDTH], or uint8 [COUNT, WIDTH / 2]
    scales,  # [COUNT, GROUPS]
    minima,  # like scales, read if HAS_MINIMA
    out,  # [VECTORS, COUNT]
    VECTORS: tl.constexpr,
    FILLED: tl.constexpr,  # VECTORS, rounded up to what a tensor core multiplies
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    GROUPS: tl.constexpr,  # of a row; 1 without minima: its scale multiplies the finished product
    HAS_MINIMA: tl.constexpr,
    HALVES: tl.constexpr,  # codes of a byte
    BLOCK: tl.constexpr,  # rows of the matrix
    SPAN: tl.constexpr,  # bytes of a row that are loaded at once, those of a group or of a chunk if there are several groups
    SPANS: tl.constexpr,  # of a step
):
    """Multiply all vectors with some rows of the matrix."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    safe = tl.minimum(row, COUNT - 1).to(tl.int64)  # offsets in a long matrix need 64 bits
    vector = tl.arange(0, FILLED)
    inside = vector[:, None] < VECTORS
    place = tl.arange(0, SPAN)
    total = tl.zeros((FILLED, BLOCK), tl.float32)
    for step in range(0, WIDTH // (HALVES * SPAN * SPANS)):
        for part in tl.static_range(SPANS):
            span = step * SPANS + part
            stored = tl.load(codes + safe[:, None] * (WIDTH // HALVES) + (span * SPAN + place)[None, :])
            for half in tl.static_range(HALVES):
                group = span * HALVES + half
                at = vector[:, None] * WIDTH + (group * SPAN + place)[None, :]
                numbers = tl.load(x + at, mask=inside, other=0.0)
                code = stored if HALVES == 1 else (stored >> (4 * half)) & 15
                # bfloat16 holds every code exactly. Triton converts signed bytes in fewer instructions than unsigned ones.
                made = tl.dot(numbers, tl.trans(code.to(tl.int8).to(numbers.dtype)))
                if GROUPS > 1:
                    made *= tl.load(scales + safe * GROUPS + group).to(tl.float32)[None, :]
                if HAS_MINIMA:
                    least = tl.load(minima + safe * GROUPS + group).to(tl.float32)
                    made += tl.sum(numbers.to(tl.float32), 1)[:, None] * least[None, :]
                total += made
    if GROUPS == 1:
        total *= tl.load(scales + safe).to(tl.float32)[None, :]
    at = vector[:, None] * COUNT + row[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside & (row < COUNT)[None, :])
