"""The merge of split-K partials in plain JAX."""

import jax.numpy as jnp

from pallas_kernels.numerics import merge_partials


def merge_splits(out, lse, *, dtype):
    """Merge the partial softmaxes of each list, in plain JAX."""
    out, lse = merge_partials(jnp.moveaxis(out, 1, 0), jnp.moveaxis(lse, 1, 0))
    return out.astype(dtype), lse
