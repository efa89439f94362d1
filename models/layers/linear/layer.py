"""A layer of linear attention, the gated delta rule, as a Flax Linen module without state.

Parameters (axes: d hidden, N key heads, R value heads per key head, K and M dimensions of keys and values, W tokens of the
convolution)::

    qkvz/kernel [d, N*(2*K + 2*R*M)]    columns of each key head: query, key, R values, R output gates
    ba/kernel [d, N*2*R]                of each key head: R rates, R decays
    conv/taps [N*(2*K + R*M), W]        channels of each key head: query, key, R values
    decay/log_rate, decay/bias [N*R]    the decay of a token is exp(-exp(log_rate) * softplus(a + bias))
    norm/scale [M]                      of an RMSNorm of each value head, before its output gate
    out/kernel [N*R*M, d]

All columns are in the order of key heads, so a split over devices is a split of key heads with their value heads.
"""

from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels import axes
from pallas_kernels.dispatch import run_shared
from pallas_kernels.layer.add_norm import rms_norm

from ...sizes.architecture import Architecture
from ...sizes.linear import LinearLayers
from ..modules import Dense, Scale, stored
from .delta import gated_delta


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


class GatedDelta(nn.Module):
    """The projections of one layer of linear attention. The caller keeps the state."""

    config: Architecture
    layer: int

    @nn.compact
    def __call__(self, x: jax.Array, attend: Callable[..., tuple[Any, Any]], state: Any) -> tuple[jax.Array, Any]:
        """Compute the update of the residual stream [B, T, d] and the layer's new state, from ``x`` [B, T, d].

        ``attend`` gets the layer's number, the state and a function ``advance(arrays, real) -> (out, arrays)``, and returns
        ``out`` and the layer's new state. `models.sizes.linear.LinearLayers.memory` describes the arrays, which have axis B
        first; ``real`` is bool [B, T].
        """
        config, sizes = self.config, cast("LinearLayers", self.config.linear)
        heads, group, dim = sizes.num_key_heads, sizes.group, sizes.value_dim
        batch, length, _ = x.shape
        x = x.astype(config.dtype)
        mixed = Dense(config, heads * (sizes.channels + group * dim), name="qkvz")(x)
        mixed, gate = jnp.split(mixed.reshape(batch, length, heads, -1), [sizes.channels], axis=-1)
        rates = Dense(config, heads * 2 * group, name="ba")(x).reshape(batch, length, heads, 2, group)
        taps = Taps(config, (heads * sizes.channels, sizes.conv_width), name="conv")()
        log_rate, bias = Decay(config, heads * group, name="decay")()
        rates = rates.astype(jnp.float32)
        rate = jax.nn.sigmoid(rates[:, :, :, 0])
        log_rate, bias = (v.astype(jnp.float32).reshape(1, 1, heads, group) for v in (log_rate, bias))
        decay = -jnp.exp(log_rate) * jax.nn.softplus(rates[:, :, :, 1] + bias)
        taps = taps.reshape(heads, sizes.channels, sizes.conv_width)

        def advance(arrays: tuple[jax.Array, ...], real: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            return run_shared(_advance, mixed, taps, decay, rate, arrays, real, sizes.key_dim, dim)

        with jax.named_scope("recur"):
            out, state = attend(self.layer, state, advance)
        expected = (batch, length, heads, group, dim)
        if out.shape != expected:
            raise ValueError(f"attend returned shape {out.shape} at layer {self.layer}, expected {expected}")
        out = rms_norm(out.astype(config.dtype), Scale(config, dim, name="norm")(), config.rms_norm_eps)
        gate = gate.reshape(expected).astype(jnp.float32)
        out = (out.astype(jnp.float32) * jax.nn.silu(gate)).astype(config.dtype)
        return axes.total(Dense(config, config.hidden_size, name="out")(out.reshape(batch, length, -1))), state


def _advance(
    mixed: jax.Array,
    taps: jax.Array,
    decay: jax.Array,
    rate: jax.Array,
    arrays: tuple[jax.Array, ...],
    real: jax.Array,
    key_dim: int,
    value_dim: int,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Run the convolution of queries, keys and values, and the delta rule over them."""
    before, state = arrays
    mixed, before = causal_convolution(mixed, taps, before, real)
    query, key, value = jnp.split(mixed, [key_dim, 2 * key_dim], axis=-1)
    value = value.reshape(*value.shape[:-1], -1, value_dim)
    out, state = gated_delta(query, key, value, decay, rate, state, real)
    return out, (before, state)


class Taps(nn.Module):
    """The weights [C, W] of a convolution."""

    config: Architecture
    shape: tuple[int, int]

    @nn.compact
    def __call__(self) -> jax.Array:
        return stored(self, "conv/taps", self.config, self.shape)


class Decay(nn.Module):
    """The logarithm of the rate, and the bias, of the decay of each value head: [N*R] each."""

    config: Architecture
    width: int

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array]:
        log_rate, bias = (stored(self, f"decay/{name}", self.config, (self.width,)) for name in ("log_rate", "bias"))
        return log_rate, bias
