"""Keys to encode, and `encode` by any implementation, for tests of codes and of the index."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.store.pariskv.encode import pallas_triton
from tests.oracles import pariskv as plain
from tests.pallas_kernels.cases import compiled, implementations


def keys_to_encode(seed, dim, tokens=11, rows=2, heads=2):
    """Keys of very different length, a zero key, and NaN for keys that are not valid."""
    rng = np.random.default_rng(seed)
    key = rng.normal(size=(rows, heads, tokens, dim)) * 10.0 ** rng.uniform(-3, 3, (rows, heads, tokens, 1))
    valid = rng.random((rows, heads, tokens)) < 0.8
    key[0, 0, 1], valid[0, 0, 1] = 0, True
    return np.where(valid[..., None], key, np.nan).astype(np.float32), valid


def signs_of(dim, rotate=True):
    """The signs of the rotation, or None."""
    return jnp.asarray(plain.random_signs(dim), jnp.float32) if rotate else None


def encoding(name, dim, rotate=True, part=4):
    """`encode` by implementation ``name``, jitted; ``part`` keys per program where it runs interpreted."""
    run = implementations("encode", config=pallas_triton.Config(part))[name]
    return compiled(run, scale=dim**-0.5 if rotate else 1.0)
