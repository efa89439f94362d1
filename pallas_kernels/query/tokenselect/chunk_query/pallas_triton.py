"""Queries of several tokens as one Pallas Triton kernel: a program per row, query head and block of tokens."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_head_dim
from pallas_kernels._triton.pallas import pl
from pallas_kernels._triton.rotate import angles, rotated_pair

BLOCK = 32  # tokens per program


def _kernel(query_ref, real_ref, first_ref, inv_freq_ref, rotated_ref, sum_ref, *, num_local):
    # query and rotated [B, H * G, T, D]; real, first [B]; inv_freq [D/2]; sum [B, H * G, splits, D]
    row, head, split = (pl.program_id(axis) for axis in range(3))
    tokens, dim = query_ref.shape[2:]
    order = split * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    among = (order < real_ref[row])[:, None]  # tokens that enter the mean
    order = jnp.minimum(order, tokens - 1)  # the last token is repeated, and written again with the same values
    halves = pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)
    now = [query_ref[row, head, order, half].astype(jnp.float32) for half in halves]
    inv_freq = inv_freq_ref[:]
    asked = rotated_pair(*now, *angles(first_ref[row] + order, inv_freq))
    scored = rotated_pair(*now, *angles(num_local + order, inv_freq))
    # A partial sum per block of tokens, which XLA adds up: sums over programs would need atomics.
    for half, ask, score in zip(halves, asked, scored, strict=True):
        rotated_ref[row, head, order, half] = ask.astype(rotated_ref.dtype)
        sum_ref[row, head, split, half] = jnp.sum(jnp.where(among, score, 0.0), axis=0)


def chunk_query(query, real, first, inv_freq, *, num_local, interpret=False):
    """Rotate the queries of several tokens, and average their scoring queries; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, group, tokens, dim = query.shape
    flat, splits = (batch, heads * group, tokens, dim), pl.cdiv(tokens, BLOCK)
    rotated, total = triton_call(
        functools.partial(_kernel, num_local=num_local),
        grid=(batch, heads * group, splits),
        out_shape=(
            jax.ShapeDtypeStruct(flat, query.dtype),
            jax.ShapeDtypeStruct((batch, heads * group, splits, dim), jnp.float32),
        ),
        name="chunk_query",
        num_warps=8,
        interpret=interpret,
    )(query.reshape(flat), real, first, inv_freq)
    mean = total.sum(axis=2) / jnp.maximum(real, 1).astype(jnp.float32)[:, None, None]
    return mean.reshape(batch, heads, group, dim), rotated.reshape(query.shape)


def check(query, *_, **__):
    """Raise ``NotImplementedError`` for head dims that the kernel does not take."""
    dim = query.shape[-1]
    check_head_dim(dim)
