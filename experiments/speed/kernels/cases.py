"""The cases of `experiments.speed.kernels`: every operation whose folder in `pallas_kernels` has timed shapes."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import pallas_kernels
from experiments.speed.kernels.case import Case
from pallas_kernels.formats.shapes import Shape


def cases(tiny: bool = False, wide: bool = False) -> list[Case]:
    """Find all cases.

    Args:
        tiny: make them in sizes that a test can run.
        wide: leave the channels of a head as they are: kernels for TPUs take whole tiles only.
    """
    places = [f"pallas_kernels.{room}.{name}" for room, name in pallas_kernels.operations()]

    def sized(shape: Shape) -> Shape:
        return dataclasses.replace(shape.tiny(), **({"dim": shape.dim} if wide else {})) if tiny else shape

    return [_case(place, sized(shape)) for place in places for shape in _shapes(place)]


def _shapes(place: str) -> tuple[Shape, ...]:
    """Return the timed shapes of the operation in the package ``place``; none if it has no such file."""
    if importlib.util.find_spec(f"{place}.timed") is None:
        return ()
    return importlib.import_module(f"{place}.timed").SHAPES


def _case(place: str, sizes: Shape) -> Case:
    module, name = importlib.import_module(place), place.rpartition(".")[2]
    operation, function = getattr(module, name.upper()), getattr(module, name)
    return Case(operation, function, sizes, **_rivals(sizes) if name == "kth_select" else {})


def _rivals(sizes: Shape) -> Mapping[str, Any]:
    """Return what `kth_select` is compared with: a stable sort as the reference, and JAX's own operation."""
    best = sizes.options["budget"]
    others = {"lax.top_k": functools.partial(_top_k, best=best)}
    return {"reference": functools.partial(_sorted_best, best=best), "others": others}


def _sorted_best(score: Array, _: Mapping[str, Any], *, best: int) -> tuple[np.ndarray, np.ndarray]:
    """Select by a stable sort of whole rows: ascending lists, and the number of their entries."""
    order = np.argsort(-np.asarray(score), axis=-1, kind="stable")[..., :best]
    return np.sort(order, axis=-1).astype(np.int32), np.full(score.shape[:2], best, np.int32)


def _top_k(score: Array, _: Mapping[str, Any], *, best: int) -> tuple[Array, Array]:
    _, index = lax.top_k(score, best)
    return jnp.sort(index, axis=-1), jnp.full(score.shape[:2], best, jnp.int32)
