"""Operations besides attention through Mosaic GPU, lowered here; compared with plain JAX on a Hopper GPU or in `registers`.

Their own tests try them there as well, with everything that a row may hold.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest

from experiments.speed.kernels.compare import error
from pallas_kernels.machine import assume_machine
from tests.pallas_kernels.attend.test_mosaic_gpu import lowered
from tests.pallas_kernels.cases import HOPPER, MOSAIC, thorough
from tests.pallas_kernels.operations import arguments, choose, public, small
from tests.pallas_kernels.registers import emulated

# Sizes in which the shapes of a test differ from the small shapes, and how many kernels a call launches.
OPERATIONS = {
    "add_norm": ({"D": 1024}, 1),
    "choice": ({"D": 128, "S": 5000}, 1),
    "compact": ({"S": 20_000, "K": 3000}, 1),
    "encode": ({}, 1),
    "evict_token": ({"D": 128, "S": 300}, 1),
    "kth_select": ({"S": 20_000}, 1),
    "pack_token": ({"D": 64}, 1),
    "packed_attention": ({"D": 64}, 2),
    "packed_score": ({}, 1),
    "page_score": ({}, 1),
    "project_query": ({}, 1),
    "rotated_rows": ({"D": 128, "K": 300, "S": 600}, 1),
    "sentence_add": ({"D": 128}, 1),
    "sentence_cut": ({}, 1),
    "step_query": ({"D": 128}, 1),
    "store_codes": ({}, 1),
    "store_token": ({"D": 128, "S": 300}, 1),
    "token_list": ({"K": 500, "S": 600}, 1),
    "token_vote": ({"S": 1000}, 2),
    "vector_score": ({}, 1),
    "widen_page": ({"D": 128}, 1),
}
QUICK = "project_query", "token_list"  # to compute without a card
each = pytest.mark.parametrize("name", OPERATIONS)


def problem(name):
    """A shape of an operation, and a function of its arrays by name."""
    shape = small(name, wide=True, **OPERATIONS[name][0])

    def run(arrays, implementation=MOSAIC):
        out = public(name)(**arrays, **shape.options, implementation=implementation)
        return shape.timed.defined(out, shape.sizes)

    return shape, run


@each
def test_it_lowers_for_an_h100_and_a_mapped_call_is_no_more_launches(name):
    shape, run = problem(name)
    arrays, launches = arguments(shape), OPERATIONS[name][1]
    assert lowered(run, arrays) == launches
    first = [*arrays][0]
    stacked = {first: jax.ShapeDtypeStruct((3, *arrays[first].shape), arrays[first].dtype)}
    mapped = jax.vmap(run, ({at: 0 if at == first else None for at in arrays},))
    assert lowered(mapped, arrays | stacked) == launches


def test_other_gpus_say_why_not():
    with assume_machine("gpu", (8, 0)), pytest.raises(NotImplementedError, match="compute capability"):
        choose("page_score", implementation=MOSAIC)


@pytest.mark.parametrize("name", [pytest.param(x, marks=[thorough] * (not HOPPER and x not in QUICK)) for x in OPERATIONS])
def test_it_equals_plain_jax(name):
    shape, run = problem(name)
    arrays = shape.draw(jax.random.key(1))
    want = jax.jit(functools.partial(run, implementation="xla"))(arrays)
    jnp.full((1 << 24,), jnp.nan).delete()  # memory that results may get
    with contextlib.nullcontext() if HOPPER else emulated():
        got = jax.jit(run)(arrays)
    assert error(got, want) <= shape.timed.tolerance
