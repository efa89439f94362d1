"""A sampler whose rows have temperatures of their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.decoding.sampling import Sampler, rows_of
from kvjax.protocol.typing import pytree


@pytree
class ByRow:
    """Draw as `kvjax.decoding.sampling.Sampler` does, with a temperature for each row."""

    temperature: Array  # float32 [B]; 0 is greedy

    def draw(self, logits: Array, key: Array) -> Array:
        """Draw next tokens int32 [B] from logits float32 [B, V]."""
        return self.draw_each(logits, jax.vmap(jax.random.fold_in, (None, 0))(key, rows_of(len(logits))))

    def draw_each(self, logits: Array, keys: Array) -> Array:
        """Draw a token int32 [N] from each of the logits float32 [N, V], of which every row has N / B."""
        temperature = jnp.repeat(self.temperature, len(logits) // len(self.temperature))
        drawn = Sampler(temperature=1.0).draw_each(logits / jnp.maximum(temperature, 1e-6)[:, None], keys)
        return jnp.where(temperature > 0, drawn, Sampler().draw_each(logits, None))
