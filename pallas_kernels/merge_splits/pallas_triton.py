"""One Pallas Triton kernel for the merge: a program per list, query head and piece of the head dimension.

In jnp the merge takes three to four launches, and each of them costs as much as this one.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels._triton.call import triton_call
from pallas_kernels.numerics import finite_or_zero

PIECE = 64  # channels per program, so that several multiprocessors read the partials of one list
MOST_PARTS = 1024  # all parts are one block, in registers


def _kernel(*refs, piece):
    # Pairs of out [L, N, G, D] and lse [L, N, G], each with an N of its own; merged [L, G, D]; whole [L, G]
    *refs, merged_ref, whole_ref = refs
    row, head, at = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    columns = pl.ds(at * piece, piece)

    def load(out_ref, lse_ref):
        # The size of a block is a power of two: entries past the last part repeat it with a weight of 0.
        parts = lse_ref.shape[1]
        part = jnp.arange(pl.next_power_of_2(parts), dtype=jnp.int32)
        index = jnp.minimum(part, parts - 1)
        return jnp.where(part < parts, lse_ref[row, index, head], -jnp.inf), out_ref[row, index, head, columns]

    pairs = [load(*pair) for pair in zip(refs[::2], refs[1::2], strict=True)]
    maximum = finite_or_zero(functools.reduce(jnp.maximum, [jnp.max(lse) for lse, _ in pairs]))

    def add(lse, out):
        weight = jnp.exp(lse - maximum)
        out = jnp.where((weight > 0)[:, None], out, 0.0)  # an empty part may hold anything
        return jnp.sum(weight), jnp.sum(out * weight[:, None], axis=0)

    totals, sums = zip(*(add(*pair) for pair in pairs), strict=True)
    total = sum(totals)
    merged_ref[row, head, columns] = (sum(sums) / jnp.where(total > 0, total, 1.0)).astype(merged_ref.dtype)

    @pl.when(at == 0)  # the first piece writes the log-sum-exp for all pieces
    def _():
        whole_ref[row, head] = maximum + jnp.log(total)


def merge_splits(out, lse, *beside, dtype, interpret=False):
    """See ``pallas_kernels.merge_splits.merge_splits``; ``interpret=True`` runs anywhere, slowly.

    ``beside`` is one more out [L, M, G, D] and lse [L, M, G], whose parts join those of the first.
    """
    lists, _, group, dim = out.shape
    piece = min(PIECE, dim & -dim)  # the largest power of two that divides D
    return triton_call(
        functools.partial(_kernel, piece=piece),
        grid=(lists, group, dim // piece),
        out_shape=(
            jax.ShapeDtypeStruct((lists, group, dim), dtype),
            jax.ShapeDtypeStruct((lists, group), jnp.float32),
        ),
        name="merge_splits",
        num_stages=1,
        interpret=interpret,
    )(out, lse, *beside)


def check(out, lse, *, dtype):
    """Raise ``NotImplementedError`` for more parts than one program holds."""
    if out.shape[1] > MOST_PARTS:
        raise NotImplementedError(f"got {out.shape[1]} parts, expected at most {MOST_PARTS}")
