"""The product in Triton's own language, on tensor cores. Only `jax_triton` imports this module."""

from __future__ import annotations

from pallas_kernels._triton.jax_triton_language import jit, row, tl


@jit
def product(
    x,  # [ROWS, VECTORS, WIDTH]
    codes,  # int8 [ROWS, COUNT, WIDTH], or uint8 [ROWS, COUNT, WIDTH / 2]
    scales,  # [ROWS, COUNT, GROUPS]
    minima,  # like scales, read if HAS_MINIMA
    out,  # [ROWS, VECTORS, COUNT]
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
    ROWS: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """Multiply all vectors with some rows of the matrix."""
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    last = tl.minimum(place, COUNT - 1)
    # Offsets in a long matrix need 64 bits, which `row` has.
    of_code, of_scale = row(1, ROWS, MAPPED) * COUNT + last, row(2, ROWS, MAPPED) * COUNT + last
    of_minimum, of_x = row(3, ROWS, MAPPED) * COUNT + last, row(0, ROWS, MAPPED) * VECTORS
    vector = tl.arange(0, FILLED)
    inside = vector[:, None] < VECTORS
    entry = tl.arange(0, SPAN)
    total = tl.zeros((FILLED, BLOCK), tl.float32)
    for step in range(0, WIDTH // (HALVES * SPAN * SPANS)):
        for part in tl.static_range(SPANS):
            span = step * SPANS + part
            stored = tl.load(codes + of_code[:, None] * (WIDTH // HALVES) + (span * SPAN + entry)[None, :])
            for half in tl.static_range(HALVES):
                group = span * HALVES + half
                at = (of_x + vector)[:, None] * WIDTH + (group * SPAN + entry)[None, :]
                numbers = tl.load(x + at, mask=inside, other=0.0)
                code = stored if HALVES == 1 else (stored >> (4 * half)) & 15
                # bfloat16 holds every code exactly. Triton converts signed bytes in fewer instructions than unsigned ones.
                made = tl.dot(numbers, tl.trans(code.to(tl.int8).to(numbers.dtype)))
                if GROUPS > 1:
                    made *= tl.load(scales + of_scale * GROUPS + group).to(tl.float32)[None, :]
                if HAS_MINIMA:
                    least = tl.load(minima + of_minimum * GROUPS + group).to(tl.float32)
                    made += tl.sum(numbers.to(tl.float32), 1)[:, None] * least[None, :]
                total += made
    if GROUPS == 1:
        total *= tl.load(scales + of_scale).to(tl.float32)[None, :]
    at = (tl.program_id(0).to(tl.int64) * VECTORS + vector)[:, None] * COUNT + place[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside & (place < COUNT)[None, :])
