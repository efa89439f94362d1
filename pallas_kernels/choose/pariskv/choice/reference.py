"""Both stages of ParisKV's choice, one after the other, each by the first of its implementations that can, if not named."""

from pallas_kernels.choose.pariskv.collision import collision
from pallas_kernels.choose.pariskv.rerank import rerank


def choice(
    query, signs, counts, ids, rows, position, cursor, stop, shares, budget, enough, *, first, capacity, regions, scale
):
    """Vote, estimate and list."""
    query, slots, count = collision(query, signs, counts, ids, position, stop, shares, first=first, capacity=capacity)
    return rerank(query, slots, count, rows, position, cursor, stop, budget, enough, regions=regions, scale=scale)
