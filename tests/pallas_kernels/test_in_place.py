"""Triton kernels that write in place: a number that every thread reads is read by all threads before one writes it.

A compiler moves a read down to its first use, but across no meeting of the program's threads.
"""

import dataclasses

import jax
import pytest

from pallas_kernels.machine import assume_machine
from tests.pallas_kernels.operations import PLACES, arguments, public, small, table

MEETINGS = ("debug_barrier", "reduce_", "cum", "argm")  # sums and searches over a block meet in shared memory


def inner(equation):
    """The programs that an equation runs: branches, or the body of a loop."""
    values = (x if isinstance(x, tuple | list) else (x,) for x in equation.params.values())
    return [program for x in values for y in x if hasattr(program := getattr(y, "jaxpr", y), "eqns")]


def written_early(program, memory, read):
    """Name the memory that is written while some threads may still have to read a number there.

    ``memory`` names that of each ref; ``read`` has what was read since the threads met, and is kept up to date.
    """
    early = []
    for equation in program.eqns:
        name = equation.primitive.name
        known = [(x, memory[x]) for x in equation.invars if not hasattr(x, "val") and x in memory]
        if name.startswith(MEETINGS):
            read.clear()
        elif known and name in ("get", "masked_load") and not equation.outvars[0].aval.shape:
            read.add(known[0][1])
        elif known and name in ("swap", "masked_swap", "addupdate"):
            early += {known[0][1]} & read
        ends = []
        for each in inner(equation):
            own = dict(known)
            pairs = zip(each.invars[::-1], equation.invars[::-1], strict=False)  # a branch is not told which one it is
            ends.append(set(read))
            early += written_early(each, {x: own[y] for x, y in pairs if not hasattr(y, "val") and y in own}, ends[-1])
        read |= set().union(*ends)
    return early


def kernels(program):
    own = [x for x in program.eqns if x.primitive.name == "pallas_call"]
    return own or [x for equation in program.eqns for each in inner(equation) for x in kernels(each)]


@pytest.mark.parametrize(
    "name", sorted(x for x in PLACES if table(x).in_place and "pallas_triton" in table(x).implementations)
)
def test_all_threads_have_read_a_number_before_it_is_written(name):
    shape = small(name)

    def run(arrays):
        out = public(name)(**arrays, **shape.options, implementation="pallas_triton")
        return vars(out) if dataclasses.is_dataclass(out) else out

    with assume_machine("gpu", (9, 0)):
        traced = jax.make_jaxpr(run)(arguments(shape)).jaxpr
    (call,) = kernels(traced)
    body, count, pairs = call.params["jaxpr"], len(call.invars), call.params["input_output_aliases"]
    memory = {body.invars[at]: i for i, o in pairs for at in (i, count + o)}
    assert memory
    if call.params["compiler_params"].num_warps > 1:  # the threads of one warp read together
        assert not written_early(body, memory, set())
