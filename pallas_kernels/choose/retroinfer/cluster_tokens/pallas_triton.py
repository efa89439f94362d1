"""Lists of the tokens of clusters as one Pallas Triton kernel, grid (B, H, blocks of the list).

Every entry finds its cluster by a binary search over ``ends``, which stay in the first-level cache.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt

BLOCK = 256  # entries per program


def _kernel(
    listed_ref,  # [B, H, K]
    ends_ref,  # [B, H, K]
    start_ref,  # [B, H, C]
    order_ref,  # [B, H, S]
    near_ref,  # [B]
    count_ref,  # [B]
    slots_ref,  # [B, H, first + most + newest]
    mask_ref,  # [B, H, first + most + newest]
    *,
    first,
    most,
    newest,
    block,
):
    b, h = pl.program_id(0), pl.program_id(1)
    entry = pl.program_id(2) * block + jnp.arange(block, dtype=jnp.int32)
    clusters, token = listed_ref.shape[2], entry - first
    near, count, total = near_ref[b], count_ref[b], ends_ref[b, h, clusters - 1]
    of_cluster = (token >= 0) & (token < jnp.minimum(total, most))
    at = jnp.zeros((block,), jnp.int32)  # how many clusters end at this token or before it
    step = pl.next_power_of_2(clusters + 1) // 2
    while step:
        index = jnp.minimum(at + step, clusters) - 1
        passed = (at + step <= clusters) & (plt.load(ends_ref.at[b, h, index], mask=of_cluster, other=0) <= token)
        at, step = jnp.where(of_cluster & passed, at + step, at), step // 2
    before = plt.load(ends_ref.at[b, h, jnp.maximum(at - 1, 0)], mask=of_cluster & (at > 0), other=0)
    cluster = plt.load(listed_ref.at[b, h, jnp.minimum(at, clusters - 1)], mask=of_cluster, other=0)
    place = plt.load(start_ref.at[b, h, cluster], mask=of_cluster, other=0) + token - before
    own = plt.load(order_ref.at[b, h, place], mask=of_cluster, other=0)
    end = jnp.where(token < 0, entry, near + token - most)
    at_end = ((token < 0) | (token >= most)) & (end < count)
    inside = entry < first + most + newest
    plt.store(slots_ref.at[b, h, entry], jnp.where(at_end, end, own), mask=inside)
    plt.store(mask_ref.at[b, h, entry], at_end | of_cluster, mask=inside)


def cluster_tokens(listed, ends, start, order, near, count, *, first, most, newest, block: int = BLOCK, interpret=False):
    """List the tokens of the listed clusters and of both ends of the row; ``interpret=True`` runs anywhere, slowly."""
    shape = (*listed.shape[:2], first + most + newest)
    return triton_call(
        functools.partial(_kernel, first=first, most=most, newest=newest, block=block),
        grid=(*shape[:2], pl.cdiv(shape[2], block)),
        out_shape=(jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.bool_)),
        interpret=interpret,
        name="cluster_tokens",
    )(listed, ends, start, order, near, count)


def check(listed, ends, start, order, near, count, *, first, most, newest):
    """Raise ``NotImplementedError`` for empty lists and for offsets that do not fit in 32 bits."""
    lists = listed.shape[0] * listed.shape[1]
    if not listed.shape[2] or not 0 < lists * max(first + most + newest, order.shape[2]) < 2**31:
        raise NotImplementedError(f"got lists {listed.shape} and order {order.shape}, expected entries, below 2**31 in all")
