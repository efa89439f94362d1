"""Latent attention (MLA): keys and values of all heads come from one latent vector of each token, and the cache holds that.

A token's latent c has R numbers. Head h has the key ``[K_h c, p]`` and the value ``V_h c``, with matrices K_h and V_h, and a
part p that rotates and that all heads share. A product of a query ``[n, r]`` with such a key is ``(K_h^T n) . c + r . p``. So
each head's query is multiplied by K_h^T once (it is *absorbed*), and attention has one KV head with the keys ``[c, p]``. A
sum of values is ``V_h`` times the same sum of latents. So the value of a token is its key, and V_h multiplies what attention
returns; the channels of p are left out there. No head's keys or values are made.

A key has its channels in the order of `models.files.tables.families.channel_order`: pair i is i and i + D/2, and the first pairs rotate.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1 and appendix C; the order of operations as in transformers 5.24, which
makes the keys and values of all heads.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from ..sizes.rope_scaling import YarnScaling

_SIZES = ("rank", "rotated", "key_dim", "value_dim")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """The sizes of latent attention.

    Raises:
        ValueError: a size is not positive, or ``rank`` or ``rotated`` is odd.
    """

    rank: int  # R, numbers of a latent
    rotated: int  # channels of a key that rotate, one vector for all heads
    key_dim: int  # channels of a head's key that come from the latent
    value_dim: int  # channels of a head's value
    query_rank: int | None = None  # numbers of a query's own latent; None: queries come from the hidden state
    interleaved: bool = True  # whether neighbouring channels of the file are a pair that rotates

    def __post_init__(self):
        for name in (*_SIZES, *(("query_rank",) if self.query_rank is not None else ())):
            value = vars(self)[name]
            if type(value) is not int or not 0 < value < 2**31:
                raise ValueError(f"Latent: {name} must be a positive integer below 2**31, got {value!r}")
        for name in ("rank", "rotated"):
            if vars(self)[name] % 2:
                raise ValueError(f"Latent: {name} must be even (RoPE rotates pairs), got {vars(self)[name]}")
        if type(self.interleaved) is not bool:
            raise ValueError(f"Latent: interleaved must be True or False, got {self.interleaved!r}")

    @property
    def width(self) -> int:
        """D, the channels of a stored key."""
        return self.rank + self.rotated

    @property
    def query_dim(self) -> int:
        """Channels of a head's query before it is absorbed."""
        return self.key_dim + self.rotated


def check_latent(config: Any) -> None:
    """Refuse a `ModelConfig` whose other fields do not fit its latent.

    Raises:
        ValueError: the message names the field, what it holds, and what was expected.
    """
    latent = config.latent
    if latent is None:
        return
    if not isinstance(latent, Latent):
        raise ValueError(f"ModelConfig: latent must be a Latent or None, got {latent!r}")
    if config.query_scale is None:
        raise ValueError(f"ModelConfig: query_scale must be a positive number with {latent}, got None")
    for name, expected in (("num_kv_heads", 1), ("head_dim", latent.width)):
        if vars(config)[name] != expected:
            raise ValueError(f"ModelConfig: {name} must be {expected} with {latent}, got {vars(config)[name]}")
    others = ("qkv_bias", "qk_norm", "wide_qk_norm", "output_gate", "out_bias", "attention_sinks")
    own = [name for name in others if vars(config)[name]]
    if own:
        raise ValueError(f"ModelConfig: {own[0]} must be False with a latent, got True")
    turned = {rope.rotated for rope in config.ropes}
    if turned != {latent.rotated} or any(config.windows):
        raise ValueError(
            f"ModelConfig: every layer must rotate {latent.rotated} channels and have no window with {latent}, got ropes of "
            f"{sorted(turned, key=str)} channels and windows={config.windows!r:.60}"
        )


def query_scale(latent: Latent, scaling: Any) -> float:
    """Compute the factor on the product of query and key, with YaRN's factor on all channels.

    Args:
        latent: the sizes.
        scaling: the rule that stretches RoPE, or None.
    """
    share = scaling.mscale_all_dim if isinstance(scaling, YarnScaling) else None
    stretch = 0.1 * share * math.log(max(scaling.factor, 1.0)) + 1 if share else 1.0
    return latent.query_dim**-0.5 * stretch**2


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
