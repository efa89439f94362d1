"""The only call into jax-triton, an optional package: for comparison, and in case Pallas drops its Triton back end.

Its kernels do not run interpreted. The package has no batching rule: under ``jax.vmap`` a kernel is launched for one index of
the mapped axis after the other, so that no operand is copied for an axis that it does not have.
"""

import inspect
from typing import Any

import jax
from jax.custom_batching import sequential_vmap


def package() -> Any:
    """Import the module ``jax_triton``; raise ``NotImplementedError`` where it or Triton is missing."""
    try:
        import jax_triton
        import triton  # noqa: F401
    except ImportError as error:
        raise NotImplementedError(f"needs the package jax_triton (pip install kvjax[triton]): {error}") from error
    return jax_triton


def launch(body: Any, operands: tuple[jax.Array, ...], outputs: tuple[Any, ...], **options: Any) -> tuple[jax.Array, ...]:
    """Run a Triton kernel, jitted: ``options`` are its compile-time parameters, grid, warps and stages."""
    call = package().triton_call
    renamed = "out_type" if "out_type" in inspect.signature(call).parameters else "out_shape"  # before version 0.4
    return sequential_vmap(lambda *arrays: call(*arrays, kernel=body, **{renamed: outputs}, **options))(*operands)
