"""Pallas and its Mosaic back end for TPUs, or stand-ins where JAX has none: see `pallas_kernels.machine.back_end`."""

from typing import TYPE_CHECKING

from pallas_kernels.machine import PALLAS, PALLAS_TPU, back_end

__all__ = ["pl", "plt"]

if TYPE_CHECKING:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as plt
else:
    pl, plt = back_end(PALLAS), back_end(PALLAS_TPU)
