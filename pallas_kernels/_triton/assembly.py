"""Inline assembly in kernels, which can use shared memory; Pallas' Triton back end cannot index it otherwise.

Operands are values, never pointers: a pointer lacks the offset of its block, and so that of a row under ``vmap``. Compilers
take assembly to have no side effects. They keep two pieces in order only where one has a result of the other as an operand.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plt


def assembly(program: str, args: list[Array], pack: int = 1, result: Any = jnp.int32) -> Array:
    """Run PTX on ``pack`` neighbouring elements at a time.

    Args:
        program: its results are the registers from $0 on, ``pack`` of them if they are words; the operands follow, each in as
            many registers as its elements fill.
        args: arrays of one shape, of bytes, int16, int32 or float32, signed or not; four bytes or two int16 share a register.
        pack: elements at a time, at least 4 if there are bytes, and 2 if there are int16.
        result: dtype of the result, int16, int32 or float32; two int16 share a register.

    Returns:
        An array of that dtype in the shape of ``args``.
    """
    kinds = [("f" if jnp.issubdtype(x.dtype, jnp.floating) else "r", max(1, pack * x.dtype.itemsize // 4)) for x in args]
    made_in = max(1, pack * jnp.dtype(result).itemsize // 4)
    out = "=&f" if jnp.issubdtype(result, jnp.floating) else "=&r"
    (made,) = plt.elementwise_inline_asm(
        program,
        args=args,
        constraints=",".join([out] * made_in + [kind for kind, registers in kinds for _ in range(registers)]),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, result)],
    )
    return made
