"""Shared parts of kernels for jax-triton: Triton's language, and the steps of decode attention.

Only modules named ``jax_triton_body`` import this one.
"""

from __future__ import annotations

try:
    import triton.language as tl
    from triton import jit
except ImportError:  # Triton is optional: without it these modules can be imported, but not compiled
    tl = None

    def jit(function):
        """Replace ``triton.jit``: leave ``function`` as it is."""
        return function


@jit
def row(OPERAND: tl.constexpr, ROWS: tl.constexpr, MAPPED: tl.constexpr):
    """Return the row of an operand that belongs to this program: the program's own, or the member's if it is not mapped."""
    at = tl.program_id(0)
    if (MAPPED >> OPERAND) % 2 == 0:
        at = at % ROWS
    return at.to(tl.int64)


@jit
def begin(ROWS: tl.constexpr, DIM: tl.constexpr):
    """Start a running softmax: denominator [ROWS], maximum [ROWS], sums of values [ROWS, DIM]."""
    return (tl.zeros((ROWS,), tl.float32), tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS, DIM), tl.float32))


@jit
def attend(q, k, v, among, total, maximum, sums, SCALE: tl.constexpr, PRECISION: tl.constexpr):
    """Add a block of keys and values [N, DIM] to the running softmax; only slots with ``among`` [N] true enter."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE
    logits = tl.where(among[None, :], logits, float("-inf"))
    risen = tl.maximum(maximum, tl.max(logits, 1))
    # While no slot has entered, the maximum is -inf: a shift of 0 keeps -inf - (-inf) from becoming NaN.
    shift = tl.where(risen == float("-inf"), 0.0, risen)
    decay = tl.exp(maximum - shift)
    weight = tl.exp(logits - shift[:, None])
    # A hidden value may be NaN, which a weight of 0 would not remove.
    v = tl.where(among[:, None], v, 0.0).to(v.dtype)
    sums = sums * decay[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
    return total * decay + tl.sum(weight, 1), risen, sums


@jit
def store(out, lse, at, inside, total, maximum, sums, DIM: tl.constexpr):
    """Write a partial result to rows ``at`` [ROWS] of out [..., DIM] and lse, where ``inside`` [ROWS] is true."""
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + at[:, None] * DIM + tl.arange(0, DIM)[None, :], sums, mask=inside[:, None])
    # An empty part has total 0 and gets lse = log(0) = -inf.
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    tl.store(lse + at, shift + tl.log(total), mask=inside)
