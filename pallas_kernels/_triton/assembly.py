"""Inline assembly in kernels, which can use shared memory; Pallas' Triton back end cannot index it otherwise.

Operands are values, never pointers: a pointer lacks the offset of its block, and so the offset of a row under ``vmap``.
Compilers assume that assembly has no side effects. They keep two pieces in order only where one has a result of the other
as an operand.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels._triton.pallas import plt


def assembly(program: str, args: list[Array], pack: int = 1, result: Any = jnp.int32) -> Array:
    """Run PTX on ``pack`` neighbouring elements at a time.

    Args:
        program: its results are the first registers, $0 and so on, as many as they fill; the operands follow in the same way.
        args: arrays of one shape, of bytes, 16 bits, int32 or float32; a register has 32 bits of neighbouring elements.
        pack: elements at a time: enough to fill a register of every array, or a multiple of that number.
        result: dtype of the result, of 16 or 32 bits.

    Returns:
        An array of that dtype in the shape of ``args``.
    """

    def registers(dtype: Any) -> list[str]:
        return ["f" if jnp.dtype(dtype) == jnp.float32 else "r"] * max(1, pack * jnp.dtype(dtype).itemsize // 4)

    outs, ins = [f"=&{kind}" for kind in registers(result)], [kind for x in args for kind in registers(x.dtype)]
    (made,) = plt.elementwise_inline_asm(
        program,
        args=args,
        constraints=",".join(outs + ins),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, result)],
    )
    return made


def kept(values: Array, where: Array, interpret: bool) -> Array:
    """Zero the rows of ``values`` [N, D] where ``where`` bool [N] is false, even rows of NaN.

    Two values of 16 bits share a register, and one instruction clears both; to select them one by one takes three each.
    """
    if interpret or values.dtype.itemsize != 2:
        return jnp.where(where[:, None], values, 0)
    mask = jnp.broadcast_to(jnp.where(where, -1, 0).astype(jnp.int16)[:, None], values.shape)
    return assembly("and.b32 $0, $1, $2;", [values, mask], pack=2, result=values.dtype)
