"""Pieces of PTX that all threads of a warpgroup run, where instructions are counted and loops are of single threads."""

import jax
import jax.numpy as jnp

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.pallas import mgpu, plgpu


def run(lines: list[str], refs=(), numbers=(), results=()) -> list[jax.Array]:
    """Run instructions of PTX in all threads of a warpgroup.

    Args:
        lines: instructions; $0, $1, ... are the results, then the addresses of ``refs``, then the numbers.
        refs: arrays in global or shared memory.
        numbers: int32 or float32, scalars or [128 * N]; for N numbers of a thread the instructions run N times.
        results: dtypes of arrays [128 * N]; None is an int32 that is the same in all threads.
    """
    count = max((x.shape[0] // t.THREADS for x in numbers if x.ndim), default=1)
    floats = [x is not None and jnp.issubdtype(x, jnp.floating) for x in results]
    splat = t.splat()
    kinds = [t.own(x.shape[0] // t.THREADS) if x.ndim else splat for x in numbers]
    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=splat)
    arrays = [x and plgpu.ShapeDtypeStruct((count * t.THREADS,), x, layout=t.own(count)) for x in results]
    out = tuple(scalar if x is None else x for x in arrays) or None

    @plgpu.inline_mgpu(arg_types=((t.ref(),) * len(refs), tuple(kinds)), return_type=out)
    def emit(ctx, given, mine):
        columns = [
            t.numbers_of(x, jnp.issubdtype(y.dtype, jnp.floating)) if y.ndim else [t.number(t.value(x))]
            for x, y in zip(mine, numbers, strict=True)
        ]
        types, found = tuple(t.f32() if x else t.i32() for x in floats) or None, []
        for i in range(count):
            operands = *map(t.address, given), *(t.value(x[i % len(x)]) for x in columns)
            how = {"result_types": types, "has_side_effects": True, "convergent": True}
            found.append(mgpu.utils.inline_ptx("{" + " ".join(lines) + "}", *operands, **how))
        if out is None:
            return None
        columns = [
            [t.number(x, None if y else True) for x in column]
            for column, y in zip(zip(*found, strict=True), floats, strict=True)
        ]
        return tuple(x[0] if y is None else t.made_of(x, z) for x, y, z in zip(columns, results, floats, strict=True))

    return list(emit(tuple(refs), tuple(numbers)) or ())
