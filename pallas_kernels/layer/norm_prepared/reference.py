"""The sum of two arrays and its norm, in plain JAX, without integers."""

from __future__ import annotations

from pallas_kernels.formats.prepared import Prepared
from pallas_kernels.layer.add_norm import reference


def norm_prepared(x, update, scale, *, eps, bits):
    """Add an update, and normalise the sum, in plain JAX."""
    total, normed = reference.add_norm(x, update, scale, eps=eps)
    return total, Prepared(x=normed)
