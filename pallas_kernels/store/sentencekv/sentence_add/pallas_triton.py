"""Adding a token to the open sentence as one Pallas Triton kernel: a program per list, which writes its state in place."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.choose.sentencekv.sentence_cut.rules import CLOSES
from pallas_kernels.host import copy_row, sinks_of


def _kernel(cursor_ref, event_ref, key_ref, query_ref, *refs, heads, sinks):
    # Of all rows: cursor, event [B]. Of one list: key [S, D], or copies [R, D]; query [G, D]. Then the state, before and
    # after, in the same memory: sentence [S], mean [N, D], query_sum [G, D], key_sum [D] of this list; count, length [L] of
    # all lists.
    before, (sentence_ref, mean_ref, count_ref, query_sum_ref, key_sum_ref, length_ref) = refs[:6], refs[6:]
    old_count_ref, old_query_ref, old_key_ref, old_length_ref = before[2:]
    index = pl.program_id(0)
    slot, event = cursor_ref[index // heads] - 1, event_ref[index // heads]
    active, ends = event > 0, event == CLOSES
    num_slots, dim = sentence_ref.shape[0], key_ref.shape[1]
    at = jnp.minimum(jnp.maximum(slot, 0), num_slots - 1)
    row = at if sinks is None else copy_row(at, sinks, key_ref.shape[0])
    count, length = old_count_ref[index], old_length_ref[index] + active.astype(jnp.int32)
    # A row that does not change may hold NaN in its slot and its query.
    key_sum = old_key_ref[...] + jnp.where(active, key_ref[row, :], 0).astype(jnp.float32)
    query_sum = old_query_ref[...] + jnp.where(active, query_ref[...], 0).astype(jnp.float32)
    mean = key_sum / jnp.maximum(length, 1).astype(jnp.float32)
    lane = jnp.arange(dim, dtype=jnp.int32)

    @pl.when(active & (slot >= 0) & (slot < num_slots))
    def _():
        sentence_ref[at] = count

    @pl.when(ends & (count < mean_ref.shape[0]))
    def _():
        plt.store(mean_ref.at[jnp.full_like(lane, count), lane], mean.astype(mean_ref.dtype))

    # Where the sentence ends, the next one begins with sums of 0.
    count_ref[index] = count + ends.astype(jnp.int32)
    length_ref[index] = jnp.where(ends, 0, length)
    query_sum_ref[...] = jnp.where(ends, 0, query_sum)
    key_sum_ref[...] = jnp.where(ends, 0, key_sum)


def sentence_add(key, query, cursor, event, state, *, rows=None, interpret=False):
    """Add a token to the open sentence, and close the sentence where it ends; ``interpret=True`` runs anywhere, slowly."""
    batch, heads = query.shape[:2]
    lists = batch * heads
    lines = [x.reshape(lists, *x.shape[2:]) for x in (key, query, *state)]

    def spec(x: jax.Array) -> pl.BlockSpec:
        if x.ndim == 1:
            return pl.BlockSpec(x.shape, lambda i: (0,))
        return pl.BlockSpec((None, *x.shape[1:]), lambda i, n=x.ndim: (i,) + (0,) * (n - 1))

    operands = [cursor, event, *lines]
    after = triton_call(
        functools.partial(_kernel, heads=heads, sinks=sinks_of(rows)),
        grid=(lists,),
        in_specs=[spec(x) for x in operands],
        out_specs=[spec(x) for x in lines[2:]],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in lines[2:]],
        input_output_aliases={4 + i: i for i in range(len(state))},
        num_warps=1,
        num_stages=1,
        interpret=interpret,
        name="sentence_add",
    )(*operands)
    return tuple(new.reshape(old.shape) for new, old in zip(after, state, strict=True))


def check(key, query, cursor, event, state, *, rows=None):
    """Raise ``NotImplementedError`` for groups and head dims that the kernel does not take."""
    group, dim = query.shape[2:]
    if group & (group - 1) or dim & (dim - 1):
        raise NotImplementedError(f"got {group} query heads per KV head and head_dim {dim}, expected powers of two")
