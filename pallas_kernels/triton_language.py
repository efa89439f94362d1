"""What the bodies of `jax_triton` share: Triton's language, and the parts of decode attention. Imported only with a body."""

from __future__ import annotations

try:
    import triton.language as tl
    from triton import jit
except ImportError:  # optional: modules can still be imported, only not compiled
    tl = None

    def jit(function):
        """Stands for ``triton.jit``."""
        return function


@jit
def begin(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The state of a running softmax: denominator [ROWS], maximum [ROWS], sums of values [ROWS, DIM]."""
    return (
        tl.zeros((ROWS,), tl.float32),
        tl.full((ROWS,), float("-inf"), tl.float32),
        tl.zeros((ROWS, DIM), tl.float32),
    )


@jit
def attend(q, k, v, among, total, maximum, sums, SCALE: tl.constexpr, PRECISION: tl.constexpr):
    """The state with one more block of keys and values [N, DIM], of which those ``among`` [N] enter."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE
    logits = tl.where(among[None, :], logits, float("-inf"))
    risen = tl.maximum(maximum, tl.max(logits, 1))
    shift = tl.where(risen == float("-inf"), 0.0, risen)
    decay = tl.exp(maximum - shift)
    weight = tl.exp(logits - shift[:, None])
    v = tl.where(among[:, None], v, 0.0).to(v.dtype)
    sums = sums * decay[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
    return total * decay + tl.sum(weight, 1), risen, sums


@jit
def store(out, lse, at, inside, total, maximum, sums, DIM: tl.constexpr):
    """Write a partial result: rows ``at`` [ROWS] of out [..., DIM] and lse, those ``inside``."""
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + at[:, None] * DIM + tl.arange(0, DIM)[None, :], sums, mask=inside[:, None])
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    tl.store(lse + at, shift + tl.log(total), mask=inside)
