"""Listed rows, gathered and rotated by one Pallas Triton kernel: a program per row of the batch and block of entries."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_head_dim
from pallas_kernels._triton.pallas import pl
from pallas_kernels._triton.quantised import check_codes
from pallas_kernels.formats.quantised import Quantised, vectors

BLOCK = 16  # entries per program, which does all heads


def _kernel(*refs, structure):
    # key, value [B, H, S, D], which may be codes with scales, in a tree of `structure`; token [B, E]; inv_freq [D/2]; out
    # [B, H, E, D].
    *refs, token_ref, inv_freq_ref, key_out, value_out = refs
    key_ref, value_ref = jax.tree.unflatten(structure, refs)
    row, (heads, width, dim) = pl.program_id(0), key_out.shape[1:]
    place = pl.program_id(1) * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    place = jnp.minimum(place, width - 1)  # the last entry is repeated, and written again with the same values
    # An index out of range would read out of bounds.
    token = jnp.clip(token_ref[row, place], 0, vectors(key_ref).shape[2] - 1)
    angle = place.astype(jnp.float32)[:, None] * inv_freq_ref[:][None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)  # the same for all heads
    low, high = pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)

    def read(ref, head, part):
        """Read channels ``part`` of the listed rows, dequantised."""
        if not isinstance(ref, Quantised):
            return ref[row, head, token, part]
        scale = ref.scale[row, head, token].astype(jnp.float32)
        return (ref.codes[row, head, token, part].astype(jnp.float32) * scale[:, None]).astype(key_out.dtype)

    for head in range(heads):
        first, second = (read(key_ref, head, half).astype(jnp.float32) for half in (low, high))
        values = read(value_ref, head, pl.ds(0, dim))
        key_out[row, head, place, low] = (first * cos - second * sin).astype(key_out.dtype)
        key_out[row, head, place, high] = (second * cos + first * sin).astype(key_out.dtype)
        value_out[row, head, place, :] = values


def rotated_rows(key, value, token, inv_freq, *, interpret=False):
    """Gather listed keys and values, and rotate the keys; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, _, dim = key.shape
    width = token.shape[1]
    rows = jax.ShapeDtypeStruct((batch, heads, width, dim), key.dtype)
    leaves, structure = jax.tree.flatten((key, value))
    return triton_call(
        functools.partial(_kernel, structure=structure),
        grid=(batch, pl.cdiv(width, BLOCK)),
        out_shape=(rows, rows),
        name="rotated_rows",
        interpret=interpret,
    )(*leaves, token, inv_freq)


def check(key, value, *_):
    """Raise ``NotImplementedError`` for head dims and codes that the kernel does not take."""
    dim = key.shape[-1]
    check_head_dim(dim)
    check_codes(key, value)
