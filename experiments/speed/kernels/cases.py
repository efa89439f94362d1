"""The cases of `experiments.speed.kernels`: each operation with timed shapes at each of them, with random arguments."""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import pallas_kernels
from experiments.speed.kernels import untimed
from pallas_kernels.dispatch import Operation
from pallas_kernels.formats.quantised import Quantised, whole
from pallas_kernels.formats.shapes import Shape

Run = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation at a shape.

    Attributes:
        operation: the operation, all of whose implementations are compared.
        function: the public function of the operation.
        shape: the shape, which draws the arguments.
    """

    operation: Operation
    function: Run
    shape: Shape

    def make(self, random: Any = jax.random) -> tuple[Array, dict[str, Any]]:
        """Draw the arguments, by `jax.random`: a float array that a loop may change between runs, and the rest by name."""
        arrays = self.shape.draw(random.key(0), random)
        chained = self.shape.timed.chained
        return (jnp.zeros((1,), jnp.float32) if chained is None else arrays.pop(chained)), arrays

    def run(self, first: Array, arrays: Mapping[str, Any], **how: Any) -> Any:
        """Call the operation with what `make` returns, and with ``implementation``."""
        chained = self.shape.timed.chained
        return self.function(**({} if chained is None else {chained: first}), **arrays, **self.shape.options, **how)

    def expected(self, first: Array, arrays: Mapping[str, Any]) -> Any:
        """Compute the result to compare with, by "xla", from what `make` returns."""
        return jax.jit(self.reference)(first, arrays)

    def reference(self, first: Array, arrays: Mapping[str, Any]) -> Any:
        """Compute what `expected` computes, inside of another program."""
        if self.shape.timed.float32:
            first, arrays = jax.tree.map(_exact, (first, arrays), is_leaf=lambda x: isinstance(x, Quantised))
        return self.defined(self.run(first, arrays, implementation="xla"))

    def defined(self, result: Any) -> Any:
        """Return the part of a result that all implementations agree on."""
        return self.shape.timed.defined(result, self.shape.sizes)


def cases(tiny: bool = False, wide: bool = False) -> list[Case]:
    """Find all cases.

    Args:
        tiny: make them in sizes that a test can run.
        wide: leave the channels of a head as they are: kernels for TPUs take whole tiles only.
    """
    places = [f"pallas_kernels.{room}.{name}" for room, name in pallas_kernels.operations()]
    declared = [place for place in places if importlib.util.find_spec(f"{place}.timed") is not None]
    return [
        _case(place, shape)
        for place in declared
        for shape in importlib.import_module(f"{place}.timed").TIMED.listed(tiny, wide)
    ]


def small_cases() -> list[Case]:
    """Make one case of every operation, in a size that a test can run; heads have all of their channels."""
    made = []
    for room, name in pallas_kernels.operations():
        place = f"pallas_kernels.{room}.{name}"
        timed = importlib.util.find_spec(f"{place}.timed") and importlib.import_module(f"{place}.timed").TIMED
        made.append(_case(place, timed.listed(tiny=True, wide=True)[0] if timed else untimed.SHAPES[name].at()))
    return made


def _case(place: str, shape: Shape) -> Case:
    module, name = importlib.import_module(place), place.rpartition(".")[2]
    operation, function = getattr(module, name.upper()), getattr(module, name)
    return Case(operation, function, shape)


def _exact(x: Any) -> Any:
    """Convert floats, and the values that codes of 8 bits stand for, to float32."""
    x = whole(x) if isinstance(x, Quantised) else x
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
