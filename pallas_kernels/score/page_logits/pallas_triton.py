"""Logits of pages as one Pallas Triton kernel, grid (B, H, splits): every program has every so many-th block of pages.

So all programs have work, whatever part of the pages is in use. Each program writes the log-sum-exp of its own pages.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_dtypes
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.shared_memory import fitting_block
from pallas_kernels._triton.split import Config
from pallas_kernels.attend.dense_decode.pallas_triton import default_config
from pallas_kernels.numerics import finite_or_zero, product_precision


def fitted(config: Config, query: jax.Array) -> Config:
    """Shrink the config's blocks to fit the GPU's shared memory; raise ``NotImplementedError`` if none fits."""
    dim, filled = query.shape[3], pl.next_power_of_2(query.shape[2])

    def needed(block):
        return query.dtype.itemsize * (config.num_stages * block * dim + filled * dim) + 4 * filled * block

    return dataclasses.replace(config, block=fitting_block(config.block, needed))


def _kernel(*refs, structure, scale, block):
    # Operands, a tree of `structure`: query [B, H, G, D]; vector [B, H, P, D]; limit [B]; held [B, H, P], or None.
    # Results: logits [B, H, G, P]; lse [B, H, N, G].
    *refs, logits_ref, lse_ref = refs
    query_ref, vector_ref, limit_ref, held_ref = jax.tree.unflatten(structure, refs)
    b, h, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    group, pages, splits = query_ref.shape[2], vector_ref.shape[2], lse_ref.shape[2]
    # The group is filled up to a power of two by repeating its last head, whose results are written again.
    head = jnp.minimum(jnp.arange(pl.next_power_of_2(group), dtype=jnp.int32), group - 1)
    query, used = query_ref[b, h, head, :], jnp.clip(limit_ref[b], 0, pages)

    def pages_of(step):
        return (step * splits + split) * block + jnp.arange(block, dtype=jnp.int32)

    def write(page, logits):
        row, column = (jnp.broadcast_to(x, logits.shape) for x in (head[:, None], page[None]))
        plt.store(logits_ref.at[b, h, row, column], logits, mask=column < pages)

    def add(step, sums):
        total, maximum = sums
        page = pages_of(step)
        vector = vector_ref[b, h, jnp.minimum(page, pages - 1), :]
        logits = plt.dot(query, vector, trans_b=True, precision=product_precision(query.dtype)) * scale
        seen = page < used
        if held_ref is not None:
            seen &= plt.load(held_ref.at[b, h, page], mask=page < pages, other=False)
        # NaN compares false.
        logits = jnp.where(seen[None] & (logits > -jnp.inf), logits, -jnp.inf)
        write(page, logits)
        risen = jnp.maximum(maximum, jnp.max(logits, axis=1))
        shift = finite_or_zero(risen)
        return total * jnp.exp(maximum - shift) + jnp.sum(jnp.exp(logits - shift[:, None]), axis=1), risen

    def fill(step, _):
        write(pages_of(step), jnp.full((head.shape[0], block), -jnp.inf, jnp.float32))
        return _

    def steps(count):  # of this program, if there are so many pages
        return lax.div(lax.div(count + (block - 1), block) + (splits - 1) - split, splits)

    nothing = jnp.zeros(head.shape, jnp.float32), jnp.full(head.shape, -jnp.inf, jnp.float32)
    total, maximum = lax.fori_loop(0, steps(used), add, nothing)
    lax.fori_loop(steps(used), steps(pages), fill, jnp.int32(0))
    lse_ref[b, h, split, head] = finite_or_zero(maximum) + jnp.log(total)


def page_logits(query, vector, limit, held=None, *, scale, config: Config | None = None, interpret=False):
    """Compute the logits of pages and their log-sum-exp; ``interpret=True`` runs anywhere, slowly."""
    rows, heads, pages, _ = vector.shape
    config = fitted(default_config(rows * heads, pages), query) if config is None else config
    operands, structure = jax.tree.flatten((query, vector, limit, held))
    return triton_call(
        functools.partial(_kernel, structure=structure, scale=scale, block=config.block),
        grid=(rows, heads, config.splits),
        out_shape=(
            jax.ShapeDtypeStruct((*query.shape[:3], pages), jnp.float32),
            jax.ShapeDtypeStruct((rows, heads, config.splits, query.shape[2]), jnp.float32),
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="page_logits",
    )(*operands)


def check(query, vector, limit, held=None, *, scale):
    """Raise ``NotImplementedError`` for dtypes and head dims that the kernel does not take."""
    check_dtypes(query)
    dim, pages = vector.shape[3], vector.shape[2]
    if dim < 16 or dim > 256 or dim & (dim - 1) or not pages:
        raise NotImplementedError(f"got {pages} pages of {dim}, expected head_dim a power of two from 16 to 256")
    fitted(Config(), query)
