"""The limits of cuDNN, and the only call into cuDNN's fused attention below ``jax.nn.dot_product_attention``.

JAX's public function rounds the log-sum-exp to the dtype of the query, which is too coarse to merge two parts of an
attention. It also takes the axis of heads only behind the axis of slots, which would copy a cache. The function below it is
private to JAX, so it is looked up when it is called: where JAX has moved it, other implementations still run.
"""

from typing import Any

import jax


def check(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> None:
    """Raise ``NotImplementedError`` for dtypes and head sizes that cuDNN does not take on every supported GPU."""
    if not key.shape[2]:
        raise NotImplementedError("got no slots, expected at least one")
    dtypes = {str(x.dtype) for x in (query, key, value)}
    if dtypes not in ({"bfloat16"}, {"float16"}):
        raise NotImplementedError(f"got dtypes {sorted(dtypes)}, expected all bfloat16 or all float16")
    # 128 is what forward and backward take on every supported GPU.
    if query.shape[-1] % 8 or query.shape[-1] > 128:
        raise NotImplementedError(f"got head_dim {query.shape[-1]}, expected a multiple of 8 up to 128")


def fused_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float,
    causal: bool = False,
    bias: jax.Array | None = None,
    **lengths: Any,
) -> tuple[jax.Array, jax.Array]:
    """Run cuDNN over query [B, N, T, D], key and value [B, H, S, D], all bfloat16 or all float16.

    Args:
        query: [B, N, T, D].
        key: [B, H, S, D], H divides N.
        value: [B, H, S, D].
        scale: factor of the logits.
        causal: query t sees keys 0 to t; otherwise every query sees all keys of its row.
        bias: [B, 1, T, S], in the dtype of the query, added to the logits; only alone: not ``causal``, and without
            ``lengths``. T and S are even.
        **lengths: ``q_seqlen`` and ``kv_seqlen`` int32 [B], the tokens of each row; not with ``causal``.

    Returns:
        out [B, N, T, D] and lse float32 [B, N, T].

    Raises:
        NotImplementedError: cuDNN is not installed, or JAX has moved its private function.
    """
    try:
        from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention
    except ImportError as error:
        raise NotImplementedError(f"got {error}, expected JAX's call into cuDNN") from error
    try:
        return dot_product_attention(
            query, key, value, bias, scale=scale,
            mask_type=MaskType.NO_MASK if bias is not None else MaskType.CAUSAL if causal else MaskType.PADDING,
            qkv_layout="BNTH", return_residual=True, **lengths,
        )  # fmt: skip
    except RuntimeError as error:  # raised while tracing where the cuDNN library is missing
        if "cuDNN" not in str(error):
            raise
        raise NotImplementedError(f"got {error}, expected an installed cuDNN") from error
