"""Attention used outside the kernels package's selection paths."""

from __future__ import annotations

import jax

from pallas_kernels.dense_attention import causal_attention


def causal(query: jax.Array, key: jax.Array, value: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Causal self-attention of whole sequences: query [B, H, G, T, D], key and value [B, H, T, D], already rotated."""
    return causal_attention(query, key, value, implementation=implementation)
