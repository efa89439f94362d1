"""The rooms of the packages: how many, which way imports point between them, and how far a call has to go."""

from __future__ import annotations

import ast
import collections
import functools
import graphlib
import importlib
import inspect
import pathlib
import pkgutil
import subprocess
import sys

import experiments
import kvjax
import models
import pallas_kernels
from kvjax.protocol.slots import SlotAttention
from kvjax.testing.model import TinyModel

ROOT = pathlib.Path(__file__).parents[2]
# Files that lie flat in kvjax/ and belong together; every folder is a group of its own.
FLAT = {
    "base": ("rope", "selection"),
    "registry": ("registry", "plugins"),
}
FACE = ("__init__", "__main__", "public", "version")
GROUP = {file: group for group, files in FLAT.items() for file in files}


def modules(package):
    """The files of a package by the dotted names of their modules, without the package's own name."""
    for path in sorted((ROOT / package).rglob("*.py")):
        yield ".".join(path.relative_to(ROOT / package).with_suffix("").parts).removesuffix(".__init__"), path


@functools.cache
def known_modules(package):
    return {name for name, _ in modules(package)}


def imported(package, path):
    """Names of modules of ``package`` that a file imports, wherever the statement stands."""
    known = known_modules(package)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package:
            inside = node.module.partition(".")[2]
            for alias in node.names:
                full = f"{inside}.{alias.name}".lstrip(".")
                yield full if full in known else inside
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[2] for alias in node.names if alias.name.split(".")[0] == package)


def arrows(package, group):
    """The groups that each group of a package imports, from the files that have one."""
    found = collections.defaultdict(set)
    for name, path in modules(package):
        if (mine := group(name)) is not None:
            found[mine] |= {group(other) for other in imported(package, path)} - {mine, None}
    return found


def group_of_kvjax(name):
    first = name.partition(".")[0]
    return None if first in (*FACE, "") else GROUP.get(first, first)


def test_kvjax_has_thirteen_groups_without_a_cycle():
    """Imports inside functions count, and imports for type checkers."""
    found = arrows("kvjax", group_of_kvjax)
    assert len(found) == 13, sorted(found)
    order = list(graphlib.TopologicalSorter(found).static_order())  # a cycle raises CycleError
    assert order.index("base") < order.index("cache") < order.index("protocol") < order.index("methods")
    assert order.index("decoding") < order.index("accounting") < order.index("api") < order.index("testing")


def test_rooms_of_kernels_have_no_cycle():
    rooms = set(pallas_kernels.ROOMS)
    found = arrows("pallas_kernels", lambda name: name.partition(".")[0] if name.partition(".")[0] in rooms else "base")
    assert set(found) == rooms | {"base"} and not found["base"], found["base"]
    assert list(graphlib.TopologicalSorter(found).static_order())


def test_little_lies_flat():
    assert len(list((ROOT / "kvjax").glob("*.py"))) <= 17
    flat = {path.name for path in (ROOT / "pallas_kernels").iterdir()} - {*pallas_kernels.ROOMS, "__pycache__"}
    assert len(flat) <= 12, sorted(flat)


def test_every_public_name_is_in_all_and_is_no_module_too():
    public = {name for name, value in vars(kvjax.public).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert public | {"methods", "models", "__version__"} == {*kvjax.__all__}
    modules = {found.name for found in pkgutil.iter_modules(kvjax.__path__)}
    assert public & modules == set() and {*dir(kvjax)} == {*kvjax.__all__} | modules
    for name in kvjax.__all__:
        assert getattr(kvjax, name) is vars(kvjax.public)[name]


def test_no_name_is_both_a_module_and_something_else():
    """A package's attribute that has the name of one of its modules is this module."""
    for package in (kvjax, pallas_kernels, models):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            parent, _, name = found.name.rpartition(".")
            module = importlib.import_module(found.name)
            assert vars(sys.modules[parent])[name] is module, found.name


def test_architecture_is_two_pages_and_names_every_room():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert text.count("\n") <= 120
    for package in ("kvjax", "pallas_kernels"):
        rooms = {path.parent.name for path in (ROOT / package).glob("[a-z]*/__init__.py")}
        assert not [room for room in rooms if f"`{room}" not in text and f"{room}/" not in text]
    jobs = {path.parent.name for path in (ROOT / "experiments").glob("*/__init__.py")}
    assert not [job for job in jobs if f"``{job}``" not in experiments.__doc__]


def test_one_kernel_is_imported_alone():
    code = (
        "import sys, pallas_kernels; assert 'jax' not in sys.modules; from pallas_kernels import merge_splits; "
        "loaded = {name for name in sys.modules if name.startswith('pallas_kernels.')}; "
        "others = {f'pallas_kernels.{room}.{name}' for room, name in pallas_kernels.operations()} & loaded; "
        "assert others == {'pallas_kernels.attend.merge_splits'}, others; assert callable(merge_splits)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {"merge_splits", "kth_select"} <= {*dir(pallas_kernels)}


def frames_to(target, run):
    """Our frames, the model's left out, from the first call of ``run`` to the first call of the function ``target``."""
    found = []

    def watch(frame, event, _):
        if event != "call" or found or frame.f_code is not target.__code__:
            return
        while frame is not None:
            path = pathlib.Path(frame.f_code.co_filename)
            ours = path.is_relative_to(ROOT / "kvjax") or path.is_relative_to(ROOT / "pallas_kernels")
            if ours and not path.is_relative_to(ROOT / "kvjax" / "testing"):
                found.append(f"{path.relative_to(ROOT)}:{frame.f_code.co_name}")
            frame = frame.f_back

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found[::-1]


def test_a_step_is_nine_frames_from_generate():
    """Both ends count, and `in_32_bits` around them does not. No other test has these sizes: nothing is traced already."""
    model = TinyModel()
    params = model.random_params(0)
    cache = kvjax.prefill(params, [range(5, 42)], config=model, method="quest", max_new_tokens=11)
    frames = frames_to(SlotAttention.attend, lambda: kvjax.generate(params, cache, max_new_tokens=3))
    assert frames.pop(0) == "kvjax/decoding/bits.py:run"
    assert frames[0] == "kvjax/api/generate.py:generate" and frames[-1] == "kvjax/protocol/slots.py:attend"
    assert len(frames) <= 9, frames
    drawing = (ROOT / "ARCHITECTURE.md").read_text().partition("## One decode step")[2].partition("## One prefill")[0]
    at = -1
    for path, name in (frame.split(":") for frame in frames if ":_" not in frame):
        where = [line for line in drawing.splitlines() if name in line and path.removeprefix("kvjax/") in line]
        assert where, f"ARCHITECTURE.md draws no {name} in {path}"
        assert drawing.index(where[0]) > at, f"ARCHITECTURE.md draws {name} too early"
        at = drawing.index(where[0])
