"""Merging split-K partials in plain JAX."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.numerics import merge_partials


def merge_splits(out, lse, *, dtype):
    """See ``pallas_kernels.attend.merge_splits.merge_splits``."""
    out, lse = merge_partials(jnp.moveaxis(out, 1, 0), jnp.moveaxis(lse, 1, 0))
    return out.astype(dtype), lse
