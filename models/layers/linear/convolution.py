"""The causal convolution before the delta rule: each channel is a weighted sum of its newest tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def causal_convolution(x: jax.Array, taps: jax.Array, before: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute the convolution of tokens with the tokens before them, and apply SiLU.

    Args:
        x: [B, T, N, C]; padding may be anything.
        taps: [N, C, W], the weight of the token itself last.
        before: [B, N, W - 1, C], the tokens before the first one, zeros where there were none.
        real: bool [B, T], False on padding, which comes last in a row.

    Returns:
        [B, T, N, C] in the dtype of ``x``, meaningless on padding; and the newest W - 1 real tokens, [B, N, W - 1, C]. The
        sum is in float32.
    """
    length, width = x.shape[1], taps.shape[-1]
    x = jnp.where(real[:, :, None, None], x, 0)
    line = jnp.concatenate([before.astype(x.dtype), x.transpose(0, 2, 1, 3)], axis=2)  # [B, N, W - 1 + T, C]
    weight = taps.astype(jnp.float32)[None, :, None]
    wide = line.astype(jnp.float32)
    total = sum(wide[:, :, at : at + length] * weight[..., at] for at in range(width))
    count = jnp.sum(real, axis=1, dtype=jnp.int32)
    newest = (count[:, None] + jnp.arange(width - 1, dtype=jnp.int32)[None])[:, None, :, None]
    kept = jnp.take_along_axis(line, newest, axis=2)
    return jax.nn.silu(total).astype(x.dtype).transpose(0, 2, 1, 3), kept.astype(before.dtype)
