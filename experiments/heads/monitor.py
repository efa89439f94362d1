"""A layer that runs as another method's layer does, and keeps measurements beside its state."""

import dataclasses
from typing import Any

from jax import Array

from kvjax.protocol.method import Cost, Inputs, LayerMethod, LayerSpec
from kvjax.protocol.typing import pytree
from kvjax.wrappers.compose import passes


@pytree
class MonitorLayer(LayerMethod):
    """A layer around ``inner``. Its state has the field ``inner`` and the measurements; classes add `init` and `attend`.

    Its final classes answer as ``inner`` does: ``@answers("inner")``.
    """

    inner: LayerMethod

    max_tokens = passes("inner", LayerMethod.max_tokens)
    rework = passes("inner", LayerMethod.rework)

    def finish(self, state: Any, spec: LayerSpec) -> Any:
        return dataclasses.replace(state, inner=self.inner.finish(state.inner, spec))

    def chosen(self, state: Any, inputs: Inputs) -> Array:
        return self.inner.chosen(state.inner, inputs)

    def cost(self, state: Any, shared: Any) -> Cost:
        return self.inner.cost(state.inner, shared)

    def room(self, state: Any) -> Array | None:
        return self.inner.room(state.inner)

    def signal(self, state: Any) -> Any:
        return self.inner.signal(state.inner)

    def with_signal(self, state: Any, signal: Any) -> Any:
        return dataclasses.replace(state, inner=self.inner.with_signal(state.inner, signal))

    def due(self, state: Any) -> Array | None:
        return self.inner.due(state.inner)

    def excerpt(self, state: Any) -> Any:
        return self.inner.excerpt(state.inner)

    def settle(self, state: Any, made: Any) -> Any:
        return dataclasses.replace(state, inner=self.inner.settle(state.inner, made))
