"""The newest slot with a near key as one Pallas Triton kernel that writes no products.

Grid (blocks, B*H): a program has one block of slots and compares it with strips of slots, from the newest strip back, until
each slot of the block has found a near key. A strip is a loop with a known number of steps, inside a loop that may end early:
Triton loads ahead only in the inner loop. Keys go to the products unmasked, because a mask would keep the tensor cores
waiting. The key of an empty slot, which may be NaN, spoils only its own row and column, and neither counts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_dtypes, check_head_dim
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.shared_memory import fitting_block
from pallas_kernels.numerics import product_precision


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        block: slots per program, a power of two of at least 16.
        tile: slots that a block is compared with per step, a power of two of at least 16.
        strip: slots after which a program checks whether it is done, a multiple of ``tile``.
        num_warps: warps per program.
        num_stages: depth of Triton's software pipeline.
    """

    block: int = 128
    tile: int = 128
    strip: int = 1024
    num_warps: int = 8
    num_stages: int = 2


def default_config(key: jax.Array) -> Config:
    """Choose a config for key [B, H, S, D]: smaller tiles for float32, which needs more registers, and for short caches."""
    if key.dtype == jnp.float32:
        return Config(block=64 if key.shape[3] <= 128 else 32, tile=32)
    return Config() if key.shape[2] > 4096 else Config(block=64, num_warps=4)


def fitted(config: Config, key: jax.Array) -> Config:
    """Shrink the config's tiles to fit the GPU's shared memory; raise ``NotImplementedError`` if none fits."""
    row = key.dtype.itemsize * key.shape[3]

    def needed(tile):
        return row * (config.block + config.num_stages * tile)

    return dataclasses.replace(config, tile=fitting_block(config.tile, needed))


def _kernel(key_ref, valid_ref, threshold_ref, out_ref, *, block, tile, strip):
    # Of one list: key [S, D]; valid [S]; out [S]. threshold [1].
    slots = key_ref.shape[0]
    at = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
    there = jnp.minimum(at, slots - 1)
    own, counts, threshold = key_ref[there, :], (at < slots) & valid_ref[there], threshold_ref[0]

    def compare(first, found):
        slot = first + jnp.arange(tile, dtype=jnp.int32)
        place = jnp.minimum(slot, slots - 1)
        name = jnp.where((slot < slots) & valid_ref[place], slot, -1)
        products = plt.dot(own, key_ref[place, :], trans_b=True, precision=product_precision(own.dtype))
        near = (products > threshold) & (at[:, None] != slot[None])
        return jnp.maximum(found, jnp.max(jnp.where(near, name[None], -1), axis=1))

    def look(state):
        number, found, _ = state
        first = number * strip
        steps = jnp.minimum(strip // tile, pl.cdiv(slots - first, tile))
        found = lax.fori_loop(0, steps, lambda step, x: compare(first + step * tile, x), found)
        return number - 1, found, jnp.max(jnp.where(counts & (found < 0), 1, 0))

    start = jnp.int32((slots - 1) // strip), jnp.full((block,), -1, jnp.int32), jnp.max(jnp.where(counts, 1, 0))
    _, found, _ = lax.while_loop(lambda x: (x[0] >= 0) & (x[2] > 0), look, start)
    plt.store(out_ref.at[at], jnp.where(counts, jnp.maximum(found, 0), 0), mask=at < slots)


def newest_repeat(key, valid, *, threshold, config: Config | None = None, interpret: bool = False):
    """Find the newest other slot whose key is near each slot's key; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, slots, dim = key.shape
    config = fitted(default_config(key), key) if config is None else config
    lists = batch * heads
    of_list = pl.BlockSpec((None, slots), lambda i, j: (j, 0))
    found = triton_call(
        functools.partial(_kernel, block=config.block, tile=config.tile, strip=config.strip),
        grid=(pl.cdiv(slots, config.block), lists),
        in_specs=[pl.BlockSpec((None, slots, dim), lambda i, j: (j, 0, 0)), of_list, pl.BlockSpec((1,), lambda i, j: (0,))],
        out_specs=of_list,
        out_shape=jax.ShapeDtypeStruct((lists, slots), jnp.int32),
        name="newest_repeat",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(key.reshape(lists, slots, dim), valid.reshape(lists, slots), jnp.asarray(threshold, jnp.float32).reshape(1))
    return found.reshape(valid.shape)


def check(key, valid, *, threshold):
    """Raise ``NotImplementedError`` for dtypes and sizes that the kernel does not take."""
    check_dtypes(key)
    dim = key.shape[3]
    check_head_dim(dim)
    fitted(default_config(key), key)
