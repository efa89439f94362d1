"""One cell: a variant at a size, checked against NumPy and timed."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.speed import SUM_VARIANTS, compiled, instructions, spans
from pallas_kernels import axes
from pallas_kernels.sums import SUMS

FORMS = ("chain", "loop")
# The parts are multiplied by these in turn before they are summed, over the number of devices. So the numbers neither grow
# nor vanish, and those of a sum differ from those of the sums before it: what is read too early or too late is seen.
_FACTORS = (2.0, 2.0, -0.25)
_TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}  # of the sum of random parts, relative
_TRAFFIC = 2 << 30  # bytes that a loop sums at most; large arrays are summed fewer times


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is measured.

    Attributes:
        variant: name of the variant.
        size: bytes of the array that each device has.
        dtype: of the array.
        form: "loop", a loop in a program with ``chain`` sums in its body; or "chain", the body alone.
        chain: sums that follow each other.
        iterations: of the loop.
        repeats: measurements.
    """

    variant: str
    size: int
    dtype: str
    form: str
    chain: int
    iterations: int
    repeats: int

    @property
    def turns(self) -> int:
        """How often the body runs."""
        return 1 if self.form == "chain" else max(1, min(self.iterations, _TRAFFIC // (self.size * self.sums)))

    @property
    def sums(self) -> int:
        """Sums in the body, so many that every factor has its turn equally often."""
        whole = len(_FACTORS)
        return max(whole, min(self.chain, _TRAFFIC // self.size) // whole * whole)


def measure(cell: Cell, mesh: Mesh) -> dict[str, Any]:
    """The figures of a cell.

    Args:
        cell: what is measured.
        mesh: its axis "model" has a power of two of devices, at least two.

    Returns:
        Seconds of a sum, without the products between them, and whether the result is right.

    Raises:
        NotImplementedError: the way cannot sum such arrays.
    """
    parts = _parts(cell, mesh)
    devices, one = parts.shape[0], jax.ShapeDtypeStruct(parts.shape[1:], parts.dtype)
    way = SUM_VARIANTS[cell.variant].sum
    if not SUMS[way].takes(one, devices):
        raise NotImplementedError(f"{way!r} cannot sum {one.size} {cell.dtype} over {devices} devices")
    factors = _everywhere(jnp.asarray(_FACTORS, cell.dtype) / devices, mesh)
    run = _program(cell, mesh, functools.partial(axes.total, axis=axes.MODEL))
    program, compile_seconds = compiled(run, parts, factors, sums=cell.variant)
    got = np.asarray(program(parts, factors))
    off = _error(got, np.asarray(parts), cell)
    whole, bare = spans(program, (parts, factors), cell.repeats), _bare(cell, mesh)
    count, rest = cell.sums * cell.turns, min(bare)
    median, least, most = ((x - rest) / count for x in (statistics.median(whole), min(whole), max(whole)))
    return {
        "value": median,
        "unit": "s",
        "least": least,
        "most": most,
        "with_products": statistics.median(whole) / count,
        "sums": count,
        "compile_seconds": compile_seconds,
        "relative_error": off if math.isfinite(off) else None,
        "passed": off <= _TOLERANCE[cell.dtype],
        "instructions": instructions(program),
    }


def elements(size: int, dtype: str) -> int:
    """Elements of an array of so many bytes."""
    return size // jnp.dtype(dtype).itemsize


def _parts(cell: Cell, mesh: Mesh) -> Array:
    """Random parts [devices, elements], one on each device along the axis that is summed."""
    shape = (mesh.shape[axes.MODEL], elements(cell.size, cell.dtype))
    made = np.random.default_rng(cell.size).standard_normal(shape, np.float32)
    return jax.device_put(jnp.asarray(made, cell.dtype), NamedSharding(mesh, PartitionSpec(axes.MODEL)))


def _everywhere(x: Array, mesh: Mesh) -> Array:
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec()))


def _program(cell: Cell, mesh: Mesh, total: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    """What a cell runs, with ``total`` as the sum: a function of the parts and of the factors."""

    def body(x: Array, factors: Array) -> Array:
        for number in range(cell.sums):
            # The barrier keeps products apart where nothing is summed between them.
            x = lax.optimization_barrier(total(x * factors[number % len(_FACTORS)]))
        return x

    def run(x: Array, factors: Array) -> Array:
        if cell.form == "chain":
            return body(x, factors)
        return lax.fori_loop(0, cell.turns, lambda _, x: body(x, factors), x)

    split = PartitionSpec(axes.MODEL)
    return jax.shard_map(run, mesh=mesh, in_specs=(split, PartitionSpec()), out_specs=split, check_vma=False)


@functools.cache
def _bare_program(cell: Cell, mesh: Mesh) -> tuple[Any, tuple[Array, Array]]:
    parts = _parts(cell, mesh)
    given = parts, _everywhere(jnp.ones((len(_FACTORS),), cell.dtype), mesh)
    program, _ = compiled(_program(cell, mesh, lambda x: x), *given)
    jax.block_until_ready(program(*given))
    return program, given


def _bare(cell: Cell, mesh: Mesh) -> list[float]:
    """Seconds of the same program without sums."""
    program, given = _bare_program(dataclasses.replace(cell, variant=""), mesh)
    return spans(program, given, cell.repeats)


def _error(got: np.ndarray, parts: np.ndarray, cell: Cell) -> float:
    """The relative error of the device that is furthest off."""
    scale = math.prod(_FACTORS[number % len(_FACTORS)] for number in range(cell.sums * cell.turns))
    want = parts.astype(np.float64).mean(axis=0) * scale
    return float(max(np.linalg.norm(mine.astype(np.float64) - want) for mine in got) / np.linalg.norm(want))
