"""How a module gets a parameter: in the dtype in which it is stored, or from its initial distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels.formats.coded_matrix import CodedMatrix

from .config import ModelConfig

_INIT_STD = 0.02


def initializer(path: str, config: ModelConfig) -> Callable[..., jax.Array]:
    """Return the initial distribution of the parameter at ``path`` ('a/b/c').

    Norm scales are ones, biases are zeros, and matrices are normal with standard deviation 0.02. The two projections that
    write into the residual stream are divided by sqrt(2L), so that the stream's variance does not grow with depth.
    """
    module, leaf = path.split("/")[-2:]
    if leaf == "scale":
        return nn.initializers.ones
    if leaf == "bias":
        return nn.initializers.zeros
    shrink = (2 * config.num_layers) ** -0.5 if module in ("out", "down") else 1.0
    return nn.initializers.normal(stddev=_INIT_STD * shrink)


def stored(module: nn.Module, path: str, config: ModelConfig, shape: tuple[int, ...]) -> Any:
    """Return the parameter of a module that the last part of ``path`` names, in the dtype in which it is stored.

    ``nn.Module.param`` checks a parameter's shape by tracing its `initializer`, which takes half the time of tracing a model.
    """
    name = path.split("/")[-1]
    if module.has_variable("params", name):
        value = module.get_variable("params", name)
        if shape_of(name, value) == shape:
            return value
    return module.param(name, initializer(path, config), shape, config.dtype)  # also raises the errors of wrong parameters


def shape_of(path: str, value: Any) -> tuple[int, ...]:
    """Return the shape that the parameter at ``path`` has as an array."""
    if not isinstance(value, CodedMatrix):
        return jnp.shape(value)
    return (*value.lead, value.width) if path.endswith("embedding") else (value.width, *value.lead)
