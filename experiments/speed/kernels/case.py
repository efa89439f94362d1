"""A case of `experiments.speed.kernels`: an operation at one of the shapes that its folder lists, with random arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

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
        sizes: the shape, which draws the arguments.
        reference: makes the result to compare with; None takes "xla".
        others: implementations that are not in the operation's table, by name.
    """

    operation: Operation
    function: Run
    sizes: Shape
    reference: Run | None = None
    others: Mapping[str, Run] = dataclasses.field(default_factory=dict)

    @property
    def shape(self) -> str:
        """The shape in words, unique among the operation's cases."""
        return self.sizes.name

    def make(self) -> tuple[jax.Array, dict[str, Any]]:
        """Draw the arguments: a float array that a loop may change between runs, and the rest by name."""
        arrays = self.sizes.draw(jax.random.key(0))
        chained = self.sizes.chained
        return (jnp.zeros((1,), jnp.float32) if chained is None else arrays.pop(chained)), arrays

    def run(self, first: jax.Array, arrays: Mapping[str, Any], **how: Any) -> Any:
        """Call the operation with what `make` returns, and with ``implementation``."""
        chained = {} if self.sizes.chained is None else {self.sizes.chained: first}
        return self.function(**chained, **arrays, **self.sizes.options, **how)

    def expected(self, first: jax.Array, arrays: Mapping[str, Any]) -> Any:
        """Compute the result to compare with, from what `make` returns."""
        if self.reference is not None:
            return self.sizes.defined(self.reference(first, arrays))
        if self.sizes.float32:
            first, arrays = jax.tree.map(_exact, (first, arrays), is_leaf=lambda x: isinstance(x, Quantised))
        return self.sizes.defined(jax.jit(lambda *given: self.run(*given, implementation="xla"))(first, arrays))


def _exact(x: Any) -> Any:
    """Convert floats, and the values that codes of 8 bits stand for, to float32."""
    x = whole(x) if isinstance(x, Quantised) else x
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
