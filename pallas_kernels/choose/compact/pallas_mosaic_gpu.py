"""True entries of mask rows as lists through Mosaic GPU: a row lies in the registers of one program, or of a cluster."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.pallas import plgpu
from pallas_kernels._mosaic_gpu.search import MOST

PARTS = (1, 2, 4, 8)  # programs of a cluster
UNIT = 2**11  # entries of which a thread loads 16 together
ALONE = 2**12  # entries of a row for which one program is enough
TAKES = f"{arrays.HOPPER}, rows and lists of up to {PARTS[-1] * MOST} entries"


def _body(mask_ref, list_ref, keep_ref, words, peers, *, capacity, size, parts):
    # mask [L, S]; list, keep [L, K].
    row, part = lax.axis_index("x"), lax.axis_index("part") if parts > 1 else jnp.int32(0)
    arrays.begin_parts(peers, parts)
    hit = arrays.load_run(mask_ref, row, part * size, size)
    found = [x for (x,) in arrays.of_parts([jnp.sum(hit)], peers, parts)]
    total = functools.reduce(jnp.add, found)
    earlier = sum((jnp.where(peer < part, x, 0) for peer, x in enumerate(found)), jnp.int32(0))
    place = earlier + arrays.before(hit, words)
    arrays.store(
        list_ref, jnp.where((hit > 0) & (place < capacity), row * capacity + place, -1), part * size + arrays.in_order(size)
    )
    # The programs of a row share out the entries behind the list, and the mask.
    share = arrays.size_of(-(-capacity // parts))
    at = part * share + arrays.counted(share)
    inside = at < capacity
    arrays.store(list_ref, jnp.where(inside & (at >= total), row * capacity + at, -1), arrays.spread(0, share))
    arrays.store(keep_ref, jnp.where(inside, row * capacity + at, -1), (at < total).astype(jnp.int32))


def compact(mask, capacity):
    """List the first true entries of each row of a mask."""
    slots, lists = mask.shape[-1], math.prod(mask.shape[:-1])
    parts = next((n for n in PARTS if slots <= n * ALONE), PARTS[-1])
    size = -(-slots // (parts * UNIT)) * UNIT
    listed, keep = arrays.program(
        functools.partial(_body, capacity=capacity, size=size, parts=parts),
        [jax.ShapeDtypeStruct((lists, capacity), dtype) for dtype in (jnp.int32, jnp.bool_)],
        grid=(lists,),
        parts=parts,
        scratch=[plgpu.SMEM((4,), jnp.int32), plgpu.SMEM((arrays.PEERS,), jnp.int32)],
    )(mask.reshape(lists, slots))
    return listed.reshape(*mask.shape[:-1], capacity), keep.reshape(*mask.shape[:-1], capacity)


def check(mask, capacity):
    """Raise ``NotImplementedError`` for other GPUs, empty masks, rows that no cluster holds, and sizes that need 64 bits."""
    arrays.check_hopper()
    slots, most = mask.shape[-1], PARTS[-1] * MOST
    if mask.size * capacity == 0 or slots > most or capacity > most or mask.size // slots * max(slots, capacity) >= 2**31:
        raise NotImplementedError(f"got mask {mask.shape}, {capacity=}, expected rows and lists of 1 to {most}")
