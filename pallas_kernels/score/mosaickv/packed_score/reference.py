"""Scores of packed vectors in plain JAX: every vector is unpacked."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.packed_vectors import join_terms, segments_of, unpack


def packed_score(parts, values, bitmap, count, last, *, span, unit, owner, reduce):
    """Multiply queries with packed vectors in the basis of each segment, in plain JAX."""
    query = join_terms(parts)
    rows, blocks, segments = query.shape[0], values.shape[2], query.shape[2]
    number = jnp.arange(blocks, dtype=jnp.int32)
    segment = segments_of(jnp.broadcast_to(number[None], (rows, blocks)), owner, last, span)[:, None, None, None]
    scores, piece = [], span if owner is None else blocks
    # Where segments are equal pieces of the list, each piece is multiplied with its own query only.
    for index, first in enumerate(range(0, blocks, piece)):
        at = slice(first, min(first + piece, blocks))
        mean = unpack(values[:, :, at], bitmap[:, :, at], query.shape[-1]).astype(jnp.float32)
        if owner is None:
            mine = query[jnp.arange(rows), :, jnp.minimum(index, last)]
            scores.append(jnp.einsum("bhge,bhpe->bhgp", mine, mean, precision=lax.Precision.HIGHEST))
        else:
            every = jnp.einsum("bhmge,bhpe->bhgmp", query, mean, precision=lax.Precision.HIGHEST)
            member = segment == jnp.arange(segments, dtype=jnp.int32)[None, None, None, :, None]
            scores.append(jnp.where(member, every, 0).sum(axis=3))
    score = jnp.concatenate(scores, axis=-1)
    visible = number[None, None] < (count // unit)[:, None, None]
    if reduce is None:
        return jnp.where(visible[:, :, None], score, -jnp.inf)
    score = score.max(axis=2) if reduce == "max" else score.mean(axis=2)
    return jnp.where(visible, score, -jnp.inf)
