"""How kernels for TPUs that read an array [B, H, S, D] in blocks of all heads divide their work."""

import dataclasses

import jax

from pallas_kernels._mosaic.limits import LANES

_BLOCK_BYTES = 1 << 20  # of one array in a block; two arrays are read, and two blocks of each are in fast memory
_MOST = 2048  # slots of a block


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        block: slots or pages per step, a multiple of 128.
    """

    block: int = 512

    def __post_init__(self):
        if self.block < LANES or self.block % LANES:
            raise ValueError(f"Config: got block={self.block}, expected a multiple of {LANES}")


def default_config(x: jax.Array) -> Config:
    """Choose a config for keys or bounds [B, H, S, D]: blocks of a megabyte."""
    fits = _BLOCK_BYTES // (x.shape[1] * x.shape[3] * x.dtype.itemsize)
    return Config(block=min(max(fits // LANES, 1) * LANES, _MOST))
