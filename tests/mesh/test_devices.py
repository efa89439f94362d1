"""What only many devices can show: the checks of two programs with eight devices, and of one that runs as two processes."""

import functools
import importlib

import numpy as np
import pytest

import kvjax
from tests.harness import example
from tests.mesh import two_processes
from tests.mesh.eight_devices import CONFIG, READS_CHUNKS, STEPS, params, read
from tests.mesh.processes import found_in, run_two

# The checks of a program that the slow line runs, and the mark of the others. TokenSelect decides by sums over all heads,
# and by all slots in two ways; the one head of a device follows another device's.
_DECIDING = "tokenselect on slots=2 model=4", "reuse by head on data=1 model=8"
PROGRAMS = {
    "eight_devices": (
        ("check_refusals", *_DECIDING, "check_eval", "check_sums", "check_layers_first"),
        pytest.mark.thorough,
    ),
    "eight_devices_models": ((), pytest.mark.slow),
}  # fmt: skip
OF_TWO = ("pariskv on data=2 model=2", "full on slots=4", "snapkv on data=2 slots=2", "check_saved", "check_refusals")


def checks_of(program):
    """The names of its checks, those that the slow line runs first, then the others."""
    always, module = PROGRAMS[program][0], importlib.import_module(f"tests.mesh.{program}")
    every = [*vars(module).get("LAWS", ()), *module.CHECKS]
    return always, tuple(name for name in every if name not in always)


@functools.cache
def found(program, names):
    return found_in(f"tests.mesh.{program}", *names)


def params_of(program):
    """A check and the names that run in one process with it."""
    group, (always, others) = pytest.mark.xdist_group(program), checks_of(program)
    marked = ((always, [group, pytest.mark.slow]), (others, [group, PROGRAMS[program][1]]))
    return [pytest.param(program, names, name, marks=marks, id=name) for names, marks in marked for name in names]


@pytest.mark.parametrize(("program", "names", "name"), [param for program in PROGRAMS for param in params_of(program)])
def test_a_check_holds_on_eight_devices(program, names, name):
    problem = found(program, names)[name]
    assert problem is None, problem


@pytest.mark.slow
def test_methods_hold_on_two_processes(tmp_path):
    """Each has two of the four devices of a mesh; one saves a cache that both load, and loads what both have saved."""
    kvjax.save_cache(tmp_path / two_processes.SAVED_BY_ONE, read(params(), example("quest"), **READS_CHUNKS))
    run_two("tests.mesh.two_processes", tmp_path, *OF_TWO, devices=2)
    loaded = kvjax.load_cache(tmp_path / two_processes.SAVED_BY_TWO, config=CONFIG, method=example("quest"))
    out = kvjax.generate(params(), loaded, max_new_tokens=STEPS, eos_token_ids=())
    np.testing.assert_array_equal(out.tokens, two_processes.on_one_device("quest").tokens)


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [2, 4])
def test_checks_hold_on_two_processes_thoroughly(devices, tmp_path):
    """Of methods with two devices each, and of loading with four."""
    others = (name for name in two_processes.CHECKS if name not in OF_TWO)
    run_two("tests.mesh.two_processes", tmp_path, *(others if devices == 2 else ["check_loading"]), devices=devices)
