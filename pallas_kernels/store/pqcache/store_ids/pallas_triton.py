"""The code of a step's token as one Pallas Triton kernel, in place: a program per row and KV head."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.block_specs import of_head
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_bytes
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.formats import bit_codes
from pallas_kernels.host import copy_row, sinks_of

MOST_ELEMENTS = 1 << 13  # elements of the centroids of a part, held in registers


def _kernel(key_ref, active_ref, cursor_ref, centroid_ref, _, ids_ref, *, sinks):
    # Of one head: key [S, D], or copies [R, D]; centroid [M, C, D/M]; ids [N * bytes], as operand and as result in the same
    # memory. Of a row: active, cursor [1].
    parts, count, width = centroid_ref.shape
    bits = bit_codes.bits_of(count)
    together, size = bit_codes.together(parts * bits)
    slot = cursor_ref[0] - 1

    @pl.when((active_ref[0] >= 0) & (slot < ids_ref.shape[0] // size * together))
    def _():
        row = slot if sinks is None else copy_row(slot, sinks, key_ref.shape[0])
        shape = pl.next_power_of_2(count), pl.next_power_of_2(width)
        number, channel = jnp.arange(shape[0], dtype=jnp.int32), jnp.arange(shape[1], dtype=jnp.int32)
        center, column = jnp.broadcast_to(number[:, None], shape), jnp.broadcast_to(channel[None, :], shape)
        code = jnp.int32(0)
        for part in range(parts):
            centroid = plt.load(centroid_ref.at[part, center, column], mask=(center < count) & (column < width), other=0)
            key = plt.load(key_ref.at[row, part * width + channel], mask=channel < width, other=0).astype(jnp.float32)
            away = jnp.sum(centroid * centroid, axis=1) - 2 * jnp.sum(centroid * key[None, :], axis=1)
            away = jnp.where(number < count, away, jnp.inf)
            # A key of NaN has no nearest centroid, and gets the first one.
            own = jnp.min(jnp.where(away == jnp.min(away), number, count))
            code = code | (jnp.where(own < count, own, 0) << part * bits)
        # The group of codes that share bytes. To write a byte twice does no harm.
        byte = jnp.arange(4, dtype=jnp.int32)
        shift = lax.rem(slot, together) * (parts * bits) - 8 * byte
        moved = jnp.where(shift >= 0, code << jnp.clip(shift, 0, 8), code >> jnp.clip(-shift, 0, 31)) & 255
        at = lax.div(slot, together) * size + byte
        asked = (byte < size) & (moved > 0)
        old = plt.load(ids_ref.at[at], mask=asked, other=0).astype(jnp.int32)
        plt.store(ids_ref.at[at], (old | moved).astype(jnp.uint8), mask=asked)


def store_ids(key, active, cursor, centroids, ids, *, rows=None, interpret=False):
    """Store the codes of new tokens; ``interpret=True`` runs anywhere, slowly."""
    batch, heads = ids.shape[:2]
    flat = ids.reshape(batch, heads, -1)
    own_row = pl.BlockSpec((1,), lambda b, h: (b,))
    made = triton_call(
        functools.partial(_kernel, sinks=sinks_of(rows)),
        grid=(batch, heads),
        in_specs=[of_head(key), own_row, own_row, of_head(centroids), of_head(flat)],
        out_specs=of_head(flat),
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        input_output_aliases={4: 0},
        name="store_ids",
        num_warps=8,
        interpret=interpret,
    )(key, active[:, 0], cursor, centroids, flat)
    return made.reshape(ids.shape)


def check(key, active, cursor, centroids, ids, *, rows=None):
    """Raise ``NotImplementedError`` for sizes that the kernel does not take."""
    parts, count, width = centroids.shape[2:]
    if active.shape[1] != 1:
        raise NotImplementedError(f"got {active.shape[1]} tokens per row, expected one")
    if pl.next_power_of_2(count) * pl.next_power_of_2(width) > MOST_ELEMENTS:
        raise NotImplementedError(f"got {count} centroids of {width} channels, expected at most {MOST_ELEMENTS} elements")
    if bit_codes.together(parts * bit_codes.bits_of(count))[1] > 4:
        raise NotImplementedError(f"got {parts} parts of {count} centroids, expected groups of codes of up to 4 bytes")
    check_bytes(ids)
