"""Decode attention over all tokens of a cache: one query per head, contiguous slots, a length known at run time."""

from __future__ import annotations

import jax

from pallas_kernels.dense_decode import cudnn, jax_triton, pallas_tpu, pallas_triton, reference
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.quantised import Quantised

__all__ = ["DENSE_DECODE", "dense_decode"]

DENSE_DECODE = Operation(
    "dense_decode",
    {
        "pallas_triton": Implementation(pallas_triton.dense_decode, ("gpu",), pallas_triton.check),
        # These two are for comparison. Their checks are stricter than the first, so the first runs wherever they can.
        "jax_triton": Implementation(jax_triton.dense_decode, ("gpu",), jax_triton.check),
        "cudnn": Implementation(cudnn.dense_decode, ("gpu",), cudnn.check),
        "pallas_tpu": Implementation(pallas_tpu.dense_decode, ("tpu",), pallas_tpu.check),
        "xla": Implementation(reference.dense_decode),
    },
)


def dense_decode(
    query: jax.Array,
    key: jax.Array | Quantised,
    value: jax.Array | Quantised,
    *,
    position: jax.Array,
    limit: jax.Array,
    scale: float,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one query per head over the slots below a limit that hold a token; softmax in float32.

    Other slots may hold anything, NaN included. Not differentiable.

    Args:
        query: [B, H, G, D].
        key: [B, H, S, D], same dtype; or codes of this dtype, which "pallas_triton" multiplies as they are.
        value: [B, H, S, D], like ``key``.
        position: int32 [B, H, S], negative for an empty slot.
        limit: int32 [B], clipped to [0, S]; slots from there on do not enter and are not read.
        scale: factor of the logits, a Python number.
        implementation: "pallas_triton" (GPU; D a power of two); "jax_triton" (the same kernel through the package of
            that name); "cudnn" (bfloat16 or float16; **ignores ``position``**: correct only if every slot below the limit
            holds a token); "pallas_tpu" (TPU; D a multiple of 128, S of 8); "xla"; or None for the first of
            "pallas_triton", "pallas_tpu" and "xla" that runs.
        platform: see ``Operation.run``. ``DENSE_DECODE.resolve`` tells which implementation a call uses.

    Returns:
        out [B, H, G, D] in the dtype of the query, and lse float32 [B, H, G], the log of the softmax denominator; 0 and
        -inf where no slot below the limit holds a token.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    expected = (*query.shape[:2], key.shape[2] if key.ndim == 4 else -1, query.shape[-1])
    agree = query.ndim == 4 and key.shape == value.shape == expected
    if not agree or position.shape != key.shape[:3] or limit.shape != key.shape[:1]:
        raise ValueError(
            f"dense_decode: got query {query.shape}, key {key.shape}, value {value.shape}, position {position.shape}, "
            f"limit {limit.shape}, expected [B, H, G, D], [B, H, S, D], [B, H, S, D], [B, H, S], [B]"
        )
    if (str(position.dtype), str(limit.dtype)) != ("int32", "int32"):
        raise ValueError(f"dense_decode: got position {position.dtype} and limit {limit.dtype}, expected int32")
    if not query.dtype == key.dtype == value.dtype:
        dtypes = [str(x.dtype) for x in (query, key, value)]
        raise ValueError(f"dense_decode: got dtypes {dtypes}, expected the same dtype")
    return DENSE_DECODE.run(
        query,
        key,
        value,
        position=position,
        limit=limit,
        scale=scale,
        implementation=implementation,
        platform=platform,
    )
