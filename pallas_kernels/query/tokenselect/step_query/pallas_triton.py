"""A decode step's query as one Pallas Triton kernel: a program per row of the batch."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_head_dim
from pallas_kernels._triton.pallas import pl
from pallas_kernels._triton.rotate import angles, rotated_pair
from pallas_kernels.query.tokenselect.step_query.result import StepQuery


def _kernel(*refs, num_sink, num_local, given):
    # Operands as named below: query, last [B, H * G, D]; budget, theta [1]; inv_freq [D/2]; products [B, 3], if they are
    # given; all other operands [B]. Then the results, the fields of `StepQuery`: last, ready, hits and refreshes share the
    # memory of the operands of these names.
    names = "query last ready hits refreshes cursor position budget theta inv_freq".split() + ["products"] * given
    ref = dict(zip(names, refs, strict=False))
    mean_ref, rotated_ref, last_out, ready_out, hits_out, refreshes_out, miss_out, stop_out, wanted_out = refs[len(names) :]
    row = pl.program_id(0)
    _, heads, dim = ref["query"].shape
    halves = pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)
    # The size of a block is a power of two: the last head is repeated, and written again with the same values.
    lines = jnp.arange(pl.next_power_of_2(heads), dtype=jnp.int32)
    real, lines = (lines < heads)[:, None], jnp.minimum(lines, heads - 1)
    # Every load is issued before the program waits for any of them.
    now = [ref["query"][row, lines, half].astype(jnp.float32) for half in halves]
    then = [ref["last"][row, lines, half] for half in halves]
    cursor, ready, hits, refreshes, position = (ref[x][row] for x in "cursor ready hits refreshes position".split())
    inv_freq, budget, theta = ref["inv_freq"][:], ref["budget"][0], ref["theta"][0]

    def product(one, other):  # inner product over all heads together; repeated heads count once
        both = sum(a * b for a, b in zip(one, other, strict=True))
        return jnp.sum(jnp.sum(jnp.where(real, both, 0.0), axis=1), axis=0)

    if given:
        of_now, of_then, of_both = (ref["products"][row, column] for column in range(3))
    else:
        of_now, of_then, of_both = product(now, now), product(then, then), product(now, then)
    cosine = of_both / jnp.maximum(jnp.sqrt(of_now * of_then), 1e-30)
    # A row selects when it has more tokens than it may attend to and its query has moved away from the last selecting query.
    limit = num_sink + budget + num_local
    sparse = (cursor > limit) & (position >= 0)
    hit = sparse & ready & (cosine >= theta)
    miss = sparse & ~hit
    one = jnp.zeros((1,), jnp.int32)  # `angles` takes a block of places

    # The query scores from place num_local, and attends from the last place of the list of tokens.
    def write(out, first, second):
        for half, x in zip(halves, (first, second), strict=True):
            out[row, lines, half] = x.astype(out.dtype)

    write(mean_ref, *rotated_pair(*now, *angles(one + num_local, inv_freq)))
    write(rotated_ref, *rotated_pair(*now, *angles(one + jnp.minimum(cursor, limit) - 1, inv_freq)))
    ready_out[row] = ready | miss
    hits_out[row] = hits + hit.astype(jnp.int32)
    refreshes_out[row] = refreshes + miss.astype(jnp.int32)
    miss_out[row] = miss
    stop_out[row] = jnp.where(miss, cursor - num_local, 0)
    wanted_out[row] = jnp.where(miss, budget, 0)

    @pl.when(miss)
    def _():
        write(last_out, *now)  # in place: a row that does not select keeps its last query


def step_query(
    query, last, ready, hits, refreshes, cursor, position, budget, theta, inv_freq, products=None, *, num_sink, num_local,
    interpret=False,
):  # fmt: skip
    """Rotate the query of a decode step, and decide whether the step selects; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, group, dim = query.shape
    flat = batch, heads * group, dim
    row, sums = jax.ShapeDtypeStruct((batch,), jnp.bool_), jax.ShapeDtypeStruct((batch,), jnp.int32)
    wide = jax.ShapeDtypeStruct(flat, jnp.float32)
    mean, rotated, last, *rest = triton_call(
        functools.partial(_kernel, num_sink=num_sink, num_local=num_local, given=products is not None),
        grid=(batch,),
        out_shape=(wide, jax.ShapeDtypeStruct(flat, query.dtype), wide, row, sums, sums, row, sums, sums),
        input_output_aliases={1: 2, 2: 3, 3: 4, 4: 5},  # state, changed in place
        name="step_query",
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
        *([] if products is None else [products]),
    )
    return StepQuery(*(x.reshape(query.shape) for x in (mean, rotated, last)), *rest)


def check(query, *_, **__):
    """Raise ``NotImplementedError`` for head dims that the kernel does not take."""
    dim = query.shape[-1]
    check_head_dim(dim)
