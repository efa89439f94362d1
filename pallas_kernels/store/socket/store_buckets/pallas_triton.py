"""A token's buckets and the norm of its value as one Pallas Triton kernel, in place: a program per KV head and table."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.block_specs import of_head, whole
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_bytes, check_head_dim
from pallas_kernels._triton.pallas import pl
from pallas_kernels.formats.sign_codes import BLOCK
from pallas_kernels.host import copy_row, sinks_of


def _kernel(key_ref, value_ref, active_ref, cursor_ref, planes_ref, _, __, ids_ref, norm_ref, *, sinks):
    # Of one head: key and value [S, D] or copies [R, D]; ids [N, L * 16] and norm [S], as operands and as results in the same
    # memory. Of all: active [B, 1], cursor [B], planes [L, P, D].
    b, table = pl.program_id(0), pl.program_id(2)
    slot, bits = cursor_ref[b] - 1, planes_ref.shape[1]

    def newest(ref):
        return ref[slot if sinks is None else copy_row(slot, sinks, ref.shape[0]), :].astype(jnp.float32)

    @pl.when((active_ref[b, 0] >= 0) & (slot < norm_ref.shape[0]))
    def _():
        # The size of a block is a power of two: the last plane is repeated, and counts once.
        side = jnp.arange(pl.next_power_of_2(bits), dtype=jnp.int32)
        own = jnp.minimum(side, bits - 1)
        product = jnp.sum(planes_ref[table, own, :] * newest(key_ref)[None, :], axis=1)
        bit = jnp.where((product >= 0) & (side < bits), 1 << (bits - 1 - own), 0)
        ids_ref[slot // BLOCK, table * BLOCK + slot % BLOCK] = jnp.sum(bit, dtype=jnp.int32).astype(ids_ref.dtype)

        @pl.when(table == 0)
        def _():
            value = newest(value_ref)
            norm_ref[slot] = jnp.sqrt(jnp.sum(value * value)).astype(norm_ref.dtype)


def store_buckets(key, value, active, cursor, planes, ids, norm, *, rows=None, interpret=False):
    """Store the buckets of new tokens and the norms of their values; ``interpret=True`` runs anywhere, slowly."""
    batch, heads = norm.shape[:2]
    index = [of_head(ids), of_head(norm)]
    return triton_call(
        functools.partial(_kernel, sinks=sinks_of(rows)),
        grid=(batch, heads, planes.shape[0]),
        in_specs=[of_head(key), of_head(value), *map(whole, (active, cursor, planes)), *index],
        out_specs=index,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (ids, norm)],
        input_output_aliases={5: 0, 6: 1},
        name="store_buckets",
        num_warps=1,
        interpret=interpret,
    )(key, value, active, cursor, planes, ids, norm)


def check(key, value, active, cursor, planes, ids, norm, *, rows=None):
    """Raise ``NotImplementedError`` for sizes that the kernel does not take."""
    dim, tokens = key.shape[3], active.shape[1]
    if tokens != 1:
        raise NotImplementedError(f"got {tokens} tokens per row, expected one")
    check_head_dim(dim)
    check_bytes(ids)
