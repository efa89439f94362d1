"""The ranking of clusters in plain JAX; the selection itself is an operation of its own."""

import jax
import jax.numpy as jnp

from pallas_kernels.choose.kth_select import kth_select_mask
from pallas_kernels.numerics import ceil_share, group_share
from pallas_kernels.score.page_logits.reference import page_logits


def cluster_rank(query, centroid, size, used, best, considered, *, scale, capacity, room):
    """Rank the clusters of each KV head by the attention of its query heads, in plain JAX."""
    clusters = size.shape[2]
    logits, _ = page_logits(query, centroid, used, None, scale=scale)
    exists = jnp.arange(clusters, dtype=jnp.int32)[None, None] < used[:, None, None]
    score = jnp.where(exists & (size > 0), group_share(logits, exists), -jnp.inf)
    listed, found = kth_select_mask(score, ceil_share(best, used)[:, None], min(capacity, clusters))
    both, kept = kth_select_mask(score, ceil_share(considered, used)[:, None], clusters)
    members = jnp.where(found, _at(size, listed), 0)
    fits = found & (_before(_at(score, listed), members, found) <= room)
    ends = jnp.cumsum(jnp.where(fits, members, 0), axis=2, dtype=jnp.int32)
    flags = (_mask(*x, clusters) for x in ((both, kept), (listed, fits)))
    behind = [(0, 0), (0, 0), (0, capacity - listed.shape[2])]
    return logits, jnp.pad(listed, behind), jnp.pad(ends, behind, mode="edge"), *flags


def _before(value, members, found):
    """Sum, for each entry of lists [B, H, K], the ``members`` of all entries that are not worse: int32 [B, H, K]."""
    place = jnp.arange(value.shape[2], dtype=jnp.int32)
    own, other = value[..., None], value[:, :, None]
    better = (other > own) | ((other == own) & (place[None] <= place[:, None])[None, None])
    return jnp.sum(jnp.where(better & found[:, :, None], members[:, :, None], 0), axis=3, dtype=jnp.int32)


def _at(values, index):
    """Take ``values`` [B, H, C] at ``index`` int32 [B, H, K], which is in range: [B, H, K]."""
    return jnp.take_along_axis(values, index, axis=2, mode="promise_in_bounds")


def _mask(index, listed, size):
    """Mark which of ``size`` entries a list ``index`` has where ``listed`` bool: bool [B, H, size]."""

    def one(index, listed):
        return jnp.zeros((size,), bool).at[index].max(listed, mode="promise_in_bounds", wrap_negative_indices=False)

    return jax.vmap(jax.vmap(one))(index, listed)
