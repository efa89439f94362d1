"""The running softmax of one program, inside kernels: FlashAttention-2's rescaled sums, in float32."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._triton.pallas import plt
from pallas_kernels.numerics import finite_or_zero

Sums = tuple[jax.Array, jax.Array, jax.Array]  # softmax denominator [G], maximum logit [G], weighted values [G, D]


def nothing(group: int, dim: int) -> Sums:
    """Return the sums before the first block."""
    return (jnp.zeros((group,), jnp.float32), jnp.full((group,), -jnp.inf, jnp.float32), jnp.zeros((group, dim), jnp.float32))


def one_part(out: jax.Array, lse: jax.Array) -> Sums:
    """Return the sums of slots with output [G, D] and lse float32 [G]; where lse is -inf, the output is ignored."""
    some = lse > -jnp.inf
    return some.astype(jnp.float32), lse, jnp.where(some[:, None], out.astype(jnp.float32), 0)


def add_block(
    sums: Sums, logits: jax.Array, values: jax.Array, precision: jax.lax.Precision, scale: jax.Array | None = None
) -> Sums:
    """Add a block of slots: logits float32 [G, N], -inf where hidden, and values [N, D], finite everywhere.

    ``scale`` float32 [N], finite, is given where the values are codes: slot n has the values ``values[n] * scale[n]``.
    """
    total, maximum, out = sums
    risen = jnp.maximum(maximum, jnp.max(logits, axis=1))
    shift = finite_or_zero(risen)
    decay = jnp.exp(maximum - shift)  # brings the earlier sums to the new maximum
    weight = jnp.exp(logits - shift[:, None])
    # Tensor cores multiply in the dtype of the values and add in float32.
    share = weight if scale is None else weight * scale[None, :]
    added = plt.dot(share.astype(values.dtype), values, precision=precision)
    return total * decay + jnp.sum(weight, axis=1), risen, out * decay[:, None] + added


def store_logits(
    refs: Sequence[Any], at: tuple[Any, Any], heads: jax.Array, slots: jax.Array, logits: jax.Array, mask: jax.Array
) -> None:
    """Store a block's logits float32 [G, N] in arrays [B, H, G, S]: one array or none.

    Args:
        refs: the arrays.
        at: row and KV head.
        heads: int32 [G]; entries with an equal head store equal logits.
        slots: int32 [N].
        logits: float32 [G, N].
        mask: bool [N] or [G, N], which of them are stored.
    """
    for ref in refs:
        some = mask if mask.ndim == 2 else mask[None]
        head, slot, some = (jnp.broadcast_to(x, logits.shape) for x in (heads[:, None], slots[None], some))
        plt.store(ref.at[*at, head, slot], logits, mask=some)


def result(sums: Sums) -> tuple[jax.Array, jax.Array]:
    """Finish the softmax: output [G, D] and log of the softmax denominator [G]; 0 and -inf where no slot has entered."""
    total, maximum, out = sums
    return out / jnp.where(total > 0, total, 1)[:, None], finite_or_zero(maximum) + jnp.log(total)
