"""What the layers of the decoder are made of: stored parameters, products with them, norms, projections and the MLP."""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels import axes
from pallas_kernels.formats.coded_matrix import CodedMatrix
from pallas_kernels.layer.add_norm import add_norm, rms_norm
from pallas_kernels.layer.coded_product import coded_product
from pallas_kernels.machine import current_machine

from ..sizes.architecture import Architecture

_INIT_STD = 0.02
_SMALL = 10_000_000  # the threshold of openxla/xla, xla/backends/gpu/transforms/dot_strength_reduction.cc
# The function on the gate of a gated MLP, by its name in config.json.
_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def initializer(path: str, config: Architecture) -> Callable[..., jax.Array]:
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


def stored(module: nn.Module, path: str, config: Architecture, shape: tuple[int, ...]) -> Any:
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


def product(
    x: jax.Array,
    kernel: Any,
    dense: Callable[[jax.Array, jax.Array], jax.Array],
    bias: jax.Array | None = None,
    **passing: Any,
) -> jax.Array:
    """Multiply ``x`` [B, T, K] with a kernel [K, ...], and add a bias: every product with a kernel of the layers.

    Args:
        x: in the dtype of computation.
        kernel: an array in any dtype, or its codes.
        dense: multiplies with a kernel in the dtype of ``x``.
        bias: of the shape of a result's row.
        **passing: what a product with codes does in passing, see `coded_product`.

    Returns:
        [B, T, ...] in the dtype of ``x``.
    """
    if isinstance(kernel, CodedMatrix):
        result = coded_product(x, kernel, **passing)
        return result if bias is None else result + bias.reshape(1, 1, *bias.shape)
    matrix = kernel.astype(x.dtype)

    def times(x: jax.Array) -> jax.Array:
        result = dense(x, matrix)
        return result if bias is None else result + bias.reshape(1, 1, *bias.shape)

    return multiplied(times, x, math.prod(matrix.shape[1:]))


def multiplied(product: Callable[[jax.Array], jax.Array], x: jax.Array, width: int) -> jax.Array:
    """Compute ``product(x)``, of two equal rows where one row alone would not be a matrix product.

    XLA for GPUs turns the product of one row and a matrix of less than ten million elements into a multiplication and a
    reduction. The multiplication rounds to the dtype of the row before anything is added. With jaxlib 0.11 it is a kernel of
    its own, which writes an array of the matrix's size: on two H200, the output projection of half of an 8B layer ([2048] by
    [2048, 4096]) took 21 us, and the output projection of the whole layer 10 us. For two equal rows XLA makes a matrix
    product, which also reads the matrix once.

    Args:
        product: from [B, T, K] to [B, T, ...]; it treats every row alike.
        x: [B, T, K].
        width: elements of a row of the product; the matrix has K * width elements.
    """
    rows, inner = x.shape[:2], x.shape[2]
    alone = rows == (1, 1) and x.dtype.itemsize == 2 and inner * width < _SMALL
    if not alone or not current_machine().has_kernels:
        return product(x)
    return product(jnp.broadcast_to(x, (1, 2, inner)))[:, :1]


def layer_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Normalise ``x`` [..., N] by mean and variance, times ``scale`` [N]: in float32, cast back to its dtype.

    Source: Ba et al., "Layer Normalization" (arXiv:1607.06450), without a bias.
    """
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


class Scale(nn.Module):
    """The factors [N] of a norm."""

    config: Architecture
    width: int

    @nn.compact
    def __call__(self) -> jax.Array:
        return stored(self, "norm/scale", self.config, (self.width,))


class Norm(nn.Module):
    """A norm over the last axis, computed in float32: by the root mean square, or LayerNorm."""

    config: Architecture

    @nn.compact
    def __call__(self, x: jax.Array, update: jax.Array | None = None) -> Any:
        """Normalise ``x`` [..., N]; with an ``update`` [..., N], return the sum of both and the normalised sum."""
        scale, eps = stored(self, "norm/scale", self.config, (x.shape[-1],)), self.config.rms_norm_eps
        if self.config.norm == "layer":
            total = x if update is None else x + update
            normed = layer_norm(total, scale, eps)
            return normed if update is None else (total, normed)
        return rms_norm(x, scale, eps) if update is None else add_norm(x, update, scale, eps)


class Dense(nn.Module):
    """A projection. Its stored kernel can have any dtype; its product is in the dtype of computation."""

    config: Architecture
    features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, **passing: Any) -> jax.Array:
        """Project ``x`` [B, T, K], in the dtype of computation, to [B, T, N]; ``passing`` as in `product`."""
        config, wide = self.config, (self.features,)
        kernel = stored(self, f"{self.name}/kernel", config, (x.shape[-1], *wide))
        bias = stored(self, f"{self.name}/bias", config, wide).astype(config.dtype) if self.use_bias else None
        return product(x, kernel, lambda x, kernel: jax.lax.dot_general(x, kernel, (((2,), (0,)), ((), ()))), bias, **passing)


class Kernel(nn.Module):
    """A stored kernel of any shape, or a bias that is no part of a projection."""

    config: Architecture
    shape: tuple[int, ...]
    leaf: str = "kernel"

    @nn.compact
    def __call__(self) -> Any:
        return stored(self, f"{self.name}/{self.leaf}", self.config, self.shape)


class MLP(nn.Module):
    """A gated MLP, whose projections gate and up are fused; or an MLP without a gate."""

    config: Architecture
    inner: int | None = None  # F; None: the model's

    @nn.compact
    def __call__(self, x: jax.Array, scale: jax.Array | None = None) -> jax.Array:
        """Apply the MLP to ``x`` [B, T, d]; return [B, T, d].

        With the ``scale`` [d] of a norm ``x`` is the stream before the norm, and the result is the stream after the MLP.
        """
        config, act = self.config, _ACTIVATIONS[self.config.activation]
        width = config.intermediate_size if self.inner is None else self.inner
        if not config.mlp_gate:
            inner = Dense(config, width, name="inner")(x.astype(config.dtype))
            return axes.total(Dense(config, config.hidden_size, name="down")(act(inner)))
        kernel = Kernel(config, (config.hidden_size, 2, width), name="gate_up")()
        if scale is not None:
            gated = coded_product(x, kernel, scale=scale, eps=config.rms_norm_eps, gated=True)
            return Dense(config, config.hidden_size, name="down")(gated, residual=x)
        both = product(x.astype(config.dtype), kernel, lambda x, kernel: jnp.einsum("btd,dgf->btgf", x, kernel))
        gated = act(both[..., 0, :]) * both[..., 1, :]
        return axes.total(Dense(config, config.hidden_size, name="down")(gated))
