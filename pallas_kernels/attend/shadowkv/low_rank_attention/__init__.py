"""Decode attention over lists of pages whose keys are products of two thin matrices (ShadowKV)."""

from typing import Annotated

from jax import Array

from pallas_kernels.attend.shadowkv.low_rank_attention import pallas_triton, reference
from pallas_kernels.attend.shadowkv.low_rank_attention.reference import rebuild
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import declared, forward

__all__ = ["LOW_RANK_ATTENTION", "low_rank_attention", "rebuild"]

LOW_RANK_ATTENTION = Operation.of("low_rank_attention", pallas_triton, reference, logits=True)


@declared(LOW_RANK_ATTENTION, derivative="none: ``xla`` runs ``dense_decode``, which loops up to a traced bound")
def low_rank_attention(
    query: Annotated[Array, "B H G D"],
    left: Annotated[Array, "like query B S R"],
    right: Annotated[Array, "like query B H R D"],
    value: Annotated[Array, "like query B H S D"],
    pages: Annotated[Array, "int32 B H K>=1"],
    mask: Annotated[Array, "bool B H K"],
    *,
    page_size: Annotated[int, ">=1"],
    inv_freq: Annotated[Array, "float32 D/2"],
    scale: float,
    partials: Annotated[tuple[Array, Array] | None, "float32 B H N G D", "float32 B H N G"] = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Attend with one query per head to the tokens of the listed pages only; softmax in float32.

    The key of the token in slot i is ``left[i] @ right`` of its head, rotated (rotary embedding, pairs (c, c + D/2), angle
    ``i * inv_freq[c]`` in float32) and then rounded to the dtype of the query. Tokens that are not listed, or listed and
    masked, never enter, and may hold anything, NaN included. A page that is listed twice counts twice.

    Args:
        left: all heads share it.
        value: may be in host memory, and then only the listed rows cross the bus.
        pages: page p is slots p * page_size to (p + 1) * page_size - 1. Each begins below S where ``mask`` is true, and may
            be anything elsewhere; of the last one, slots at S or beyond do not enter.
        mask: an entry with False is ignored.
        page_size: slots per page.
        inv_freq: radians per slot.
        partials: N parts of attention to other tokens, which enter the same softmax, as in `gather_attention`; or None.
        implementation: "pallas_triton" takes D a power of two, R a multiple of 16.

    Returns:
        out [B, H, G, D] in the dtype of the query, and lse float32 [B, H, G], the log of the softmax denominator; 0 and -inf
        where no token is listed, and nothing is beside.
    """
    return forward()
