"""Causal attention of whole sequences by cuDNN's flash attention."""

import jax

from pallas_kernels._cudnn import check as check


def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, scale: float, window: int | None = None
) -> jax.Array:
    """Attend to each query's own and earlier tokens, by cuDNN."""
    rows, heads, group, length, dim = query.shape
    tokens_first = query.reshape(rows, heads * group, length, dim).swapaxes(1, 2)
    try:
        out = jax.nn.dot_product_attention(
            tokens_first,
            key.swapaxes(1, 2),
            value.swapaxes(1, 2),
            is_causal=True,
            scale=scale,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )
    except RuntimeError as error:  # raised while tracing where the cuDNN library is missing
        if "cuDNN" not in str(error):
            raise
        raise NotImplementedError(f"got {error}, expected an installed cuDNN") from error
    return out.swapaxes(1, 2).reshape(query.shape)
