"""Pallas, its Mosaic back end for GPUs and what that is made of, or stand-ins: see `pallas_kernels.machine.back_end`."""

from typing import TYPE_CHECKING

from pallas_kernels.machine import PALLAS, PALLAS_MOSAIC_GPU, back_end

__all__ = ["arith", "builtin", "gpu", "ir", "llvm", "mgpu", "pl", "plgpu", "vector"]

if TYPE_CHECKING:
    from jax.experimental import pallas as pl
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, builtin, gpu, llvm, vector
else:
    pl, plgpu, mgpu = back_end(PALLAS), back_end(PALLAS_MOSAIC_GPU), back_end("jax.experimental.mosaic.gpu")
    ir = back_end("jaxlib.mlir.ir")
    arith, builtin, gpu, llvm, vector = (
        back_end(f"jaxlib.mlir.dialects.{x}") for x in ("arith", "builtin", "gpu", "llvm", "vector")
    )
