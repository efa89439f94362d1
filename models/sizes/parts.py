"""The parts in which the layers of decoders differ, beside sizes: `models.sizes.config.ModelConfig` declares them.

`models.layers.transformer` reads each part in one place. A part at its default adds nothing to the program.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import axes

from ..files.tables.families import FAMILIES
from .rope_scaling import LongRopeScaling, RopeRule

_FLOAT32 = float(np.finfo(np.float32).max)
# The function on the gate of a gated MLP, by its name in config.json.
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
NORMS = ("rms", "layer")
# Where a layer normalises: what attention and MLP read, what they return, or both. "parallel": attention and MLP read one
# norm of the stream, and the layer adds both.
NORM_PLACES = ("before", "after", "both", "parallel")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRope:
    """How one layer rotates queries and keys; `kvjax.protocol.typing.Rope` has the same attributes.

    Raises:
        ValueError: the base is not positive, the number of channels is odd or negative, or the rule is none.
    """

    theta: float  # base of the frequencies
    scaling: RopeRule | None = None  # how the frequencies are stretched
    rotated: int | None = None  # channels of a head that rotate; None: all; 0: none, a layer without positions

    def __post_init__(self):
        if type(self.theta) not in (int, float) or not 0 < self.theta <= _FLOAT32:
            raise ValueError(f"LayerRope: theta must be a positive number, got {self.theta!r}")
        if self.rotated is not None and (type(self.rotated) is not int or self.rotated < 0 or self.rotated % 2):
            raise ValueError(f"LayerRope: rotated must be an even number of channels or None, got {self.rotated!r}")
        if self.scaling is not None and not isinstance(self.scaling, RopeRule):
            raise ValueError(f"LayerRope: scaling must be a RopeScaling or None, got {self.scaling!r}")
        if self.rotated == 0 and self.scaling is not None:
            raise ValueError(f"LayerRope: a layer that rotates nothing must have scaling=None, got {self.scaling!r}")


def check_rope(owner: str, scaling: RopeRule | None, rotated: int) -> None:
    """Refuse a longrope rule without a factor for each of the rotated pairs.

    Raises:
        ValueError: the message names both numbers.
    """
    if isinstance(scaling, LongRopeScaling) and len(scaling.long_factor) != rotated // 2:
        half = "head_dim / 2" if owner == "ModelConfig" else "rotated / 2"
        raise ValueError(
            f"{owner}: short_factor and long_factor must have {half} = {rotated // 2} numbers, got {len(scaling.long_factor)}"
        )


def plain_layer(config: Any) -> bool:
    """Tell whether a layer is norm, attention, norm and MLP, gated by silu, with nothing between products and the stream."""
    norms = config.norm == "rms" and config.norm_place == "before" and config.residual_multiplier == 1
    others = config.experts, config.latent, config.linear
    return norms and config.mlp_gate and config.activation == "silu" and not config.out_bias and others == (None,) * 3


def check_parts(config: Any) -> None:
    """Refuse parts of a `ModelConfig` that no layer can have.

    Raises:
        ValueError: the message names the field, what it holds, and what was expected.
    """
    for name, known in (("activation", tuple(ACTIVATIONS)), ("norm", NORMS), ("norm_place", NORM_PLACES)):
        value = vars(config)[name]
        if value not in known:
            raise ValueError(f"ModelConfig: {name} must be one of {', '.join(known)}, got {value!r}")
    if config.family not in ("", *FAMILIES):
        raise ValueError(f"ModelConfig: family must be '' or one of {', '.join(FAMILIES)}, got {config.family!r}")
    optional = ("query_scale", "logit_softcap", "attention_softcap")
    for name in (*optional, "embedding_multiplier", "residual_multiplier", "logits_multiplier"):
        value = vars(config)[name]
        if value is None and name in optional:
            continue
        if not (isinstance(value, (int, float)) and type(value) is not bool and 0 < value <= _FLOAT32):
            raise ValueError(f"ModelConfig: {name} must be a positive number, got {value!r}")
    if config.qk_norm and config.wide_qk_norm:
        raise ValueError("ModelConfig: expected one of qk_norm and wide_qk_norm, got both True")
    if config.experts is not None and config.activation != "silu":
        raise ValueError(f"ModelConfig: experts are computed with activation='silu', got {config.activation!r}")
    ropes = config.ropes
    if type(ropes) is not tuple or len(ropes) not in (0, config.num_layers):
        raise ValueError(
            f"ModelConfig: ropes must be () or a tuple with an entry for each of {config.num_layers} layers, "
            f"got {ropes!r:.80}"
        )
    for rope in ropes:
        if not isinstance(rope, LayerRope):
            raise ValueError(f"ModelConfig: ropes must hold LayerRope, got {rope!r}")
        rotated = config.head_dim if rope.rotated is None else rope.rotated
        if rotated > config.head_dim:
            raise ValueError(f"ModelConfig: a rope must rotate at most head_dim={config.head_dim} channels, got {rotated}")
        check_rope("LayerRope", rope.scaling, rotated)


def layer_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Normalise ``x`` [..., N] by mean and variance, times ``scale`` [N]: in float32, cast back to its dtype.

    Source: Ba et al., "Layer Normalization" (arXiv:1607.06450), without a bias.
    """
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


def wide_qk_norm(qkv: jax.Array, of_query: jax.Array, of_key: jax.Array, eps: float) -> jax.Array:
    """Normalise the queries of all heads together by their root mean square, and the keys of all heads too.

    Args:
        qkv: [B, T, H, G + 2, D], the queries, the key and the value of each KV head; on a mesh, the heads of this device.
        of_query: [H * G * D], factors, in the order of the heads.
        of_key: [H * D], factors.
        eps: added to the mean square.

    Returns:
        The same array with normalised queries and keys. The arithmetic is in float32.
    """
    heads, group, dim = qkv.shape[2], qkv.shape[3] - 2, qkv.shape[4]
    wide = qkv.astype(jnp.float32)
    square = axes.total(jnp.sum(wide * wide, axis=(2, 4)))  # [B, T, G + 2]
    width = heads * axes.size(axes.MODEL) * dim
    query = lax.rsqrt(jnp.sum(square[..., :group], axis=-1, keepdims=True) / (width * group) + eps)
    key = lax.rsqrt(square[..., group : group + 1] / width + eps)
    rate = jnp.concatenate([jnp.repeat(query, group, axis=-1), key], axis=-1)[:, :, None, :, None]
    scale = jnp.concatenate([of_query.reshape(heads, group, dim), of_key.reshape(heads, 1, dim)], axis=1)
    normed = wide[..., :-1, :] * rate * scale.astype(jnp.float32)[None, None]
    return jnp.concatenate([normed.astype(qkv.dtype), qkv[..., -1:, :]], axis=3)


def without_gates(qkv: jax.Array, group: int) -> tuple[jax.Array, jax.Array | None]:
    """Take the gates of attention's output out of a fused projection.

    Args:
        qkv: [B, T, H, 2 * G + 2, D], where each query is followed by its gate; or [B, T, H, G + 2, D] without gates.
        group: G.

    Returns:
        [B, T, H, G + 2, D], and the gates [B, T, H, G, D] or None.
    """
    if qkv.shape[3] == group + 2:
        return qkv, None
    both, rest = qkv[:, :, :, : 2 * group], qkv[:, :, :, 2 * group :]
    both = both.reshape(*qkv.shape[:3], group, 2, qkv.shape[4])
    return jnp.concatenate([both[..., 0, :], rest], axis=3), both[..., 1, :]


def final_logits(logits: jax.Array, multiplier: float, cap: float | None) -> jax.Array:
    """Scale the logits float32 [..., V] of the LM head, and press them into (-cap, cap) by a tangent."""
    if multiplier != 1:
        logits = logits * multiplier
    return logits if cap is None else jnp.tanh(logits / cap) * cap
