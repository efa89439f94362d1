"""A base class of layers that answer as Full does, and measure something."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import Array

from kvjax.methods import Full
from kvjax.protocol.method import Cost, Inputs, LayerMethod, LayerSpec
from kvjax.protocol.typing import pytree


@pytree
class BesideFull(LayerMethod):
    """A layer that answers as Full. A subclass writes ``init`` and ``attend``; its state has Full's state as ``inner``."""

    def finish(self, state: Any, spec: LayerSpec) -> Any:
        return dataclasses.replace(state, inner=Full().finish(state.inner, spec))

    def chosen(self, state: Any, inputs: Inputs) -> Array:
        return Full().chosen(state.inner, inputs)

    def cost(self, state: Any, shared: Any) -> Cost:
        return Full().cost(state.inner, shared)

    def room(self, state: Any) -> Array | None:
        return Full().room(state.inner)
