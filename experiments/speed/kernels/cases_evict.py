"""Cases of the operations that evicting methods run in every step. Eviction itself works in place and is not timed here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import Array

from experiments.speed.kernels.case import BYTES, GROUP, Case, Sizes, store
from pallas_kernels.score.column_mass import COLUMN_MASS, column_mass
from pallas_kernels.score.dissimilarity import DISSIMILARITY, dissimilarity


def evict_cases(sizes: Sizes) -> Iterator[Case]:
    """A row of a cache with 1,024 tokens and the newest token."""
    slots, scale = sizes.count(1024) + 1, 1 / math.sqrt(sizes.dim)
    read = sizes.heads * slots * (sizes.dim * BYTES + 4)
    position = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (1, sizes.heads, slots))

    def alike(key: Array, position: Array, **how: Any) -> Array:
        return dissimilarity(key, position, **how)

    yield Case(DISSIMILARITY, f"{slots} tokens, 1 row", lambda: (store(sizes, 1, slots)[1], position), alike, read)

    def mass(query: Array, key: Array, position: Array, lse: Array, **how: Any) -> Array:
        asked = jnp.full((1, 1), slots, jnp.int32)
        given = {"query_position": asked, "key_position": position, "scale": scale}
        return column_mass(query[..., None, :], key, lse, **given, **how)

    def make() -> tuple:
        query, key, _ = store(sizes, 1, slots)
        return query, key, position, jnp.full((1, sizes.heads, GROUP, 1), math.log(slots), jnp.float32)

    yield Case(COLUMN_MASS, f"one query, {slots} tokens, 1 row", make, mass, read)
