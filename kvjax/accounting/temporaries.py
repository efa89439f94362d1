"""Estimates the bytes of arrays that exist at once while a traced function runs; nothing is compiled.

XLA computes an elementwise operation, a broadcast or a slice inside of the operation that reads the result. Such a result
takes memory only where an operation reads it that is of another kind, such as a product, a sort, a loop or a kernel. What is
written in place takes the memory of what it replaces. Compilers do more, so this is an estimate:
`tests/kvjax/accounting/test_memory.py` compares it with compiled programs.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from pallas_kernels.machine import current_machine

# Operations whose results are computed where they are read.
_FUSED = frozenset(
    "abs add add_any and asin atan2 bitcast_convert_type broadcast_in_dim cbrt ceil clamp concatenate convert_element_type "
    "copy cos div dynamic_slice eq erf exp exp2 expm1 floor gather ge gt integer_pow iota is_finite le log log1p logistic "
    "lt max min mul ne neg nextafter not or pad population_count pow real reduce_precision rem rev round rsqrt select_n "
    "shift_left shift_right_arithmetic shift_right_logical sign sin slice split sqrt square stop_gradient sub tan tanh "
    "transpose xor".split()
)
_IN_PLACE = frozenset("dynamic_update_slice scatter scatter-add scatter-max scatter-min scatter-mul".split())
_SAME = frozenset("expand_dims optimization_barrier reshape squeeze".split())  # whose results are their operands
_LOOPS = frozenset(["while", "scan", "cond"])
_PASSING = frozenset([*_LOOPS, "device_put"])  # a result may take the place of an operand


@dataclasses.dataclass
class _Step:
    """An operation of a flat program, in which arrays are numbers."""

    name: str
    inputs: list[int]
    outputs: list[int]
    fused: bool
    reads: bool  # whether its operands must be in memory
    inner: int = 0  # bytes inside of a loop


class _Program:
    """The steps of a function, in which what is called stands in place of the call; and the bytes of each array."""

    def __init__(self, jaxpr: core.Jaxpr) -> None:
        self.steps: list[_Step] = []
        self.sizes: list[int] = []
        self.arguments = [self._array(x.aval) for x in jaxpr.invars]
        self.results = self._add(jaxpr, self.arguments)

    def _array(self, aval: Any) -> int:
        here = getattr(aval, "memory_space", None) != jax.memory.Space.Host and hasattr(aval, "dtype")
        self.sizes.append(aval.size * aval.dtype.itemsize if here else 0)
        return len(self.sizes) - 1

    def _add(self, jaxpr: core.Jaxpr, given: Sequence[int]) -> list[int]:
        known: dict[Any, int] = dict(zip(jaxpr.invars, given, strict=True))
        known |= {x: self._array(x.aval) for x in jaxpr.constvars}

        def read(x: Any) -> int:
            return self._array(x.aval) if isinstance(x, core.Literal) else known[x]

        for eqn in jaxpr.eqns:
            inputs, name, inner = [read(x) for x in eqn.invars], eqn.primitive.name, list(_inside(eqn.params))
            if name in _SAME or (name == "transpose" and _keeps_order(eqn)):
                outputs = inputs
            elif name not in _LOOPS and len(inner) == 1 and len(inner[0].invars) == len(inputs) and name != "pallas_call":
                outputs = self._add(inner[0], inputs)
            else:
                outputs = [self._array(x.aval) for x in eqn.outvars]
                within = max((_peak(one) + _slices(eqn, one) for one in inner), default=0) if name in _LOOPS else 0
                self.steps.append(_Step(name, inputs, outputs, name in _FUSED, not _reduces_in_passing(eqn), within))
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [read(x) for x in jaxpr.outvars]


def _keeps_order(eqn: Any) -> bool:
    """Tell whether a transpose moves axes of one element alone, which only a CPU copies before a loop reads them."""
    if current_machine().platform == "cpu":
        return False
    shape = eqn.invars[0].aval.shape
    moved = [axis for axis in eqn.params["permutation"] if shape[axis] > 1]
    return moved == sorted(moved)


def _inside(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    """List the programs inside of an operation."""
    for value in params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(one, "jaxpr", one)
            if isinstance(inner, core.Jaxpr):
                yield inner


def _slices(eqn: Any, body: Any) -> int:
    """Count the bytes of what a scan slices out of its operands for one turn."""
    if eqn.primitive.name != "scan":
        return 0
    pairs = zip(eqn.invars, body.invars, strict=True)
    return sum(x.aval.size * x.aval.dtype.itemsize for given, x in pairs if given.aval.shape != x.aval.shape)


def _reduces_in_passing(eqn: Any) -> bool:
    """Tell whether an operation reduces what it computes itself: on a CPU only over the last axes."""
    if not eqn.primitive.name.startswith(("reduce_", "argm")) or "axes" not in eqn.params:
        return False
    last = eqn.invars[0].aval.ndim - 1
    return current_machine().platform != "cpu" or last in eqn.params["axes"]


@functools.lru_cache(maxsize=256)  # layers of one kind have the very same loops
def _peak(jaxpr: core.Jaxpr, consumed: tuple[bool, ...] = ()) -> int:
    """Compute the most bytes that exist at once beside the arguments of ``jaxpr`` and its results.

    Arguments that are ``consumed`` may be overwritten.
    """
    program = _Program(jaxpr)
    steps, sizes = program.steps, program.sizes
    arguments = {x for x, free in zip(program.arguments, consumed, strict=False) if free}
    places = _written(program)
    results = places.difference(program.arguments)
    # Backwards: when each array is read last, and which fused results must be in memory.
    last = dict.fromkeys(places, len(steps))
    needed = set(program.results)
    turned = {step.outputs[0]: step.inputs[0] for step in steps if _read_by_products(step, sizes)}
    for at in range(len(steps) - 1, -1, -1):
        step, now = steps[at], at
        if step.fused and not needed.intersection(step.outputs):
            now = max(last.get(x, -1) for x in step.outputs)
        for x in step.inputs:
            last[x] = max(last.get(x, -1), now)
        if step.reads and not step.fused:
            product = step.name == "dot_general"
            needed.update(turned.get(x, x) if product else x for x in step.inputs)
    live = given = most = sum(sizes[x] for x in arguments)
    ending: dict[int, set[int]] = collections.defaultdict(set)  # by the step that reads them last
    for x in arguments:
        ending[max(last.get(x, -1), 0)].add(x)
    for at, step in enumerate(steps):
        new = {x for x in step.outputs if (x in needed or not step.fused) and x not in results}
        size = sum(sizes[x] for x in new)
        free = sum(sizes[x] for x in ending[at] if _replaces(step, x))
        most = max(most, live + size - min(size, free) + step.inner)
        for x in new:
            ending[max(last.get(x, -1), at)].add(x)
        live += size - sum(sizes[x] for x in ending.pop(at))
    return most - given


def _written(program: _Program) -> set[int]:
    """List the results, and the arrays in whose place they are written."""
    found = set(program.results)
    for step in reversed(program.steps):
        places = step.inputs[:1] if step.name in _IN_PLACE else step.inputs[-len(step.outputs) :]
        if step.name in _IN_PLACE or step.name in _PASSING:
            pairs = zip(step.outputs, places, strict=False)
            found |= {x for made, x in pairs if made in found and program.sizes[made] == program.sizes[x]}
    return found


def _read_by_products(step: _Step, sizes: Sequence[int]) -> bool:
    """Tell whether products compute the result of a step as they read it: another order, and on a GPU a wider dtype."""
    widens = step.name == "convert_element_type" and sizes[step.outputs[0]] > sizes[step.inputs[0]]
    return step.name == "transpose" or (widens and current_machine().platform != "cpu")


def _replaces(step: _Step, array: int) -> bool:
    """Tell whether a result of a step may take the place of an operand that nothing reads afterwards."""
    if step.name in _IN_PLACE:
        return step.inputs[0] == array
    return step.fused or (step.name in _PASSING and array in step.inputs)


def most_bytes(run: Callable[..., Any], *args: Any, consumed: Sequence[int] = ()) -> int:
    """Estimate the most bytes on the device that ``run`` takes beside its arguments and its results.

    Args:
        run: a function that JAX can trace.
        *args: its arguments, or their shapes.
        consumed: indices of arguments that may be overwritten, as those that a program donates.
    """
    return peak_bytes(jax.make_jaxpr(run)(*args).jaxpr, args, consumed)


def peak_bytes(program: core.Jaxpr, args: Sequence[Any], consumed: Sequence[int] = ()) -> int:
    """Estimate as `most_bytes`, for a function that was traced with ``args``."""
    leaves = (at in consumed for at, arg in enumerate(args) for _ in jax.tree.leaves(arg))
    return _peak.__wrapped__(program, tuple(leaves))
