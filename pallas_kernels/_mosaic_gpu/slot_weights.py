"""The weight of each slot in a softmax whose denominators are known: a second pass over the keys."""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.products import CHUNK, Products
from pallas_kernels.numerics import LOG2_E, finite_or_zero

STEPS = 4  # slots of a block that a thread reads a part of
MOST_QUERIES = 16  # of a KV head, in registers


def _body(query_ref, key_ref, lse_ref, position_ref, bound_ref, last_ref, out_ref, *, n, heads, slots, scale):
    # query [L, G, D]; key [L * S, D]; lse [L, G]; position, out [L * S]; bound and last [B], see `slot_weights`.
    owner, first = lax.axis_index("x"), lax.axis_index("y") * n.rows
    row, head, writes = n.entries()
    slot, line = first + row, owner * slots
    chunks = n.chunks((key_ref,), line + jnp.minimum(first + n.step_rows(), slots - 1))
    position = arrays.load(position_ref, line + jnp.minimum(slot, slots - 1), -1)
    seen = (position >= 0) & (slot < arrays.scalar(bound_ref, lax.div(owner, heads)))
    seen &= position <= arrays.scalar(last_ref, lax.div(owner, heads))
    shift = finite_or_zero(arrays.load(lse_ref, owner * n.group + head))
    logits = n.multiply(n.queries(query_ref, owner), chunks, [key_ref.dtype])
    weight = jnp.where(seen, jnp.exp2((logits * scale - shift) * LOG2_E), 0.0)
    arrays.store(out_ref, jnp.where(writes & (slot < slots), line + slot, -1), n.of_row(weight, operator.add))


def slot_weights(query, key, lse, position, *, bound, last, scale):
    """Compute the attention that each slot receives from all query heads of its KV head: float32 [B, H, S].

    Args:
        query: [B, H, G, D].
        key: [B, H, S, D].
        lse: float32 [B, H, G].
        position: int32 [B, H, S]; a slot at a negative one does not enter.
        bound: int32 [B], the slot behind the last one that enters.
        last: int32 [B], the last position that enters.
        scale: of logits.
    """
    (rows, heads, group, dim), slots = query.shape, key.shape[2]
    n, lists = Products(group, dim, STEPS), rows * heads
    flat = query.reshape(lists, group, dim), key.reshape(lists * slots, dim), lse.reshape(lists, group), position.reshape(-1)
    (out,) = arrays.program(
        functools.partial(_body, n=n, heads=heads, slots=slots, scale=scale),
        [jax.ShapeDtypeStruct((lists * slots,), jnp.float32)],
        grid=(lists, -(-slots // n.rows)),
    )(*flat, bound, last)
    return out.reshape(rows, heads, slots)


def check_weights(query, key):
    """Raise ``NotImplementedError`` for GPUs, dtypes, head dims and groups that `slot_weights` does not take."""
    arrays.check_hopper()
    arrays.check_floats(query, key)
    (group, dim), slots = query.shape[2:], key.shape[2]
    if dim & (dim - 1) or not CHUNK <= dim <= 32 * CHUNK:
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two from {CHUNK} to {32 * CHUNK}")
    if group > MOST_QUERIES or not slots or key.size // dim * group >= 2**31:
        raise NotImplementedError(f"got {group} query heads and keys {key.shape}, expected at most {MOST_QUERIES} heads")
