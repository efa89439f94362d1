"""`step_query` and `chunk_query` as Pallas Triton kernels; see `pallas_kernels.token_vote.queries`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.triton_call import triton_call

BLOCK = 32  # queries per program of the chunk kernel


def _angles(place, inv_freq):
    """Cosine and sine, float32 [N, D/2], of places int32 [N]."""
    angle = place.astype(jnp.float32)[:, None] * inv_freq[None, :]
    return jnp.cos(angle), jnp.sin(angle)


def _rotated(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


def _step_kernel(*refs, num_sink, num_local):
    names = "query last ready hits refreshes cursor position budget theta inv_freq"
    ref = dict(zip(names.split(), refs, strict=False))
    mean_ref, turned_ref, last_out, ready_out, hits_out, refreshes_out, miss_out, stop_out, wanted_out = refs[10:]
    row = pl.program_id(0)
    _, heads, dim = ref["query"].shape
    halves = pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)
    lines = jnp.arange(pl.next_power_of_2(heads), dtype=jnp.int32)
    real, lines = (lines < heads)[:, None], jnp.minimum(lines, heads - 1)  # repeated heads write the same numbers
    # Everything is asked for before anything is waited for.
    now = [ref["query"][row, lines, half].astype(jnp.float32) for half in halves]
    then = [ref["last"][row, lines, half] for half in halves]
    cursor, ready, hits, refreshes, position = (ref[x][row] for x in "cursor ready hits refreshes position".split())
    inv_freq, budget, theta = ref["inv_freq"][:], ref["budget"][0], ref["theta"][0]

    def product(one, other):
        both = sum(a * b for a, b in zip(one, other, strict=True))
        return jnp.sum(jnp.sum(jnp.where(real, both, 0.0), axis=1), axis=0)

    norm = jnp.sqrt(product(now, now) * product(then, then))
    cosine = product(now, then) / jnp.maximum(norm, 1e-30)
    limit = num_sink + budget + num_local
    sparse = (cursor > limit) & (position >= 0)
    hit = sparse & ready & (cosine >= theta)
    miss = sparse & ~hit
    one = jnp.zeros((1,), jnp.int32)

    def write(out, first, second):
        for half, x in zip(halves, (first, second), strict=True):
            out[row, lines, half] = x.astype(out.dtype)

    write(mean_ref, *_rotated(*now, *_angles(one + num_local, inv_freq)))
    write(turned_ref, *_rotated(*now, *_angles(one + jnp.minimum(cursor, limit) - 1, inv_freq)))
    ready_out[row] = ready | miss
    hits_out[row] = hits + hit.astype(jnp.int32)
    refreshes_out[row] = refreshes + miss.astype(jnp.int32)
    miss_out[row] = miss
    stop_out[row] = jnp.where(miss, cursor - num_local, 0)
    wanted_out[row] = jnp.where(miss, budget, 0)

    @pl.when(miss)
    def _():
        write(last_out, *now)  # changed in place: otherwise it stays as it is


def step_query(
    query,
    last,
    ready,
    hits,
    refreshes,
    cursor,
    position,
    budget,
    theta,
    inv_freq,
    *,
    num_sink,
    num_local,
    interpret=False,
):
    """See ``pallas_kernels.token_vote.step_query``; ``interpret=True`` runs anywhere, slowly. Fields of its result."""
    batch, heads, group, dim = query.shape
    flat = batch, heads * group, dim
    row, sums = jax.ShapeDtypeStruct((batch,), jnp.bool_), jax.ShapeDtypeStruct((batch,), jnp.int32)
    wide = jax.ShapeDtypeStruct(flat, jnp.float32)
    mean, turned, last, *rest = triton_call(
        functools.partial(_step_kernel, num_sink=num_sink, num_local=num_local),
        grid=(batch,),
        out_shape=(wide, jax.ShapeDtypeStruct(flat, query.dtype), wide, row, sums, sums, row, sums, sums),
        input_output_aliases={1: 2, 2: 3, 3: 4, 4: 5},  # state, changed in place
        name="token_vote_step",
        num_warps=2,
        interpret=interpret,
    )(
        query.reshape(flat),
        last.reshape(flat),
        ready,
        hits,
        refreshes,
        cursor,
        position,
        budget.reshape(1),
        theta.reshape(1),
        inv_freq,
    )
    return (*(x.reshape(query.shape) for x in (mean, turned, last)), *rest)


def _chunk_kernel(query_ref, real_ref, first_ref, inv_freq_ref, turned_ref, sum_ref, *, num_local):
    # query and turned [B, N, T, D]; real, first [B]; inv_freq [D/2]; sum [B, N, splits, D]
    row, head, split = (pl.program_id(axis) for axis in range(3))
    tokens, dim = query_ref.shape[2:]
    order = split * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    among = (order < real_ref[row])[:, None]
    order = jnp.minimum(order, tokens - 1)  # the last token, written more than once, is the same each time
    halves = pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)
    now = [query_ref[row, head, order, half].astype(jnp.float32) for half in halves]
    inv_freq = inv_freq_ref[:]
    asked = _rotated(*now, *_angles(first_ref[row] + order, inv_freq))
    scored = _rotated(*now, *_angles(num_local + order, inv_freq))
    for half, ask, score in zip(halves, asked, scored, strict=True):
        turned_ref[row, head, order, half] = ask.astype(turned_ref.dtype)
        sum_ref[row, head, split, half] = jnp.sum(jnp.where(among, score, 0.0), axis=0)


def chunk_query(query, real, first, inv_freq, *, num_local, interpret=False):
    """See ``pallas_kernels.token_vote.chunk_query``; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, group, tokens, dim = query.shape
    flat, splits = (batch, heads * group, tokens, dim), pl.cdiv(tokens, BLOCK)
    turned, total = triton_call(
        functools.partial(_chunk_kernel, num_local=num_local),
        grid=(batch, heads * group, splits),
        out_shape=(
            jax.ShapeDtypeStruct(flat, query.dtype),
            jax.ShapeDtypeStruct((batch, heads * group, splits, dim), jnp.float32),
        ),
        name="token_vote_chunk",
        num_warps=8,
        interpret=interpret,
    )(query.reshape(flat), real, first, inv_freq)
    mean = total.sum(axis=2) / jnp.maximum(real, 1).astype(jnp.float32)[:, None, None]
    return mean.reshape(batch, heads, group, dim), turned.reshape(query.shape)


def check(query, *_, **__):
    """Raise ``NotImplementedError`` for head dims the kernels do not take."""
    dim = query.shape[-1]
    if dim < 16 or dim > 256 or dim & (dim - 1):
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two from 16 to 256")
