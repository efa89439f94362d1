"""The only call into the Triton back end of Pallas.

That back end is deprecated. `pallas_kernels._mosaic_gpu` is written for the one that stays.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels._triton.checks import check_bytes
from pallas_kernels._triton.pallas import pl, plt


def triton_call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    out_shape: Any,
    name: str,
    num_warps: int = 4,
    num_stages: int = 3,
    interpret: bool = False,
    **specs: Any,
) -> Callable[..., Any]:
    """Make a ``pallas_call`` that lowers to Triton; ``interpret=True`` runs anywhere, slowly.

    Args:
        kernel: body over refs. It may only use operations that lower on JAX 0.11.2 and 0.12 and that also run interpreted:
            clamp indices, read rows by plain ``ref[index, :]``, mask by ``where`` afterwards. The size of every block is a
            power of two.
        grid: programs per axis.
        out_shape: as in ``pallas_call``.
        name: the kernel's name, as profilers show it.
        num_warps: warps per program.
        num_stages: depth of Triton's software pipeline.
        interpret: run as plain JAX operations.
        **specs: ``in_specs``, ``out_specs``, ``input_output_aliases``. A ref without a block spec is the whole array. A
            block spec only offsets a pointer: no block is copied.

    Returns:
        A function of the operands. It raises ``NotImplementedError`` for arrays that `check_bytes` refuses, rather than
        compute with wrong offsets. The deprecation warning is raised while lowering. An eager call lowers inside this
        function, which silences the warning. Under an outer ``jit`` lowering comes later, and Python's default filters
        hide the warning.
    """
    call = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
        **specs,
    )

    def run(*operands: jax.Array) -> Any:
        check_bytes(*operands, *jax.tree.leaves(out_shape))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
            return call(*operands)

    return run
