"""Weights that stay in 8 or 4 bits in memory: how they are rounded, loaded and taken from GGUF files.

A parameter with codes is a `pallas_kernels.formats.coded_matrix.CodedMatrix` in the place of an array. Its rows are what the
parameter's product sums over: a kernel [K, N] becomes a matrix [N, K], gate and up [K, 2, F] become [2, F, K], and a table
[V, d] stays. Norms and biases stay floating-point numbers.
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array, lax

from pallas_kernels.formats.coded_matrix import CHUNK, GROUP, CodedMatrix, decoded, packed

from ..sizes.architecture import Architecture

_LARGEST = 127
_TOP = 15  # the largest code of 4 bits
_STEPS = (15, 14, 13, 12, 11, 10, 9, 8, 7)  # steps between a group's smallest and largest number that are tried
_CUTS = (0.95, 0.9, 0.85)  # parts of the range that 15 steps are tried for, so that the ends are cut
_AT_ONCE = 1 << 20  # numbers that are rounded at once; more of them would fall out of the caches of a CPU
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


def coded(path: str, param: Any, weight_dtype: str) -> Any:
    """Round a parameter of floats on the default device to a `CodedMatrix`; norms and biases stay arrays."""
    bits = bits_of(path, weight_dtype)
    return jnp.asarray(param) if bits is None else rounded(jnp.asarray(by_rows(path, param)), bits)


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
    shape: Any = jax.ShapeDtypeStruct  # stands in the place of an array
    lead, width = (leaf.shape[:-1], leaf.shape[-1]) if path.endswith("embedding") else (leaf.shape[1:], leaf.shape[0])
    if bits == 8 or width % CHUNK:
        return CodedMatrix(codes=shape((*lead, width), jnp.int8), scales=shape((*lead, 1), jnp.float32))
    group = shape((*lead, width // GROUP), jnp.float16)
    return CodedMatrix(codes=shape((*lead, width // 2), jnp.uint8), scales=group, minima=group)


def random_codes(shapes: CodedMatrix, key: Array) -> CodedMatrix:
    """Draw codes that are all equally likely; the numbers have a standard deviation of about 0.02."""
    top = {8: 255, 4: 15}[shapes.bits]
    scale = _DEVIATION * 12**0.5 / top
    codes = jax.random.bits(key, shapes.codes.shape, jnp.uint8)
    scales = jnp.full(shapes.scales.shape, scale, shapes.scales.dtype)
    minima = None if shapes.minima is None else jnp.full_like(scales, -scale * top / 2)
    return CodedMatrix(codes=lax.bitcast_convert_type(codes, shapes.codes.dtype), scales=scales, minima=minima)


def rounded(rows: Array, bits: int) -> CodedMatrix:
    """Round a matrix [N, K] of floats, where N may be several axes.

    8 bits have one scale for each row. 4 bits have a scale and a minimum for each group of 32 numbers, chosen so that the sum
    of the squared errors is the least of some candidates; numbers that lie on 16 levels, as in a file of 4 bits, are found
    again. A matrix whose rows are no whole number of chunks of 64 gets 8 bits.
    """
    return _rounded(rows, 8 if rows.shape[-1] % CHUNK else bits)


@functools.partial(jax.jit, static_argnames="bits")
def _rounded(rows: Array, bits: int) -> CodedMatrix:
    flat = rows.reshape(-1, rows.shape[-1])
    size = min(max(1, _AT_ONCE // flat.shape[1]), len(flat))
    codes = lax.map({8: _by_row, 4: _by_group}[bits], flat, batch_size=size)
    return jax.tree.map(lambda x: x.reshape(*rows.shape[:-1], -1), codes)


def _by_row(row: Array) -> CodedMatrix:
    wide = row.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide)) / _LARGEST
    codes = jnp.clip(jnp.round(wide / jnp.where(scale > 0, scale, 1)), -_LARGEST, _LARGEST).astype(jnp.int8)
    return CodedMatrix(codes=codes, scales=scale[None])


def _by_group(row: Array) -> CodedMatrix:
    x = row.astype(jnp.float32).reshape(-1, GROUP)
    low, high = x.min(axis=1), x.max(axis=1)
    middle = (low + high) / 2
    scales = [(high - low) / steps for steps in _STEPS] + [(high - low) * cut / _TOP for cut in _CUTS]
    lows = [low] * len(_STEPS) + [middle - scale * _TOP / 2 for scale in scales[len(_STEPS) :]]

    def attempt(best: tuple[Array, ...], start: tuple[Array, Array]) -> tuple[tuple[Array, ...], None]:
        first = _judged(x, *start)
        second = _judged(x, *_fitted(x, first[1]))
        for trial in (first, second):
            better = trial[0] < best[0]
            chosen = [better if y.ndim == 1 else better[:, None] for y in trial]
            best = tuple(jnp.where(*each) for each in zip(chosen, trial, best, strict=True))
        return best, None

    none = jnp.full_like(low, jnp.inf), jnp.zeros_like(x), low, low
    (_, codes, scale, least), _ = lax.scan(attempt, none, (jnp.stack(scales), jnp.stack(lows)))
    return CodedMatrix(
        codes=packed(codes.reshape(-1).astype(jnp.uint8)), scales=scale.astype(jnp.float16), minima=least.astype(jnp.float16)
    )


def _judged(x: Array, scale: Array, least: Array) -> tuple[Array, Array, Array, Array]:
    """Round groups [G, 32] with the scale and the minimum that float16 can hold: squared error, codes, scale, minimum."""
    scale, least = (lax.reduce_precision(y, exponent_bits=8, mantissa_bits=10) for y in (scale, least))
    codes = jnp.clip(jnp.round((x - least[:, None]) / jnp.where(scale > 0, scale, 1)[:, None]), 0, _TOP)
    error = x - codes * scale[:, None] - least[:, None]
    return jnp.sum(error * error, axis=1), codes, scale, least


def _fitted(x: Array, codes: Array) -> tuple[Array, Array]:
    """Fit the scale and the minimum to codes, by least squares."""
    mean, middle = codes.mean(axis=1), x.mean(axis=1)
    away = codes - mean[:, None]
    spread = jnp.sum(away * away, axis=1)
    scale = jnp.sum(away * (x - middle[:, None]), axis=1) / jnp.where(spread > 0, spread, 1)
    return scale, middle - scale * mean
