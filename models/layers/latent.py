"""Latent attention (MLA): keys and values of all heads come from one latent vector of each token, and the cache holds that.

A token's latent c has R numbers. Head h has the key ``[K_h c, p]`` and the value ``V_h c``, with matrices K_h and V_h, and a
part p that rotates and that all heads share. A product of a query ``[n, r]`` with such a key is ``(K_h^T n) . c + r . p``. So
each head's query is multiplied by K_h^T once (it is *absorbed*), and attention has one KV head with the keys ``[c, p]``. A
sum of values is ``V_h`` times the same sum of latents. So the value of a token is its key, and V_h multiplies what attention
returns; the channels of p are left out there. No head's keys or values are made.

A key has its channels in the order of `models.files.tables.families.channel_order`: pair i is i and i + D/2, and the first
pairs rotate.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1 and appendix C; the order of operations as in transformers 5.24, which
makes the keys and values of all heads.

Parameter tree (axes: d hidden, N query heads, R latent; the other sizes are in `Latent`)::

    attention/latents/kernel [d, query_rank + R + rotated]  attention/latent_norm/scale [R]
    attention/query_norm/scale [query_rank]                 attention/query/kernel [query_rank, N*query_dim]
    attention/up/kernel [R, N*(key_dim + value_dim)]        attention/out/kernel [N*value_dim, d]

All that reads the hidden state is one product, as ``qkv`` is elsewhere. Without latents of queries ``latents`` makes the
queries of all heads in their place: its columns are N*query_dim + R + rotated.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels import axes
from pallas_kernels.layer.add_norm import rms_norm

from ..sizes.architecture import Architecture
from ..sizes.latent import Latent
from .modules import Dense, Kernel, Scale

_EPS = 1e-6  # of the norms of latents, whatever the model's own


def halves(x: jax.Array, latent: Latent) -> tuple[jax.Array, jax.Array]:
    """Split channels [..., rotated] of the file into the first and the second of each pair: [..., rotated / 2] twice."""
    if latent.interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = jnp.split(x, 2, axis=-1)
    return first, second


def whole_key(latents: jax.Array, turning: jax.Array, latent: Latent) -> jax.Array:
    """Join latents [..., R] and the channels that rotate [..., rotated], as the file has them: [..., D]."""
    left, right = jnp.split(latents, 2, axis=-1)
    first, second = halves(turning, latent)
    return jnp.concatenate([first, left, second, right], axis=-1)


def latents_of(keys: jax.Array, latent: Latent) -> jax.Array:
    """Take the latents [..., R] out of keys or sums of keys [..., D]."""
    half = latent.rotated // 2
    return jnp.concatenate([part[..., half:] for part in jnp.split(keys, 2, axis=-1)], axis=-1)


class LatentAttention(nn.Module):
    """The projections of one layer's latent attention. The caller computes the attention itself."""

    config: Architecture
    layer: int

    @nn.compact
    def __call__(
        self, x: jax.Array, attend: Callable[..., tuple[Any, Any]], state: Any, before: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Compute the update of the residual stream [B, T, d] and the layer's new state, from ``x`` [B, T, d].

        ``attend`` gets the absorbed queries [B, 1, N, T, D], and keys [B, 1, T, D] that are the values too; of what it
        returns, [B, 1, N, T, D], only the channels of latents are read. ``before`` is as in `Attention` of the transformer.
        """
        config, latent = self.config, cast("Latent", self.config.latent)
        heads, (batch, length, _) = config.num_q_heads, x.shape
        rows = x if before is None else jnp.concatenate([x, before], axis=1)
        width = latent.query_rank or heads * latent.query_dim
        projected = Dense(config, width + latent.width, name="latents")(rows.astype(config.dtype))
        query, key = projected[..., :width], projected[:, :length, width:]
        if latent.query_rank is not None:
            query = rms_norm(query, Scale(config, width, name="query_norm")(), _EPS)
            query = Dense(config, heads * latent.query_dim, name="query")(query)
        query = query.reshape(batch, rows.shape[1], heads, latent.query_dim)
        each = latent.key_dim + latent.value_dim
        up = Kernel(config, (latent.rank, heads * each), name="up")().astype(config.dtype)
        up = up.reshape(latent.rank, heads, each)
        absorbed = jnp.einsum("btnk,rnk->btnr", query[..., : latent.key_dim], up[..., : latent.key_dim])
        query = whole_key(absorbed, query[..., latent.key_dim :], latent)
        # Attention divides by sqrt(D), under every method.
        query = query * jnp.asarray(cast("float", config.query_scale) * math.sqrt(latent.width), query.dtype)
        query = query.transpose(0, 2, 1, 3)[:, None]
        latents = rms_norm(key[..., : latent.rank], Scale(config, latent.rank, name="latent_norm")(), _EPS)
        key = whole_key(latents, key[..., latent.rank :], latent)[:, None]
        query, *guess = (query,) if before is None else jnp.split(query, 2, axis=3)
        with jax.named_scope("attend"):
            out, state = attend(self.layer, state, query, key, key, *guess)
        if out.shape != query.shape:
            raise ValueError(f"attend returned shape {out.shape} at layer {self.layer}, expected {query.shape}")
        sums = latents_of(out[:, 0].astype(config.dtype), latent)  # [B, N, T, R]
        values = jnp.einsum("bntr,rnv->btnv", sums, up[..., latent.key_dim :])
        values = values.reshape(batch, length, heads * latent.value_dim)
        return axes.total(Dense(config, config.hidden_size, name="out")(values)), state
