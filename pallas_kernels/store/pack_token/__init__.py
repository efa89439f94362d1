"""Packs one token of a buffer, and the mean of its block, into a store of packed vectors (MosaicKV)."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.store.pack_token import pallas_triton, reference

__all__ = ["PACK_TOKEN", "pack_token"]

PACK_TOKEN = Operation(
    "pack_token",
    {
        "pallas_triton": Implementation(pallas_triton.pack_token, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.pack_token),
    },
)


def pack_token(
    key: jax.Array,
    value: jax.Array,
    stored: jax.Array,
    place: jax.Array,
    packed: jax.Array,
    last: jax.Array,
    basis_key: jax.Array,
    basis_value: jax.Array,
    store: tuple[jax.Array, ...],
    *,
    granule: int,
    channels: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, ...]:
    """Pack one token of a buffer, and the mean of the keys of its block, into a store; in place where the caller gives it up.

    The r channels of the largest size are kept, and of equal channels the lower one.

    Differentiable: through ``xla``, the values only.

    Args:
        key: [B, H, R, D], keys of the buffer; its slot i holds the token at position ``packed + i``.
        value: [B, H, R, D], values of the buffer.
        stored: int32 [B, H, R], positions of the buffer's tokens; negative for an empty slot, which counts as zero.
        place: int32 [B], position of the token to pack; negative for a row without one.
        packed: int32 [B], tokens in front of the buffer, a multiple of ``granule``.
        last: int32 [B], the segment in whose basis the token is packed.
        basis_key: float32 [B, H, M, D, D], basis of keys and block means.
        basis_value: float32 [B, H, M, D, D], basis of values.
        store: six arrays. Values [B, H, S, r] and bitmap int32 [B, H, S, D/32] of the keys; the same of the values; values
            and bitmap [B, H, P, ...] of the block means. Slot i is position i, and block p begins at ``p * granule``. A
            position past the end is dropped.
        granule: tokens per block.
        channels: number of leading channels that may be kept.
        implementation: "pallas_triton" (GPU; D of 32 to 128), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        The six arrays of ``store``.

    Raises:
        ValueError: shapes disagree or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    lead, rows = key.shape[:2], (key.shape[0],)
    fits = key.shape == value.shape == (*stored.shape, key.shape[-1]) and len(store) == 6
    fits = fits and place.shape == packed.shape == last.shape == rows
    fits = fits and basis_key.shape == basis_value.shape and basis_key.shape[:2] == lead
    if not fits or any(x.shape[:2] != lead for x in store):
        shapes = [x.shape for x in (key, value, stored, place, packed, last, basis_key, basis_value, *store)]
        raise ValueError(
            f"pack_token: got {shapes}, expected key and value [B, H, R, D], stored [B, H, R], place, packed and last [B], "
            "two bases [B, H, M, D, D], six arrays of a store [B, H, ...]"
        )
    return PACK_TOKEN.run(
        key, value, stored, place, packed, last, basis_key, basis_value, store,
        granule=granule, channels=channels, implementation=implementation, platform=platform,
    )  # fmt: skip
