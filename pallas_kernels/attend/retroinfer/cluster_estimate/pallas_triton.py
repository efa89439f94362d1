"""Attention to clusters as one Pallas Triton kernel, grid (B, H, splits): every program writes one part."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton import online_softmax
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_dtypes
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.shared_memory import fitting_block
from pallas_kernels._triton.split import Config
from pallas_kernels.numerics import product_precision

PROGRAMS = 396  # three per streaming multiprocessor of an H100 or H200: sums are loaded once the clusters are known
MOST_SPLITS = 64  # every part adds to the work of the merge


def default_config(logits: jax.Array, value_sum: jax.Array) -> Config:
    """Choose programs for the whole GPU, none idle, and blocks that fit it; raise ``NotImplementedError`` if none fits."""
    rows, heads, clusters, dim = value_sum.shape
    filled, size = pl.next_power_of_2(logits.shape[2]), value_sum.dtype.itemsize

    def needed(block):
        # The pipeline knows clusters one step before it reads their sums; one block is laid out anew.
        return size * ((2 * (Config.num_stages - 2) + 1) * block * dim + filled * block) + 4 * filled * block

    block = fitting_block(Config.block, needed)
    blocks = pl.cdiv(clusters, block)
    steps = pl.cdiv(blocks, max(1, min(PROGRAMS // (rows * heads), MOST_SPLITS, blocks)))
    return Config(block=block, splits=pl.cdiv(blocks, steps))


def _kernel(
    logits_ref,  # [B, H, G, C]
    chosen_ref,  # [B, H, C]
    left_out_ref,  # [B, H, C]
    size_ref,  # [B, H, C]
    sum_ref,  # [B, H, C, D]
    out_ref,  # [B, H, N, G, D]
    lse_ref,  # [B, H, N, G]
    *,
    block,
    steps,
):
    b, h, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    group, clusters, dim = logits_ref.shape[2], *sum_ref.shape[2:]
    # The group is filled up to a power of two by repeating its last head.
    head = jnp.minimum(jnp.arange(pl.next_power_of_2(group), dtype=jnp.int32), group - 1)
    channel = jnp.broadcast_to(jnp.arange(dim, dtype=jnp.int32)[None], (block, dim))

    def add(step, sums):
        cluster = (split * steps + step) * block + jnp.arange(block, dtype=jnp.int32)
        chosen, left_out = (
            plt.load(x.at[b, h, cluster], mask=cluster < clusters, other=False) for x in (chosen_ref, left_out_ref)
        )
        chosen &= ~left_out
        shape = head.shape[0], block
        row, column, seen = (jnp.broadcast_to(x, shape) for x in (head[:, None], cluster[None], chosen[None]))
        logits = plt.load(logits_ref.at[b, h, row, column], mask=seen, other=-jnp.inf)
        size = plt.load(size_ref.at[b, h, cluster], mask=chosen, other=1).astype(jnp.float32)
        wanted, cluster = (jnp.broadcast_to(x[:, None], channel.shape) for x in (chosen, cluster))
        values = plt.load(sum_ref.at[b, h, cluster, channel], mask=wanted, other=0.0)
        # A cluster weighs as much as all its tokens together; its value is the mean of their values.
        logits = jnp.where(seen, logits + jnp.log(size)[None], -jnp.inf)
        return online_softmax.add_block(sums, logits, values, product_precision(values.dtype), 1 / size)

    left = pl.cdiv(clusters, block) - split * steps
    nothing = online_softmax.nothing(head.shape[0], dim)
    out, lse = online_softmax.result(lax.fori_loop(0, jnp.minimum(left, steps), add, nothing))
    # Repeated query heads write equal values to the same address.
    out_ref[b, h, split, head, :] = out
    lse_ref[b, h, split, head] = lse


def cluster_estimate(logits, chosen, left_out, size, value_sum, *, config: Config | None = None, interpret=False):
    """Attend to the chosen clusters through their sums of values; ``interpret=True`` runs anywhere, slowly."""
    rows, heads, clusters, dim = value_sum.shape
    config = default_config(logits, value_sum) if config is None else config
    parts = rows, heads, config.splits, logits.shape[2]
    return triton_call(
        functools.partial(_kernel, block=config.block, steps=pl.cdiv(clusters, config.block * config.splits)),
        grid=parts[:3],
        out_shape=(jax.ShapeDtypeStruct((*parts, dim), jnp.float32), jax.ShapeDtypeStruct(parts, jnp.float32)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="cluster_estimate",
    )(logits, chosen, left_out, size, value_sum)


def check(logits, chosen, left_out, size, value_sum):
    """Raise ``NotImplementedError`` for dtypes and head dims that the kernel does not take."""
    check_dtypes(value_sum)
    dim = value_sum.shape[3]
    if dim < 16 or dim > 256 or dim & (dim - 1) or not size.shape[2]:
        raise NotImplementedError(f"got {size.shape[2]} clusters of {dim}, expected head_dim a power of two from 16 to 256")
    default_config(logits, value_sum)
