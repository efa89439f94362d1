"""How the next token is chosen: greedily, or by temperature, top-k and top-p, which are traced values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.protocol.fields import check_fields, shown
from kvjax.protocol.typing import not_none, pytree, traced
from pallas_kernels import axes


@pytree
class Sampler:
    """How to draw a token. A value is traced; a field that is None is not part of the compiled program.

    The order is the usual one: temperature, then top-k, then top-p, then min-p.
    """

    temperature: float | Array | None = traced("None = greedy; 0 is greedy too, at run time", default=None, least=0)
    top_k: int | Array | None = traced("keep the k most probable tokens", default=None, least=1)
    top_p: float | Array | None = traced("keep the likeliest tokens that reach p together", default=None, above=0, most=1)
    min_p: float | Array | None = traced(
        "keep tokens with this share of the largest probability", default=None, least=0, most=1
    )

    def __post_init__(self) -> None:
        check_fields(self, prefix="")
        filters = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        if self.temperature is None and (given := {name: value for name, value in filters.items() if value is not None}):
            names = " and ".join(f"{name}={shown(value)}" for name, value in given.items())
            raise ValueError(f"{names} need a temperature; without one decoding is greedy")

    def draw(self, logits: Array, key: Array | None) -> tuple[Array, Array]:
        """Draw next tokens int32 [B] from logits float32 [B, V]; also return the `filtered` logits that they are drawn from.

        Greedy drawing does not use ``key``. A row draws with a key made of its index in the batch, so it draws the same token
        on whatever device it is.
        """
        if self.temperature is None:
            return self.draw_each(logits, None)
        return self.draw_each(logits, jax.vmap(jax.random.fold_in, (None, 0))(not_none("key", key), rows_of(len(logits))))

    def draw_each(self, logits: Array, keys: Array | None) -> tuple[Array, Array]:
        """Run `draw` for logits float32 [N, V], with a key for each of them: tokens int32 [N], and filtered logits."""
        greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        filtered = self.filtered(logits)
        if self.temperature is None:
            return greedy, filtered
        drawn = jax.vmap(jax.random.categorical)(not_none("keys", keys), filtered).astype(jnp.int32)
        return jnp.where(jnp.asarray(self.temperature) > 0, drawn, greedy), filtered

    def filtered(self, logits: Array) -> Array:
        """Return the logits float32 [N, V] of the distribution that tokens are drawn from; greedily they are ``logits``."""
        if self.temperature is None:
            return logits
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
        if self.min_p is not None:
            floor = jnp.max(scaled, axis=-1, keepdims=True) + jnp.log(jnp.asarray(self.min_p, jnp.float32))
            scaled = jnp.where(scaled >= floor, scaled, -jnp.inf)
        return scaled


def rows_of(count: int) -> Array:
    """Return the indices in the batch of the ``count`` rows of this device: int32 [B]."""
    return axes.index(axes.DATA) * count + jnp.arange(count, dtype=jnp.int32)
