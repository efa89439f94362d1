"""Parameters in 8 or 4 bits: which of a model's are, and how they are made from and turned into floating-point numbers."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array, lax

from pallas_kernels.formats.coded_matrix import CHUNK, GROUP, CodedMatrix, decoded

from ...sizes.architecture import Architecture
from .rounding import rounded

_DEVIATION = 0.02  # of random numbers
BITS = {"int8": 8, "int4": 4}  # by the names of ``weight_dtype``


def check_weight_dtype(weight_dtype: str | None, config: Architecture | None = None) -> None:
    """Refuse an unknown name, and codes for a model with experts or latent attention."""
    if weight_dtype is not None and weight_dtype not in BITS:
        raise ValueError(f"weight_dtype must be one of {', '.join(BITS)} or None, got {weight_dtype!r}")
    if weight_dtype is not None and config is not None and config.experts is not None:
        raise ValueError(f"weight_dtype={weight_dtype!r} needs a model without experts, got {config.experts}")
    if weight_dtype is not None and config is not None and config.latent is not None:
        raise ValueError(f"weight_dtype={weight_dtype!r} needs a model without latent attention, got {config.latent}")


def bits_of(path: str, weight_dtype: str) -> int | None:
    """Return the bits of the parameter at ``path`` ('a/b/c'): None for norms and biases, 8 for the tables of tokens."""
    kind = path.split("/")[-1]
    return {"kernel": BITS[weight_dtype], "embedding": 8}.get(kind)


def by_rows(path: str, param: Any) -> Any:
    """Move the axis that a product sums over to the end: [K, ...] to [..., K]; a table [V, d] stays."""
    return param if path.endswith("embedding") else (np if isinstance(param, np.ndarray) else jnp).moveaxis(param, 0, -1)


def coded(path: str, param: Any, weight_dtype: str) -> Array | CodedMatrix:
    """Round a parameter of floats on the default device; norms and biases stay."""
    bits = bits_of(path, weight_dtype)
    return jnp.asarray(param) if bits is None else rounded(jnp.asarray(by_rows(path, param)), bits)


def coded_kernel(path: str, param: Any, weight_dtype: str) -> CodedMatrix:
    """Round a kernel or a table as `coded` does."""
    return cast("CodedMatrix", coded(path, param, weight_dtype))


def in_floats(path: str, param: Any, dtype: Any) -> Any:
    """Return a parameter as an array of the model's shape: decoded in ``dtype``, or as it is."""
    if not isinstance(param, CodedMatrix):
        return param
    numbers = decoded(param).astype(dtype)
    return numbers if path.endswith("embedding") else jnp.moveaxis(numbers, -1, 0)


def code_params(params: dict[str, Any], weight_dtype: str) -> dict[str, Any]:
    """Round the parameters of a model, one after the other; each is taken out of ``params``, so that its memory is free."""
    flat = cast(dict[str, Any], flatten_dict(params, sep="/"))
    params.clear()
    return unflatten_dict({path: coded(path, flat.pop(path), weight_dtype) for path in list(flat)}, sep="/")


def coded_shapes(shapes: dict[str, Any], weight_dtype: str) -> dict[str, Any]:
    """Replace the shapes of a model's parameters (`models.param_shapes`) by the shapes of their codes."""
    flat = cast(dict[str, Any], flatten_dict(shapes, sep="/"))
    return unflatten_dict({path: _coded_shape(path, leaf, weight_dtype) for path, leaf in flat.items()}, sep="/")


def _coded_shape(path: str, leaf: jax.ShapeDtypeStruct, weight_dtype: str) -> Any:
    bits = bits_of(path, weight_dtype)
    if bits is None:
        return leaf
    lead, width = (leaf.shape[:-1], leaf.shape[-1]) if path.endswith("embedding") else (leaf.shape[1:], leaf.shape[0])
    if bits == 8 or width % CHUNK:
        return CodedMatrix(codes=_shape((*lead, width), jnp.int8), scales=_shape((*lead, 1), jnp.float32))
    group = _shape((*lead, width // GROUP), jnp.float16)
    return CodedMatrix(codes=_shape((*lead, width // 2), jnp.uint8), scales=group, minima=group)


def _shape(shape: tuple[int, ...], dtype: Any) -> Any:
    """Make a shape that stands in the place of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def random_codes(shapes: CodedMatrix, key: Array) -> CodedMatrix:
    """Draw codes that are all equally likely; the numbers have a standard deviation of about 0.02."""
    top = {8: 255, 4: 15}[shapes.bits]
    scale = _DEVIATION * 12**0.5 / top
    codes = jax.random.bits(key, shapes.codes.shape, jnp.uint8)
    scales = jnp.full(shapes.scales.shape, scale, shapes.scales.dtype)
    minima = None if shapes.minima is None else jnp.full_like(scales, -scale * top / 2)
    return CodedMatrix(codes=lax.bitcast_convert_type(codes, shapes.codes.dtype), scales=scales, minima=minima)
