"""Both stages of ParisKV's choice by their kernels for Triton, one after the other."""

import jax
import jax.numpy as jnp

from pallas_kernels.choose.pariskv.collision import pallas_triton as stage_one
from pallas_kernels.choose.pariskv.rerank import pallas_triton as stage_two


def choice(
    query, signs, counts, ids, rows, position, cursor, stop, shares, budget, enough, *, first, capacity, regions, scale,
    interpret=False,
):  # fmt: skip
    """Vote, estimate and list; ``interpret=True`` runs anywhere, slowly."""
    options, more = {"first": first, "capacity": capacity}, {"regions": regions, "scale": scale}
    found = stage_one.collision(query, signs, counts, ids, position, stop, shares, **options, interpret=interpret)
    return stage_two.rerank(*found, rows, position, cursor, stop, budget, enough, **more, interpret=interpret)


def check(
    query, signs, counts, ids, rows, position, cursor, stop, shares, budget, enough, *, first, capacity, regions, scale
):
    """Raise ``NotImplementedError`` for sizes that the kernels do not take."""
    stage_one.check(query, signs, counts, ids, position, stop, shares, first=first, capacity=capacity)
    found = (
        jax.ShapeDtypeStruct((*position.shape[:2], *size), dtype)
        for size, dtype in ((query.shape[3:], jnp.float32), ((capacity,), jnp.int32), ((), jnp.int32))
    )
    stage_two.check(*found, rows, position, cursor, stop, budget, enough, regions=regions, scale=scale)
