"""The shape at which `collision` is timed: ParisKV's first stage at 128K tokens."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import GROUP, LongZone, few, normal, positions, small

_SHARES = (2**31 - 1, 100_000, 10_000, 30_000, 60_000, 100_000, 150_000, 200_000)  # ParisKV's shares for a long zone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(LongZone):
    """Codes of a long zone, of which a tenth become candidates."""

    tolerance: ClassVar[float] = 1e-5

    @property
    def name(self) -> str:
        return f"{self.room} of {self.slots} keys"

    @property
    def bytes_read(self) -> int:
        return self.heads * self.zone * (self.dim // 8)

    @property
    def options(self) -> dict[str, Any]:
        return {"first": self.first, "capacity": self.room}

    def draw(self, key: Array) -> dict[str, Any]:
        (first, second), stop, slices = jax.random.split(key), self.slots - self.first, self.dim // 8
        ids = jax.random.randint(first, (*self.rows, self.slots, slices), 0, 256, jnp.int32)
        zone = ids[:, :, self.first : stop].swapaxes(2, 3).reshape(-1, self.zone)
        counts = jax.vmap(functools.partial(jnp.bincount, length=256))(zone)
        return {
            "query": normal(second, *self.rows, GROUP, self.dim),
            "signs": jnp.ones((self.dim,), jnp.float32),
            "counts": counts.reshape(*self.rows, slices, 256).astype(jnp.int32),
            "ids": ids.astype(jnp.uint8),
            "position": positions(self.rows, self.slots),
            "stop": jnp.full((1,), stop, jnp.int32),
            "shares": jnp.asarray([_SHARES], jnp.int32),
        }

    def tiny(self) -> Self:
        return small(self, slots=few(self.slots))

    def defined(self, result: Any) -> Any:
        query, slots, count = result
        return query, jnp.where(jnp.arange(self.room)[None, None] < count[..., None], slots, 0), count


SHAPES = (Sizes(),)
