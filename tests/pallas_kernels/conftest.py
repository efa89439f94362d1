"""Settings of all kernel tests: many small programs, so compile them quickly; bodies that are tried everywhere."""

import contextlib

import pytest

from tests.pallas_kernels.cases import HOPPER, MOSAIC, NEEDS_GPU, ON_GPU
from tests.pallas_kernels.registers import emulated
from tests.pallas_kernels.strict import strict


@pytest.fixture(scope="module", autouse=True)
def compile_quickly(quick_compile):
    """Every kernel test compiles small programs that run once or twice."""


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    """Add the bodies that a module's table calls `everywhere` to each test that takes the interpreted kernel.

    Where there is no GPU, leave out what needs one, if anything is left: a third of all tests.
    """
    tables = {at: x for at, x in vars(metafunc.module).items() if isinstance(x, dict) and "xla" in x}
    used = [tables[at] for at in metafunc.function.__code__.co_names if at in tables] or tables.values()
    more = dict.fromkeys(name for table in used for name, run in table.items() if getattr(run, "everywhere", False))
    hopper = any(MOSAIC in table for table in used)
    marks = metafunc.definition.own_markers
    for index, mark in enumerate(marks):
        if mark.name == "parametrize" and mark.args[0] in ("name", ("name", "dtype")) and more:
            names = [getattr(value, "values", (value,))[0] for value in mark.args[1]]
            added = more if mark.args[0] == "name" else [(name, "float32") for name in more]
            if "interpreted" in names:
                marks[index] = pytest.mark.parametrize(mark.args[0], [*mark.args[1], *added]).mark
        if mark.name == "parametrize" and mark.args[0] in ("name", ("name", "dtype")) and hopper:
            triton = [x for x in marks[index].args[1] if "pallas_triton" in getattr(x, "values", ())]
            added = [pytest.param(MOSAIC, *x.values[1:], marks=[] if HOPPER else pytest.mark.thorough) for x in triton]
            marks[index] = pytest.mark.parametrize(mark.args[0], [*marks[index].args[1], *added]).mark
        if marks[index].name == "parametrize" and not ON_GPU:
            values = [x for x in marks[index].args[1] if NEEDS_GPU not in getattr(x, "marks", ())]
            if 0 < len(values) < len(marks[index].args[1]):
                marks[index] = pytest.mark.parametrize(marks[index].args[0], values, **marks[index].kwargs).mark


@pytest.fixture(autouse=True)
def registers_without_a_card(request):
    """Kernels on Mosaic GPU run here too, see `registers`."""
    given = getattr(request.node, "callspec", None)
    with emulated() if given and MOSAIC in given.params.values() and not HOPPER else contextlib.nullcontext():
        yield


@pytest.fixture(scope="module", autouse=True)
def strict_kernels(request):
    """Interpreted kernels read and write nothing out of range.

    The checks take a third of a kernel's time, so by default rooms whose kernels compute most of their indices go without.
    """
    without = not request.config.getoption("--thorough") and {"choose", "score", "layer"} & {*request.path.parts}
    with contextlib.nullcontext() if without else strict():
        yield
