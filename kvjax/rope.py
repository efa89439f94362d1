"""Rotary position embedding: frequencies and rotation, with angles in float32.

Positions reach 10^5 and more, and in bfloat16 neighbouring positions would share an angle. So all arithmetic is in float32,
and only the rotated vector is cast back to its dtype.

A model may stretch RoPE to longer texts by a rule. `inverse_frequencies` computes the part of a rule that a table of
frequencies can hold. `prepare` applies the other part to queries and keys before methods see them: a factor on cosine and
sine (YaRN, longrope), and frequencies that change with the length (dynamic NTK, longrope). Rotations by two angles are one
rotation by their sum. So `prepare` rotates by the difference to the table, and every method and kernel rotates by the table.

Where frequencies change with the length, a token is rotated with the frequencies for its row's length at that time, and **a
stored key stays as it was rotated**. Transformers, which caches rotated keys, does the same under dynamic NTK. Under longrope
all frequencies change at once, at a `border`. Transformers' Phi-3 reads the whole text again there; here a text is refused
before it grows across (`kvjax.decoding.checks.check_room`). All tokens of a prompt use the prompt's length, all tokens of an
`extend` the length after it, and a decoded token the length that includes it. A row has its own length; transformers uses
the length of the longest row for the whole batch, and its dynamic NTK remembers longer texts of earlier calls. Methods that
renumber tokens (`extrapolates`) see no position beyond their budget: they keep the frequencies of short texts.

Source: RoFormer (arXiv:2104.09864); layout and the ``llama3`` rule as in Llama 3.1's reference settings; the other rules as
``modeling_rope_utils`` of transformers 5.23 computes them.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.protocol.typing import Rope


def inverse_frequencies(head_dim: int, theta: float, scaling: Any = None, *, long: bool = False) -> np.ndarray:
    """Compute the angle per position of each rotated pair, in radians: float32 [D/2].

    Where frequencies change with the length, these are the frequencies of a text within the model's original context.

    Args:
        head_dim: size D of a head, an even number.
        theta: base of the frequencies.
        scaling: None, or the rule: an object with ``rope_type`` and the rule's parameters
            (`models.sizes.rope_scaling`). "llama3":
            slow frequencies are divided by ``factor``, fast frequencies stay, and frequencies between are interpolated.
            "yarn": the same with other bounds. "linear": all frequencies are divided. "longrope": each frequency has its own
            divisor. "dynamic": no frequency changes here, see `prepare`.
        long: whether to use the divisors for long texts ("longrope").

    Raises:
        ValueError: ``head_dim`` is odd, or the rule is unknown.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for RoPE, got {head_dim}")
    frequency = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind = _kind(scaling)
    if kind == "llama3":
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)  # rotations within the original context
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequency = frequency * (keep + (1.0 - keep) / scaling.factor)
    elif kind == "yarn":
        keep = _yarn_keep(head_dim, theta, scaling)
        frequency = frequency * (keep + (1.0 - keep) / scaling.factor)
    elif kind == "linear":
        frequency = frequency / scaling.factor
    elif kind == "longrope":
        frequency = frequency / np.asarray(scaling.long_factor if long else scaling.short_factor, np.float64)
    elif kind not in (None, "dynamic"):
        raise ValueError(f"expected a rope_type of llama3, yarn, linear, longrope or dynamic, got {kind!r}")
    return frequency.astype(np.float32)


def frequencies(rope: Rope, head_dim: int, *, long: bool = False) -> np.ndarray:
    """Compute the angle per position of each pair of channels in a layer, in radians: float32 [D/2], 0 for pairs that stay.

    A model that rotates the first R of D channels, and one that rotates neighbouring channels, is read with its channels in
    another order (`models.channel_order`). The rotated pairs are then the first R/2 pairs of the halves layout.

    Args:
        rope: the rotation of the layer; `inverse_frequencies` has the rules.
        head_dim: size D of a head.
        long: see `inverse_frequencies`.
    """
    if rope.rotated in (None, head_dim):
        return inverse_frequencies(head_dim, rope.theta, rope.scaling, long=long)
    made = np.zeros(head_dim // 2, np.float32)
    if rope.rotated:
        made[: rope.rotated // 2] = inverse_frequencies(rope.rotated, rope.theta, rope.scaling, long=long)
    return made


def attention_factor(scaling: Any = None) -> float:
    """Compute the factor on cosine and sine, whose square scales the logits; 1 for all rules but YaRN and longrope."""
    kind = _kind(scaling)
    if kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return float(scaling.attention_factor)
    stretch = math.log(max(scaling.factor, 1.0))
    if kind == "longrope":
        return math.sqrt(1 + stretch / math.log(scaling.original_max_position_embeddings))
    if scaling.mscale and scaling.mscale_all_dim:
        return (0.1 * scaling.mscale * stretch + 1) / (0.1 * scaling.mscale_all_dim * stretch + 1)
    return 0.1 * stretch + 1


def depends_on_length(scaling: Any = None) -> bool:
    """Tell whether the frequencies change with the length of the text."""
    return _kind(scaling) in ("dynamic", "longrope")


def border(scaling: Any = None) -> int | None:
    """Return the tokens of the longest text with the short factors of "longrope"; None if nothing changes there."""
    if _kind(scaling) != "longrope" or tuple(scaling.short_factor) == tuple(scaling.long_factor):
        return None
    return scaling.original_max_position_embeddings


def prepare(
    query: jax.Array, key: jax.Array, position: jax.Array, length: jax.Array | None, rope: Rope
) -> tuple[jax.Array, jax.Array]:
    """Apply to queries and keys what RoPE does besides the rotation by `frequencies`; see the module docstring.

    It commutes with that rotation. It costs nothing for a model without a rule, or with a rule that a table holds.

    Args:
        query: [B, H, G, T, D], before RoPE.
        key: [B, H, T, D], before RoPE.
        position: int32 [B, T] or [1, T].
        length: int32 [B] or [1], tokens of each row, these tokens included; None: always the frequencies of a short text.
        rope: the rotation of the layer.

    Returns:
        Query and key in their shapes and dtypes.
    """
    dim = query.shape[-1]
    factor: Any = attention_factor(rope.scaling)
    if factor != 1 and rope.rotated not in (None, dim):  # channels that do not rotate are not scaled either
        factor = np.where(np.arange(dim // 2) < rope.rotated // 2, np.float32(factor), np.float32(1))
    if length is None or not depends_on_length(rope.scaling):
        if isinstance(factor, np.ndarray):
            factor = np.tile(factor, 2)
        elif factor == 1:
            return query, key
        return _scale(query, factor), _scale(key, factor)
    shift = _shift(rope, dim, length)
    angle = position[..., None].astype(jnp.float32) * shift[:, None]  # [B, T, D/2]
    return _turn(query, angle[:, None, None], factor), _turn(key, angle[:, None], factor)


def rotate(x: jax.Array, position: jax.Array, inv_freq: jax.Array | np.ndarray) -> jax.Array:
    """Rotate the last axis of ``x`` by its position. Channels ``i`` and ``i + D/2`` form a pair (halves layout).

    Args:
        x: [..., T, D].
        position: int32 [..., T]; its leading axes must broadcast against the leading axes of ``x``.
        inv_freq: float32 [D/2].

    Returns:
        The rotated array in ``x``'s shape and dtype.
    """
    angle = position[..., None].astype(jnp.float32) * jnp.asarray(inv_freq).reshape((1,) * position.ndim + (-1,))
    return _turn(x, angle.reshape((1,) * (x.ndim - angle.ndim) + angle.shape), 1.0)


def rotate_stored(key: jax.Array, position: jax.Array, inv_freq: jax.Array) -> jax.Array:
    """Run `rotate` for all stored keys [B, H, S, D] at ``position`` int32 [..., S], with less memory.

    The halves of a vector are flipped, not joined: on a CPU, XLA holds what it joins beside the result.
    """
    position = position.reshape((1,) * (3 - position.ndim) + position.shape)[..., None, None]
    angle = position.astype(jnp.float32) * inv_freq.reshape(1, 1, 1, 1, -1)
    halves = key.astype(jnp.float32).reshape(*key.shape[:-1], 2, -1)
    sin = jnp.where(jnp.arange(2).reshape(1, 1, 1, 2, 1) == 0, -jnp.sin(angle), jnp.sin(angle))
    return (halves * jnp.cos(angle) + jnp.flip(halves, -2) * sin).reshape(key.shape).astype(key.dtype)


def _kind(scaling: Any) -> str | None:
    return None if scaling is None else scaling.rope_type


def _turn(x: jax.Array, angle: jax.Array, factor: float | np.ndarray) -> jax.Array:
    """Rotate ``x`` [..., D] by ``angle`` float32 [..., D/2], which has as many axes, and scale it by ``factor`` or [D/2]."""
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if isinstance(factor, np.ndarray) or factor != 1:
        if isinstance(factor, np.ndarray):
            factor = factor.reshape((1,) * (angle.ndim - 1) + factor.shape)
        cos, sin = cos * factor, sin * factor
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return out.astype(x.dtype)


def _scale(x: jax.Array, factor: float | np.ndarray) -> jax.Array:
    if isinstance(factor, np.ndarray):
        factor = factor.reshape((1,) * (x.ndim - 1) + factor.shape)
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def _yarn_keep(head_dim: int, theta: float, scaling: Any) -> np.ndarray:
    """Compute the share of each frequency that YaRN keeps, float64 [D/2]: 1 for fast, 0 for slow, a ramp between them."""
    old = scaling.original_max_position_embeddings

    def channel(turns: float) -> float:
        """Compute the channel, a real number, whose frequency makes ``turns`` turns within the original context."""
        return head_dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high  # a ramp of width 0 is a step
    return 1.0 - np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)


def _shift(rope: Rope, head_dim: int, length: jax.Array) -> jax.Array:
    """Compute what a text of ``length`` int32 [B] tokens adds to the frequencies of a short text: float32 [B, D/2]."""
    scaling, dim = rope.scaling, head_dim if rope.rotated is None else rope.rotated
    old = scaling.original_max_position_embeddings
    short = frequencies(rope, head_dim)
    if scaling.rope_type == "longrope":
        difference = frequencies(rope, head_dim, long=True) - short
        return jnp.where(length[:, None] > old, jnp.asarray(difference)[None], 0.0)
    # The base grows by `growth` to the power D / (D - 2), so the slowest frequency is divided by just `growth`.
    growth = jnp.maximum(scaling.factor * length.astype(jnp.float32) / old - (scaling.factor - 1), 1.0)
    power = -np.arange(0, head_dim, 2, dtype=np.float32) / max(dim - 2, 1)  # a pair that stays has no frequency to change
    return jnp.asarray(short)[None] * jnp.expm1(jnp.log(growth)[:, None] * jnp.asarray(power)[None])
