"""One token, packed in plain JAX: the largest channels by sorting."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.packed_vectors import pack_channels, words_of


def pack_token(key, value, stored, place, packed, last, basis_key, basis_value, store, *, granule):
    """Pack one token of a buffer, and the mean of a block that it fills, into a store, in plain JAX."""
    rank = store[0].shape[-1]
    at, number = jnp.maximum(place - packed, 0), jnp.arange(place.shape[0])
    first = at // granule * granule
    window = jnp.minimum(first[:, None] + jnp.arange(granule, dtype=jnp.int32)[None], key.shape[2] - 1)
    held = jnp.take_along_axis(stored, window[:, None], axis=2)[..., None] >= 0
    keys = jnp.where(held, jnp.take_along_axis(key, window[:, None, :, None], axis=2), 0).astype(jnp.float32)
    newest = (jnp.take_along_axis(x, at[:, None, None, None], axis=2).astype(jnp.float32) for x in (key, value))
    bases = [x[:, :, 0] if x.shape[2] == 1 else x[number, :, last] for x in (basis_key, basis_value)]
    new = []
    for x, basis in zip((*newest, keys.mean(axis=2, keepdims=True)), (*bases, bases[0]), strict=True):
        projected = jnp.einsum("bhsd,bhed->bhse", x, basis, precision=lax.Precision.HIGHEST)
        score = jnp.abs(projected)  # not squared: the squares of small numbers would become 0 and tie
        values, bitmap = pack_channels(projected, score, rank, store[0].dtype)
        new += [values, words_of(bitmap)]
    whole = jnp.where((place + 1) % granule == 0, place // granule, -1)
    return tuple(
        old.at[number, :, jnp.where(index >= 0, index, old.shape[2])].set(x[:, :, 0], mode="drop")
        for old, x, index in zip(store, new, [place] * 4 + [whole] * 2, strict=True)
    )
