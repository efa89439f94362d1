"""Eigenvectors of symmetric matrices, on every platform."""

from __future__ import annotations

from jax import Array, lax


def eigenvectors(matrix: Array) -> Array:
    """The eigenvectors as columns, by ascending eigenvalue, of symmetric float32 [..., N, N]."""
    kinds = lax.linalg.EighImplementation

    def jacobi(x: Array) -> Array:
        return lax.linalg.eigh(x, implementation=kinds.JACOBI)[0]

    # What a TPU does by itself takes the compiler minutes for each layer.
    return lax.platform_dependent(matrix, tpu=jacobi, default=lambda x: lax.linalg.eigh(x)[0])
