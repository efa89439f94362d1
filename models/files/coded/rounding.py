"""Rounding of floating-point matrices to codes of 8 or 4 bits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.formats.coded_matrix import CHUNK, GROUP, CodedMatrix, packed

_LARGEST = 127
_TOP = 15  # the largest code of 4 bits
_STEPS = (15, 14, 13, 12, 11, 10, 9, 8, 7)  # steps between a group's smallest and largest number that are tried
_CUTS = (0.95, 0.9, 0.85)  # parts of the range that 15 steps are tried for, so that the ends are cut
_AT_ONCE = 1 << 20  # numbers that are rounded at once; more of them would fall out of the caches of a CPU


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
