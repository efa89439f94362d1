"""The shape at which `rerank` is timed: ParisKV's second stage at 128K tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.choose.rerank import Regions
from pallas_kernels.formats.key_codes import rows
from pallas_kernels.formats.shapes import LongZone, few, lists, normal, positions, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(LongZone):
    """Candidates, a tenth of the keys of a long zone.

    Attributes:
        regions: sizes of the regions of the cache.
    """

    regions: Regions = Regions(sinks=64, best=100, tail=768, size=1999)
    float32: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"{self.regions.best} of {self.room} candidates of {self.slots} keys"

    @property
    def bytes_read(self) -> int:
        return self.heads * self.room * (self.dim + 4)

    @property
    def options(self) -> dict[str, Any]:
        return {"budget": self.regions.best, "enough": 1, "regions": self.regions, "scale": 1e-4}

    def draw(self, key: Array) -> dict[str, Any]:
        keys, shape = jax.random.split(key, 4), (*self.rows, self.slots)
        magnitudes = jax.random.randint(keys[0], (*shape, self.dim // 2), 0, 256, jnp.int32).astype(jnp.uint8)
        weight = jnp.abs(normal(keys[1], *shape, self.dim // 8))
        return {
            "query": normal(keys[2], *self.rows, self.dim, dtype=jnp.float32),
            "slots": self.first + lists(keys[3], self.rows, self.zone, self.room),
            "count": jnp.full(self.rows, self.room, jnp.int32),
            "rows": rows(magnitudes, weight),
            "position": positions(self.rows, self.slots),
            "cursor": jnp.full((1,), self.slots, jnp.int32),
            "stop": jnp.full((1,), self.slots - self.first, jnp.int32),
        }

    def tiny(self) -> Self:
        slots = few(self.slots)
        return small(self, slots=slots, regions=Regions(sinks=slots // 16, best=8, tail=8, size=slots // 16 + 16))

    def defined(self, result: Any) -> Any:
        return jnp.sort(jnp.where(result[1], result[0], -1), axis=-1)


SHAPES = (Sizes(),)
