"""Attention over keys of low rank as one Pallas Triton kernel and a merge: no key is written to memory.

Grid (B, H, splits). Each program takes every so many-th block of one list. For each block of listed tokens it reads their
values and their rows of the left factor. It rebuilds the keys of its head from these rows and the right factor, rotates them,
and adds the block to its running softmax. It writes a float32 partial with its log-sum-exp (FlashDecoding's split-K).
`merge_splits` joins the partials with the partial softmaxes of the caller. A rank that is no power of two is read and
multiplied in parts whose sizes are powers of two. Values are read row by row, so they may be in host memory.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton import online_softmax
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_dtypes, check_head_dim
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.rotate import rotated
from pallas_kernels._triton.shared_memory import fitting_block
from pallas_kernels._triton.split import LEAST, Config, partial_shapes, powers
from pallas_kernels.attend.gather_attention.entries import listed_rows, load_rows
from pallas_kernels.attend.gather_attention.pallas_triton import default_config
from pallas_kernels.attend.merge_splits import pallas_triton as merge_kernel
from pallas_kernels.numerics import product_precision


def fitted(config: Config, query: jax.Array, rank: int) -> Config:
    """Shrink the config's blocks to fit the GPU's shared memory; raise ``NotImplementedError`` if none fits."""
    group, dim = query.shape[-2:]
    filled, size = pl.next_power_of_2(group), query.dtype.itemsize

    def needed(block):
        # The right factor; rows, values, and the keys that are made, of a block; the queries; the weights of a block.
        return size * (rank * dim + block * (rank + 2 * dim) + filled * dim + filled * block)

    return dataclasses.replace(config, block=fitting_block(config.block, needed))


def _kernel(*refs, structure, scale, block, splits, page_size):
    # Operands, a tree of `structure`:
    #   query [B, H, G, D]
    #   left [B, S, R]
    #   right [B, H, R, D]
    #   value [B, H, S, D]
    #   pages, mask [B, H, K]
    #   inv_freq [D/2]
    # Results: out [B*H, N, G, D], lse [B*H, N, G].
    *refs, out_ref, lse_ref = refs
    query_ref, left_ref, right_ref, value_ref, pages_ref, mask_ref, freq_ref = jax.tree.unflatten(structure, refs)
    b, h, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    heads, group, dim = query_ref.shape[1:]
    # The group is filled up to a power of two by repeating its last head.
    repeated = jnp.minimum(jnp.arange(pl.next_power_of_2(group), dtype=jnp.int32), group - 1)
    # Rotation pairs channel i with channel i + D/2, so there are two halves of a key, whose products are added.
    halves = [pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)]
    parts = powers(right_ref.shape[2])
    queries = [query_ref[b, h, repeated, half] for half in halves]
    right = [[right_ref[b, h, pl.ds(*part), half] for part in parts] for half in halves]
    inv_freq = freq_ref[:]
    dtype = queries[0].dtype
    dot = functools.partial(plt.dot, precision=product_precision(dtype))

    def add(step, sums):
        # Rows and values of the block are loaded together, before anything waits for them.
        entry = (step * splits + split) * block + jnp.arange(block, dtype=jnp.int32)
        lists = {"slots": pages_ref, "mask": mask_ref, "key": value_ref}
        row, _, asked, listed = listed_rows(lists, b, h, entry, page_size)
        left = [load_rows(left_ref, (b,), row, asked, start + jnp.arange(size, dtype=jnp.int32)) for start, size in parts]
        values = load_rows(value_ref, (b, h), row, asked, jnp.arange(dim, dtype=jnp.int32))
        keys = [functools.reduce(jnp.add, map(dot, left, factors)) for factors in right]
        keys = rotated(*keys, row.astype(jnp.float32)[:, None] * inv_freq[None, :])
        logits = sum(dot(q, k.astype(dtype), trans_b=True) for q, k in zip(queries, keys, strict=True)) * scale
        # A row that is not asked for was not read, and is 0.
        logits = jnp.where(listed[None, :], logits, -jnp.inf)
        return online_softmax.add_block(sums, logits, values, product_precision(dtype))

    sums = online_softmax.nothing(repeated.shape[0], dim)
    # The bound is traced, so a single step stays a loop, in which rows and values are loaded together.
    blocks = pl.cdiv(pages_ref.shape[2] * page_size, block)
    steps = jax.lax.div(blocks - split + (splits - 1), splits)
    out, lse = online_softmax.result(jax.lax.fori_loop(0, steps, add, sums))
    # Repeated query heads write equal values to the same address.
    out_ref[b * heads + h, split, repeated, :] = out.astype(out_ref.dtype)
    lse_ref[b * heads + h, split, repeated] = lse


def low_rank_attention(
    query, left, right, value, pages, mask, *, page_size, inv_freq, scale, partials=None, config: Config | None = None,
    interpret=False,
):  # fmt: skip
    """Rebuild the keys of listed pages from two factors, and attend to them; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, group, dim = query.shape
    lists, listed = batch * heads, pages.shape[2] * page_size
    if config is None:
        config = fitted(default_config(lists, listed, rotating=True), query, right.shape[2])
    operands, structure = jax.tree.flatten((query, left, right, value, pages, mask, inv_freq))
    # One split without partials writes the result itself, and there is no merge.
    whole = config.splits == 1 and partials is None
    out, lse = triton_call(
        functools.partial(
            _kernel, structure=structure, scale=scale, block=config.block, splits=config.splits, page_size=page_size
        ),
        grid=(batch, heads, config.splits),
        out_shape=partial_shapes(lists, config.splits, group, dim, query.dtype if whole else jnp.float32),
        name="low_rank_attention",
        num_warps=config.num_warps,
        num_stages=1,
        interpret=interpret,
    )(*operands)
    if not whole:
        parts = () if partials is None else (x.reshape(lists, *x.shape[2:]) for x in partials)
        out, lse = merge_kernel.merge_splits(out, lse, *parts, dtype=query.dtype, interpret=interpret)
    return out.reshape(query.shape), lse.reshape(query.shape[:3])


def check(query, left, right, value, pages, mask, **_):
    """Raise ``NotImplementedError`` for dtypes, head dims, groups and ranks that the kernel does not take."""
    check_dtypes(query)
    dim, rank = query.shape[-1], left.shape[2]
    check_head_dim(dim, 32)
    if rank % LEAST or not rank:
        raise NotImplementedError(f"got rank {rank}, expected a multiple of {LEAST}")
    fitted(Config(), query, rank)
