"""Causal self-attention of whole sequences at positions 0..T-1, differentiable: used to train."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.numerics import product_precision

WHOLE = 2048  # longest T whose [T, T] logits are formed at once
BLOCK = 512  # queries per block above that


def _xla(query: jax.Array, key: jax.Array, value: jax.Array, *, scale: float) -> jax.Array:
    length = query.shape[3]
    if length <= WHOLE:
        return _rows(query, key, value, jnp.arange(length), scale)
    # One block of queries against all keys at a time. Half of that work is masked away, but the loop is a
    # scan whatever T is, and rematerialising each block keeps the backward pass to one block of logits too.
    blocks = -(-length // BLOCK)
    padded = jnp.pad(query, [(0, 0)] * 3 + [(0, blocks * BLOCK - length), (0, 0)])
    split = jnp.moveaxis(padded.reshape(*query.shape[:3], blocks, BLOCK, -1), 3, 0)
    position = jnp.arange(blocks * BLOCK).reshape(blocks, BLOCK)
    block = jax.checkpoint(lambda pair: _rows(pair[0], key, value, pair[1], scale))
    out = jnp.moveaxis(jax.lax.map(block, (split, position)), 0, 3)
    return out.reshape(padded.shape)[..., :length, :]


def _rows(query: jax.Array, key: jax.Array, value: jax.Array, position: jax.Array, scale: float) -> jax.Array:
    precision = product_precision(query.dtype)
    logits = jnp.einsum("bhgtd,bhsd->bhgts", query, key, precision=precision, preferred_element_type=jnp.float32)
    visible = jnp.arange(key.shape[2])[None, :] <= position[:, None]
    logits = jnp.where(visible[None, None, None], logits * scale, -jnp.inf)
    weight = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
    out = jnp.einsum("bhgts,bhsd->bhgtd", weight, value, precision=precision, preferred_element_type=jnp.float32)
    return out.astype(query.dtype)


def _cudnn(query: jax.Array, key: jax.Array, value: jax.Array, *, scale: float) -> jax.Array:
    rows, heads, group, length, dim = query.shape
    tokens_first = query.reshape(rows, heads * group, length, dim).swapaxes(1, 2)
    try:
        out = jax.nn.dot_product_attention(
            tokens_first,
            key.swapaxes(1, 2),
            value.swapaxes(1, 2),
            is_causal=True,
            scale=scale,
            implementation="cudnn",
        )
    except RuntimeError as error:  # raised while tracing where the cuDNN library is missing
        if "cuDNN" not in str(error):
            raise
        raise NotImplementedError(f"got {error}, expected an installed cuDNN") from error
    return out.swapaxes(1, 2).reshape(query.shape)


def _check_cudnn(query: jax.Array, key: jax.Array, value: jax.Array, *, scale: float) -> None:
    dtypes = {str(x.dtype) for x in (query, key, value)}
    if dtypes not in ({"bfloat16"}, {"float16"}):
        raise NotImplementedError(f"got dtypes {sorted(dtypes)}, expected all bfloat16 or all float16")
    # 128 is what forward and backward take on every supported GPU.
    if query.shape[-1] % 8 or query.shape[-1] > 128:
        raise NotImplementedError(f"got head_dim {query.shape[-1]}, expected a multiple of 8 up to 128")


CAUSAL_ATTENTION = Operation(
    "causal_attention",
    {"cudnn": Implementation(_cudnn, ("gpu",), _check_cudnn), "xla": Implementation(_xla)},
)


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Causal self-attention at positions 0..T-1; differentiable.

    Right padding is harmless: a token never sees a later one. ``CAUSAL_ATTENTION.resolve`` tells which
    implementation a call uses.

    Args:
        query: [B, H, G, T, D], already rotated; float32, bfloat16 or float16.
        key: [B, H, T, D], already rotated, same dtype.
        value: [B, H, T, D], same dtype.
        scale: factor of the logits; None means 1 / sqrt(D).
        implementation: "cudnn" (flash attention; GPU, bfloat16 or float16), "xla" (float32 softmax), or None.
        platform: see ``Operation.run``.

    Returns:
        [B, H, G, T, D] in the dtype of the query.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    expected = (*query.shape[:2], *query.shape[3:])
    if query.ndim != 5 or key.shape != expected or value.shape != expected:
        raise ValueError(
            f"causal_attention: got query {query.shape}, key {key.shape}, value {value.shape}, "
            "expected [B, H, G, T, D], [B, H, T, D], [B, H, T, D]"
        )
    if not query.dtype == key.dtype == value.dtype:
        dtypes = [str(x.dtype) for x in (query, key, value)]
        raise ValueError(f"causal_attention: got dtypes {dtypes}, expected the same dtype")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return CAUSAL_ATTENTION.run(query, key, value, scale=scale, implementation=implementation, platform=platform)
