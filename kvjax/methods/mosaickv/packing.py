"""Sparse vectors in fixed space: the kept channels of a vector, and a bitmap of their numbers.

A vector of D channels with r kept ones becomes r values in channel order and D/8 bytes. Bit j of byte i stands for channel
8 i + j. In storage four bytes are one word (`words_of`). Packing sorts and gathers; unpacking counts bits and gathers.
Neither scatters, so XLA can fuse both with other operations. Source: MosaicKV (arXiv:2607.00760), packed format with
per-vector channels.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.formats.packed_vectors import channel_score, pack_channels, unpack, words_of

__all__ = [
    "bytes_per_token",
    "bytes_per_vector",
    "channel_score",
    "pack",
    "pack_channels",
    "unpack",
    "words_of",
]


def pack(y: Array, rank: int, element_group: int = 1, dtype: DTypeLike | None = None) -> tuple[Array, Array]:
    """Keep the ``rank`` largest channels of every vector. Of equal channels the lower is kept.

    Args:
        y: [..., D], D a multiple of 8.
        rank: channels to keep, a multiple of ``element_group``.
        element_group: number of adjacent channels that are kept or dropped together, by their squared sum.
        dtype: dtype of the values; None means the dtype of ``y``.

    Returns:
        values [..., rank] in channel order and bitmap uint8 [..., D/8].

    Raises:
        ValueError: D is no multiple of 8 or of ``element_group``, or ``rank`` is no multiple of ``element_group`` up to D.
    """
    dim = y.shape[-1]
    if dim % 8 or dim % element_group:
        raise ValueError(
            f"pack: vectors must have a multiple of 8 and of element_group={element_group} channels, got {dim}"
        )
    if not 1 <= rank <= dim or rank % element_group:
        raise ValueError(f"pack: rank must be a multiple of element_group={element_group} from 1 to {dim}, got {rank}")
    return pack_channels(
        y, channel_score(y.astype(jnp.float32), element_group), rank, y.dtype if dtype is None else dtype
    )


def bytes_per_vector(rank: Any, channels: int, element_group: Any, itemsize: int) -> Any:
    """Count the bytes of one packed vector: its values, and one bit for each group of the ``channels`` that can be kept."""
    return rank * itemsize + channels / (8 * element_group)


def bytes_per_token(
    head_dim: int, rank: int, element_group: int, block_size: int, itemsize: int = 2, truncate: bool = False
) -> float:
    """Count the bytes of a packed token of one KV head: its key, its value, and a share of the block's mean key.

    With ``truncate`` the last quarter of the ``head_dim`` channels is never kept and has no bits.
    """
    channels = 3 * head_dim // 4 if truncate else head_dim
    return bytes_per_vector(rank, channels, element_group, itemsize) * (2 + 1 / block_size)
