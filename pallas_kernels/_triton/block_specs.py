"""Block specs of kernels whose first grid axes are the row b and the head h of a batch, or a list b * H + h.

A block spec only offsets the pointer of an operand: the kernel sees a ref of the rest of the array.
"""

import jax

from pallas_kernels._triton.pallas import pl


def whole(x: jax.Array) -> pl.BlockSpec:
    """Show all of ``x`` to every program."""
    return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))


def of_row(x: jax.Array) -> pl.BlockSpec:
    """Show row b of ``x`` [B, ...] to program (b, ...)."""
    return pl.BlockSpec((None, *x.shape[1:]), lambda b, *_: (b,) + (0,) * (len(x.shape) - 1))


def of_head(x: jax.Array) -> pl.BlockSpec:
    """Show ``x[b, h]`` of ``x`` [B, H, ...] to program (b, h, ...)."""
    return pl.BlockSpec((None, None, *x.shape[2:]), lambda b, h, *_: (b, h) + (0,) * (len(x.shape) - 2))


def of_list(x: jax.Array, per: int) -> pl.BlockSpec:
    """Show entry ``i // per`` of ``x`` to program (i, ...); ``per`` is 1 for an axis B * H, and H for an axis B."""
    return pl.BlockSpec((None, *x.shape[1:]), lambda i, *_: (i // per,) + (0,) * (len(x.shape) - 1))
