"""All operations by name, with arguments of any sizes: what the laws of all operations start from."""

import dataclasses
import functools
import importlib
import importlib.util
from unittest import mock

import jax
import pytest

import pallas_kernels
from experiments.speed.kernels import untimed
from pallas_kernels.dispatch import Operation
from pallas_kernels.formats.shapes import LAYER

PLACES = {name: f"pallas_kernels.{room}.{name}" for room, name in pallas_kernels.operations()}
BESIDE = {"estimates": "rerank", "kth_select_mask": "kth_select"}  # public functions beside that of an operation's name
every_operation = pytest.mark.parametrize("name", sorted(PLACES))


def public(name):
    """Import the public function of an operation, or one of `BESIDE`."""
    return getattr(importlib.import_module(PLACES[BESIDE.get(name, name)]), name)


def table(name):
    return getattr(importlib.import_module(PLACES[name]), name.upper())


def timed(name):
    """Return the declaration of an operation's timed shapes, or None."""
    place = f"{PLACES[name]}.timed"
    return importlib.import_module(place).TIMED if importlib.util.find_spec(place) else None


def small(name, wide=False, **sizes):
    """Return a small shape of an operation, in which these sizes differ; ``wide``: heads have all of their channels."""
    shape = untimed.SHAPES[name].at() if timed(name) is None else timed(name).listed(tiny=True, wide=wide)[0]
    return shape.timed.at(**{**vars(shape.sizes), **sizes})


def sized(name, **sizes):
    """Return a shape of two heads with these sizes.

    What is no size of the operation is an argument beside the declared ones, or in place of one: a fill, or an option.
    """
    declared = untimed.SHAPES.get(name) or timed(name)
    known = {*LAYER, *declared.sizes, *(x for shape in declared.shapes for x in shape)}
    more = {x: sizes.pop(x) for x in [*sizes] if x not in known}
    fills = {x: value for x, value in more.items() if callable(value)}
    options = {x: value for x, value in more.items() if x not in fills}
    arrays = {x: fill for x, fill in declared.arrays.items() if x not in options} | fills
    plain = declared.options
    return dataclasses.replace(declared, arrays=arrays, options=lambda n: plain(n) | options).at(**{"H": 2, **sizes})


def arguments(shape):
    """Return the shapes and dtypes of the arrays of a shape by name."""
    return jax.eval_shape(shape.draw, jax.random.key(0))


def named(value):
    """A text that is the same in every worker: a function's has its address."""
    if isinstance(value, dict):
        return ",".join(f"{key}={named(x)}" for key, x in value.items())
    return getattr(value, "__name__", "partial") if callable(value) else str(value)


class Chosen(Exception):
    """Ends a call where an implementation would run."""


def chooser(name, **sizes):
    """Return a function that names the implementation that a call of these sizes takes; none is run or traced."""
    shape = sized(name, **sizes)
    arrays = arguments(shape)

    def stop(self, *args, **kwargs):
        raise Chosen(self.resolve(*args, **kwargs))

    def chosen(platform=None, implementation=None):
        run = functools.partial(public(name), **shape.options, platform=platform, implementation=implementation)
        with mock.patch.object(Operation, "run", stop), pytest.raises(Chosen) as caught:
            jax.eval_shape(run, **arrays)
        return caught.value.args[0]

    return chosen


def choose(name, *, platform=None, implementation=None, **sizes):
    """Return the implementation that one call takes."""
    return chooser(name, **sizes)(platform, implementation)
