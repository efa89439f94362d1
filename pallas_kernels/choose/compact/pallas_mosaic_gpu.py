"""True entries of mask rows as lists through Mosaic GPU: a row lies in the registers of one program, or of a cluster."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.search import MOST, fill, listed, team_for

TAKES = f"{arrays.HOPPER}, rows and lists of up to {arrays.MOST_PARTS * MOST} entries"


def _body(mask_ref, list_ref, keep_ref, scratch, _, *, team):
    # mask [L, S]; list, keep [L, K].
    row, capacity = lax.axis_index("x"), list_ref.shape[1]
    hit, place, total = listed(team.load(mask_ref, row), jnp.int32(0), team, scratch)
    arrays.store(list_ref, jnp.where(hit & (place < capacity), row * capacity + place, -1), team.entries())
    fill(list_ref, keep_ref, row, total, team)
    team.end()


def compact(mask, capacity):
    """List the first true entries of each row of a mask."""
    slots, lists = mask.shape[-1], math.prod(mask.shape[:-1])
    team = team_for(slots)
    found, keep = arrays.program(
        functools.partial(_body, team=team),
        [jax.ShapeDtypeStruct((lists, capacity), dtype) for dtype in (jnp.int32, jnp.bool_)],
        grid=(lists,),
        parts=team.parts,
        groups=team.groups,
        scratch=team.scratch,
    )(mask.reshape(lists, slots))
    return found.reshape(*mask.shape[:-1], capacity), keep.reshape(*mask.shape[:-1], capacity)


def check(mask, capacity):
    """Raise ``NotImplementedError`` for other GPUs, empty masks, rows that no cluster holds, and sizes that need 64 bits."""
    arrays.check_hopper()
    slots, most = mask.shape[-1], arrays.MOST_PARTS * MOST
    if mask.size * capacity == 0 or slots > most or capacity > most or mask.size // slots * max(slots, capacity) >= 2**31:
        raise NotImplementedError(f"got mask {mask.shape}, {capacity=}, expected rows and lists of 1 to {most}")
