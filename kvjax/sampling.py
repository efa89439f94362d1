"""How the next token is chosen: greedily, or by temperature, top-k and top-p, which are traced numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.typing import is_concrete, not_none, pytree


@pytree
class Sampler:
    """How to draw a token. A number is traced; a field that is None is not part of the compiled program.

    The order is the usual one: temperature, then top-k, then top-p.
    """

    temperature: float | Array | None = None  # None = greedy; 0 is greedy too, but decided at run time
    top_k: int | Array | None = None  # keep the k most probable tokens
    top_p: float | Array | None = None  # keep the smallest set of tokens whose probability reaches p

    def __post_init__(self) -> None:
        for name, value, fine, needs in (
            ("temperature", self.temperature, lambda x: x >= 0, "at least 0"),
            ("top_k", self.top_k, lambda x: x >= 1, "at least 1"),
            ("top_p", self.top_p, lambda x: 0 < x <= 1, "in (0, 1]"),
        ):
            if is_concrete(value) and not fine(value):
                raise ValueError(f"{name} must be {needs}, got {value}")
        if self.temperature is None and (is_concrete(self.top_k) or is_concrete(self.top_p)):
            raise ValueError(
                f"top_k={self.top_k} and top_p={self.top_p} need a temperature; without one decoding is greedy"
            )

    def draw(self, logits: Array, key: Array | None) -> Array:
        """Next tokens int32 [B] from logits float32 [B, V]. Greedy drawing does not use ``key``."""
        greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if self.temperature is None:
            return greedy
        scaled = logits / jnp.maximum(jnp.asarray(self.temperature, jnp.float32), 1e-6)
        if self.top_k is not None or self.top_p is not None:
            ordered = jnp.sort(scaled, axis=-1, descending=True)
            rank = jnp.arange(logits.shape[-1])[None]
            keep = jnp.ones(ordered.shape, bool)
            if self.top_k is not None:
                keep = keep & (rank < self.top_k)
            if self.top_p is not None:
                weight = jax.nn.softmax(jnp.where(keep, ordered, -jnp.inf), axis=-1)
                keep = keep & (jnp.cumsum(weight, axis=-1) - weight < self.top_p)  # mass before the token is below p
            floor = jnp.min(jnp.where(keep, ordered, jnp.inf), axis=-1, keepdims=True)
            scaled = jnp.where(scaled >= floor, scaled, -jnp.inf)
        drawn = jax.random.categorical(not_none("key", key), scaled, axis=-1).astype(jnp.int32)
        return jnp.where(jnp.asarray(self.temperature) > 0, drawn, greedy)
