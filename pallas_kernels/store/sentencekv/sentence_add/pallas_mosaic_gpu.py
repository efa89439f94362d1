"""Adding a token to the open sentence through Mosaic GPU: a program for each list, which writes its state in place."""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels.choose.sentencekv.sentence_cut.rules import CLOSES
from pallas_kernels.host import copy_row, sinks_of

MOST = 2**14  # channels of all queries of a KV head, in registers
TAKES = f"{arrays.HOPPER}, G * D up to {MOST}"


def _body(
    cursor_ref, event_ref, key_ref, query_ref, sentence_ref, mean_ref, count_ref, query_sum_ref, key_sum_ref, length_ref,
    *, heads, slots, means, copies, group, dim, sinks,
):  # fmt: skip
    # cursor, event [B]; key [L, S, D], or copies [L, R, D]; query [L, G, D]; then the state, in place: sentence [L, S], mean
    # [L, N, D], count [L], query_sum [L, G, D], key_sum [L, D], length [L].
    line = lax.axis_index("x")
    slot, event = (arrays.scalar(ref, lax.div(line, heads)) for ref in (cursor_ref, event_ref))
    slot = slot - 1
    active, ends = event > 0, event == CLOSES
    at = jnp.clip(slot, 0, slots - 1)
    row = at if sinks is None else copy_row(at, sinks, copies)
    count, length = (arrays.scalar(ref, line) for ref in (count_ref, length_ref))
    length = length + active.astype(jnp.int32)

    def added(ref, sum_ref, width, rows):  # a row that does not change may hold NaN in its slot and its query
        entry = arrays.counted(arrays.size_of(width))
        place = jnp.where(entry < width, entry, -1)
        of_query = arrays.spread(line, entry.shape[0]), width
        new = arrays.load(ref, jnp.where(active, place, -1), rows=(arrays.spread(rows, entry.shape[0]), width))
        return place, of_query, arrays.load(sum_ref, place, rows=of_query) + new

    place, of_query, query_sum = added(query_ref, query_sum_ref, group * dim, line)
    channel, of_key, key_sum = added(key_ref, key_sum_ref, dim, line * copies + row)
    arrays.meet()  # all is read that is written now
    arrays.store(query_sum_ref, place, jnp.where(ends, 0.0, query_sum), of_query)
    arrays.store(key_sum_ref, channel, jnp.where(ends, 0.0, key_sum), of_key)
    mean = key_sum / jnp.maximum(length, 1).astype(jnp.float32)
    of_mean = arrays.spread(line * means + jnp.minimum(count, means - 1), channel.shape[0]), dim
    arrays.store(mean_ref, jnp.where(ends & (count < means), channel, -1), mean, of_mean)
    arrays.put(sentence_ref, jnp.where(active & (slot >= 0) & (slot < slots), line * slots + at, -1), count)
    # Where the sentence ends, the next one begins with sums of 0.
    arrays.put(count_ref, line, count + ends.astype(jnp.int32))
    arrays.put(length_ref, line, jnp.where(ends, 0, length))


def sentence_add(key, query, cursor, event, state, *, rows=None):
    """Add a token to the open sentence, and close the sentence where it ends."""
    batch, heads, group, dim = query.shape
    sizes = {"slots": state[0].shape[2], "means": state[1].shape[2], "copies": key.shape[2], "group": group, "dim": dim}
    body = functools.partial(_body, heads=heads, **sizes, sinks=sinks_of(rows))
    return tuple(arrays.in_place(body, state, grid=(batch * heads,))(cursor, event, key, query))


def check(key, query, cursor, event, state, *, rows=None):
    """Raise ``NotImplementedError`` for other GPUs, dtypes, and queries of more channels than one program holds."""
    arrays.check_hopper()
    arrays.check_floats(key, query, state[1])
    if query.shape[2] * query.shape[3] > MOST or state[0].size >= 2**31:
        raise NotImplementedError(f"got query {query.shape}, expected at most {MOST} channels of a KV head")
