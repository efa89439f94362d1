"""The running softmax of kernels for TPUs: rescaled sums as in FlashAttention-2, in float32, as arrays with two axes."""

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import finite_or_zero, product_precision

Sums = tuple[jax.Array, jax.Array, jax.Array]  # softmax denominator [G, 1], maximum logit [G, 1], weighted values [G, D]

_ROW_BY_ROW = (((1,), (1,)), ((), ()))  # contract the channels of both
_PLAIN = (((1,), (0,)), ((), ()))


def nothing(group: int, dim: int) -> Sums:
    """Return the sums before the first block."""
    return (
        jnp.zeros((group, 1), jnp.float32),
        jnp.full((group, 1), -jnp.inf, jnp.float32),
        jnp.zeros((group, dim), jnp.float32),
    )


def products(query: jax.Array, rows: jax.Array) -> jax.Array:
    """Multiply query [G, D] with each of the rows [N, D], of one dtype: float32 [G, N]."""
    precision = product_precision(query.dtype)
    return jax.lax.dot_general(query, rows, _ROW_BY_ROW, precision=precision, preferred_element_type=jnp.float32)


def add_block(sums: Sums, query: jax.Array, keys: jax.Array, values: jax.Array, held: jax.Array, scale: float) -> Sums:
    """Add the slots of a block: query [G, D], keys and values [N, D], and held bool [1, N], the slots that enter."""
    total, maximum, out = sums
    # This removes the NaN of a hidden key. The NaN of a hidden value must go before it meets its weight of 0.
    logits = jnp.where(held, products(query, keys) * scale, -jnp.inf)
    entering = jnp.where(held, 1.0, 0.0).reshape(-1, 1) > 0
    values = jnp.where(entering, values.astype(jnp.float32), 0).astype(values.dtype)
    risen = jnp.maximum(maximum, jnp.max(logits, axis=1, keepdims=True))
    shift = finite_or_zero(risen)
    decay = jnp.exp(maximum - shift)  # brings the earlier sums to the new maximum
    weight = jnp.exp(logits - shift)
    added = jax.lax.dot_general(
        weight.astype(values.dtype),
        values,
        _PLAIN,
        precision=product_precision(values.dtype),
        preferred_element_type=jnp.float32,
    )
    return total * decay + jnp.sum(weight, axis=1, keepdims=True), risen, out * decay + added


def result(sums: Sums) -> tuple[jax.Array, jax.Array]:
    """Finish the softmax: output [G, D] and log of the softmax denominator [G, 1]; 0 and -inf where no slot has entered."""
    total, maximum, out = sums
    return out / jnp.where(total > 0, total, 1), finite_or_zero(maximum) + jnp.log(total)
