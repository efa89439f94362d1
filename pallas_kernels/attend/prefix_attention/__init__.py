"""Attention of a prompt chunk over a cache without holes: its own tokens causally, all slots before them fully."""

from __future__ import annotations

import jax

from pallas_kernels._cudnn import check
from pallas_kernels.attend.dense_attention.checks import check_chunk
from pallas_kernels.attend.prefix_attention import cudnn, reference
from pallas_kernels.dispatch import Implementation, Operation

__all__ = ["PREFIX_ATTENTION", "prefix_attention"]

PREFIX_ATTENTION = Operation(
    "prefix_attention",
    {
        "cudnn": Implementation(cudnn.prefix_attention, ("gpu",), check),
        "xla": Implementation(reference.prefix_attention),
    },
    logits=True,
)


def prefix_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    start: jax.Array | int,
    length: jax.Array | None = None,
    scale: float,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend with T tokens in slots start..start+T-1 to a cache in which every slot before them holds a token.

    Token t sees slots 0..start+t. Slots behind the chunk may hold any finite value. Training uses ``causal_attention``.

    Not differentiable: ``xla`` loops over blocks of keys up to a traced bound.

    Args:
        query: [B, H, G, T, D], already rotated; float32, bfloat16 or float16.
        key: [B, H, S, D], same dtype; the chunk's own keys are stored in it already.
        value: [B, H, S, D], same dtype.
        start: int32 scalar or [B], may be traced: the slot of the chunk's first token. If it is a scalar, all T tokens of the
            chunk lie in the cache; if it is [B], all real ones do. The Python int 0 leaves out the pass over earlier slots.
        length: int32 [B], how many tokens of the chunk are real; padding may hold anything, NaN included. None means that
            all T are real.
        scale: factor of the logits.
        implementation: "cudnn" (flash attention; GPU, bfloat16 or float16), "xla" (blocks of keys), or None.
        platform: see ``Operation.run``.

    Returns:
        out [B, H, G, T, D] in the dtype of the query, and lse float32 [B, H, G, T], the log of the softmax
        denominator; 0 and -inf for a query that is not real.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    check_chunk("prefix_attention", query, key, value)
    batch = query.shape[0]
    for name, array, shapes in (("start", start, ((), (batch,))), ("length", length, ((batch,),))):
        if isinstance(array, jax.Array) and array.shape not in shapes:
            raise ValueError(f"prefix_attention: got {name} {array.shape}, expected one of {shapes}")
    return PREFIX_ATTENTION.run(
        query,
        key,
        value,
        start=start,
        length=length,
        scale=scale,
        implementation=implementation,
        platform=platform,
    )
