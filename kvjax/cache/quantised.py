"""Caches in 8 or 4 bits: `QuantisedCache`, what ``kv_dtype`` may be, and which methods can run on such a cache.

``kv_dtype`` is a property of a cache, whatever its method: keys, rotated, and values are stored as codes
(`pallas_kernels.formats.quantised`) with scales for each token and KV head, in the kinds of `KV_DTYPES`. They are rounded
once, when they are stored. Every reader, prompt chunks included, gets the rounded values. So chunks change nothing, and a
method does exactly what it would do in a model whose keys and values were the rounded values. Attention of decode steps
multiplies the codes themselves. All other computations of a method use `QuantisedCache.key` and ``value``, which are
dequantised to the dtype of the model. An offloaded cache has the same codes, in host memory (`kvjax.cache.offload`).

Layers with a sliding window are small and keep the dtype of the model.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache.divided import kept_of_all, next_here, whole
from kvjax.cache.latent import empty_latent
from kvjax.cache.storage import LayerCache, LayerSpec, PlainCache, empty_cache
from kvjax.protocol.fields import shown
from kvjax.protocol.typing import EMPTY, not_none, pytree, static, traced
from kvjax.selection import kept_positions
from pallas_kernels.formats.quantised import Quantised, code_bytes, dequantise, scale_bytes, zeros

# What ``kv_dtype`` may be: the kinds of codes of keys and of values, and whether their channels are mixed before they are
# rounded (`pallas_kernels.formats.mixing`). Values in 4 bits have a scale for each group of channels (`has_groups`).
KV_DTYPES = {
    "int8": (("int8", "int8"), False),
    "float8_e4m3fn": (("float8_e4m3fn", "float8_e4m3fn"), False),
    "k8v4": (("int8", "int4"), True),
    "int4": (("int4", "int4"), True),
}


@pytree
class QuantisedCache(LayerCache):
    """Keys and values of one layer as codes, all on the device.

    With ``parts`` above 1 it has this device's slots of each row, with the functions of a `kvjax.cache.divided.PartCache`.
    """

    codes: tuple[Quantised, Quantised] = traced("keys and values [B, H, S, D]")
    position: Array  # int32 [B, H, S], absolute token position; EMPTY if the slot holds no token
    cursor: Array  # int32 [B], the slot for the row's next token, among the slots of all devices
    parts: int = static("devices over which the slots of a row are divided", default=1)

    @property
    def key(self) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All keys, dequantised: [B, H, S, D] in the dtype of the model."""
        return dequantise(self.codes[0])

    @property
    def value(self) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All values, dequantised: [B, H, S, D] in the dtype of the model."""
        return dequantise(self.codes[1])

    def holding(self, key: Quantised, value: Quantised, position: Array, cursor: Array) -> QuantisedCache:
        return QuantisedCache(codes=(key, value), position=position, cursor=cursor, parts=self.parts)

    def append(self, key: Array, value: Array, position: Array, start: Array | int | None = None) -> QuantisedCache:
        if self.parts == 1:
            return super().append(key, value, position, start)
        slot, mine, cursor = next_here(self, position)  # a chunk may begin on another device
        return self._with_tokens(key, value, position, cursor, jnp.where(mine, slot, self.num_slots))

    def compact(self, slots: Array, keep: Array, room: int) -> QuantisedCache:
        """Keep slots as `LayerCache.compact` and `kvjax.cache.divided.PartCache.compact` do; codes move unchanged."""
        position, cursor = kept_positions(whole(self.position, self), slots, keep, room)
        codes = jax.tree.map(lambda x: kept_of_all(x, slots, room, self), self.codes)
        return QuantisedCache(codes=codes, position=position, cursor=cursor)


def resident_of(key: Array | Quantised, value: Array | Quantised, position: Array, cursor: Array) -> LayerCache:
    """Make a resident cache of these arrays: of codes a `QuantisedCache`, else a `PlainCache`."""
    if isinstance(key, Quantised) and isinstance(value, Quantised):
        return QuantisedCache(codes=(key, value), position=position, cursor=cursor)
    return PlainCache(key=cast("Array", key), value=cast("Array", value), position=position, cursor=cursor)


def empty_resident(spec: LayerSpec, slots: int, parts: int = 1) -> LayerCache:
    """Make an empty cache of ``slots`` slots on the device, in the layer's ``kv_dtype``, divided over ``parts`` devices."""
    shape = spec.batch, spec.num_kv_heads, slots
    once = spec.value_is_key and parts == 1
    if spec.kv_dtype is None and once:
        return empty_latent(jnp.zeros((*shape, spec.head_dim), spec.dtype))
    if spec.kv_dtype is None:
        return empty_cache(*shape, spec.head_dim, spec.dtype)
    if once:
        return empty_latent(empty_codes(spec, slots, 0))
    return QuantisedCache(
        codes=(empty_codes(spec, slots, 0), empty_codes(spec, slots, 1)),
        position=jnp.full(shape, EMPTY, jnp.int32),
        cursor=jnp.zeros((spec.batch,), jnp.int32),
        parts=parts,
    )


def empty_codes(spec: LayerSpec, slots: int, which: int) -> Quantised:
    """Make the codes of ``slots`` empty slots in the layer's ``kv_dtype``: of keys (``which`` 0) or of values (1)."""
    kinds, mixed = KV_DTYPES[not_none("kv_dtype", spec.kv_dtype)]
    shape = spec.batch, spec.num_kv_heads, slots, spec.head_dim
    # Where a value is its key, it is rounded as its key.
    return zeros(shape, spec.dtype, kinds[which], mixed, has_groups(kinds, which) and not spec.value_is_key)


def has_groups(kinds: tuple[str, str], which: int) -> bool:
    """Tell whether keys (``which`` 0) or values (1) of these ``kinds`` have a scale for each group of channels.

    Keys have one scale, which a kernel multiplies after the product over all channels.
    """
    return which == 1 and kinds[which] == "int4"


def row_bytes(head_dim: int, dtype: str, kv_dtype: str | None, value_is_key: bool = False) -> int:
    """Count the bytes of a key and a value of one token and KV head, in a resident cache."""
    stored = 1 if value_is_key else 2
    if kv_dtype is None:
        return stored * head_dim * jnp.dtype(dtype).itemsize
    kinds, _ = KV_DTYPES[kv_dtype]
    parts = ((code_bytes(head_dim, kinds[i]), scale_bytes(head_dim, has_groups(kinds, i))) for i in range(stored))
    return sum(map(sum, parts))


def check_kv_dtype(kv_dtype: str | None) -> None:
    """Refuse a ``kv_dtype`` that is not known.

    Raises:
        ValueError: the message lists the known values.
    """
    if kv_dtype is not None and (not isinstance(kv_dtype, str) or kv_dtype not in KV_DTYPES):
        *others, last = map(repr, KV_DTYPES)
        known = f"{', '.join(others)} or {last}"
        raise ValueError(f"kv_dtype must be {known}, or None for the dtype of the model, got {shown(kv_dtype)}")
