"""4-bit codes of keys as one Pallas Triton kernel: a program per list and block of keys."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_head_dim
from pallas_kernels._triton.key_codes import codes, rotated
from pallas_kernels._triton.pallas import pl
from pallas_kernels.formats.key_codes import SLICE


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        part: vectors per program, a power of two.
        num_warps: warps per program.
    """

    part: int = 8
    num_warps: int = 4

    def __post_init__(self):
        if self.part < 1 or self.part & (self.part - 1):
            raise ValueError(f"encode: got part={self.part}, expected a power of two")


def _kernel(key_ref, valid_ref, *refs, part, scale):
    # Of one list: key [T, D], valid [T]; signs [D] if rotated. Results: ids [T, N], rows [T, D].
    *signs_ref, ids_ref, rows_ref = refs
    row = pl.program_id(2) * part + jnp.arange(part, dtype=jnp.int32)
    row = jnp.minimum(row, key_ref.shape[0] - 1)  # the last key is repeated, and written again with the same codes
    valid = valid_ref[row][:, None]
    x = jnp.where(valid, key_ref[row, :].astype(jnp.float32), 0.0)
    made = codes(rotated(x, signs_ref[0][...]) if signs_ref else x, scale)
    for ref, new in zip((ids_ref, rows_ref), made, strict=True):
        ref[row, :] = jnp.where(valid, new, jnp.zeros_like(new))


def encode(key, valid, signs, *, scale, config: Config | None = None, interpret=False):
    """Encode vectors in 4 bits per channel; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, tokens, dim = key.shape
    config = Config() if config is None else config
    shared = valid.shape[1] == 1
    operands = [key, valid, *(() if signs is None else (signs,))]
    in_specs = [
        pl.BlockSpec((None, None, tokens, dim), lambda b, h, i: (b, h, 0, 0)),
        pl.BlockSpec((None, None, tokens), lambda b, h, i: (b, 0 if shared else h, 0)),
        *(() if signs is None else (pl.BlockSpec((dim,), lambda b, h, i: (0,)),)),
    ]
    outs = (dim // SLICE, dim)
    return tuple(
        triton_call(
            functools.partial(_kernel, part=config.part, scale=scale),
            grid=(batch, heads, pl.cdiv(tokens, config.part)),
            in_specs=in_specs,
            out_specs=[pl.BlockSpec((None, None, tokens, size), lambda b, h, i: (b, h, 0, 0)) for size in outs],
            out_shape=[jax.ShapeDtypeStruct((batch, heads, tokens, size), jnp.uint8) for size in outs],
            name="encode",
            num_warps=config.num_warps,
            interpret=interpret,
        )(*operands)
    )


def check(key, valid, signs, *, scale):
    """Raise ``NotImplementedError`` for head dims and sizes that the kernel does not take."""
    dim = key.shape[3]
    check_head_dim(dim)
    if not key.size or 1 << 31 <= key.size <= 1 << 32:
        raise NotImplementedError(f"got key {key.shape}, expected rows below 2 GiB or above 4 GiB")
