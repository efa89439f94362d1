"""Strict numerics for every test, and the devices tests may ask for."""

import collections
import gc
import os
import pathlib
import tempfile

import jax
import pytest

from kvjax import plugins

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
_ON_GPU = jax.default_backend() == "gpu"


def pytest_addoption(parser):
    """``--thorough`` runs the variants that repeat a law at many settings, and slow tests; without it they are left out."""
    parser.addoption("--thorough", action="store_true", help="also run tests marked thorough or slow")


def pytest_configure(config):
    """Declare the markers; give all processes of this run one directory of compiled programs.

    JAX finds a program there by the text of the program, the compiler and its options, so that a test gets the program
    that it would have compiled. Set ``JAX_COMPILATION_CACHE_DIR`` to keep the programs from one run to the next.
    """
    config.addinivalue_line("markers", "thorough: many settings of a law that another test checks at one")
    config.addinivalue_line("markers", "slow: what no other test shows, in more time than the default suite has; in .ci/run")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        directory = tempfile.TemporaryDirectory(prefix="kvjax-compiled-")
        config.add_cleanup(directory.cleanup)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = directory.name  # the workers inherit it
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def pytest_terminal_summary(terminalreporter, config):
    """One line for each reason to skip, with the number of tests per file."""
    if not config.getoption("--thorough"):
        terminalreporter.write_line("tests marked thorough or slow are left out: --thorough runs them")
    reasons = collections.defaultdict(collections.Counter)
    for report in terminalreporter.stats.get("skipped", []):
        _, _, reason = report.longrepr
        reasons[reason.removeprefix("Skipped: ")][report.nodeid.partition("::")[0].removeprefix("tests/")] += 1
    for reason, files in sorted(reasons.items()):
        where = ", ".join(f"{file} {count}" for file, count in sorted(files.items()))
        terminalreporter.write_line(f"{files.total()} skipped: {reason} ({where})")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config, items):
    """Leave out what only ``--thorough`` runs; keep a file's tests on one worker, where they share fixtures and programs.

    Tests that name a group share them with other files.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
    if not config.getoption("--thorough"):  # left out, not skipped: the report of each skipped test would take milliseconds
        items[:] = [x for x in items if "thorough" not in x.keywords and "slow" not in x.keywords and not _repeats_float32(x)]
    if _ON_GPU:
        skip = pytest.mark.skip(reason="an interpreted kernel: its masked stores race on a GPU, where the kernel itself runs")
        for item in items:
            if "interpreted" in item.nodeid and "pallas_kernels" in item.nodeid:
                item.add_marker(skip)


def _repeats_float32(item):
    """A kernel in bfloat16 without a GPU: the interpreter rounds, but runs the steps that float32 has shown."""
    params = item.callspec.params if "callspec" in item.__dict__ else {}
    repeats = params.get("name") in ("interpreted", "interpreted_tpu", "xla")
    return params.get("dtype") == "bfloat16" and repeats and not _ON_GPU


def pytest_collection_finish():
    """Let the garbage collector pass over what stays, modules and ten thousand tests, and look less often at the rest."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(scope="module")
def quick_compile():
    """Compile without most of XLA's optimizations: a third less time for tests of many small programs.

    A module asks for it with ``pytestmark = pytest.mark.usefixtures("quick_compile")``; others compile as users do. On a
    GPU every program is compiled with them.
    """
    jax.config.update("jax_disable_most_optimizations", not _ON_GPU)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def _bound_maps():
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 50_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def bounded_maps():
    """Forget compiled programs before Linux's 65,530 memory maps per process run out, which ends in a crash of XLA."""
    yield
    _bound_maps()


@pytest.fixture(autouse=True)
def bounded_maps_of_long_tests(request):
    """`bounded_maps` after each test that compiles much; for every test the count would take too long."""
    yield
    if any(map(request.node.get_closest_marker, ("slow", "thorough"))):
        _bound_maps()


@pytest.fixture(autouse=True)
def only_built_in_methods(monkeypatch):
    """Hide the methods that other tests register, and the methods of packages that happen to be installed."""
    monkeypatch.setattr(plugins, "_registered", {})
    monkeypatch.setattr(plugins, "_announced", dict)


@pytest.fixture
def key():
    """A fixed PRNG key."""
    return jax.random.key(0)
