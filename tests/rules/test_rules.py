"""Rules of the code base that a machine can check (ARCHITECTURE.md)."""

from __future__ import annotations

import ast
import graphlib
import importlib
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
LIBRARY = ("kvjax", "models", "pallas_kernels")
FILES = sorted(path for folder in LIBRARY for path in (ROOT / folder).rglob("*.py"))
EXPERIMENTS = ROOT / "experiments"
JOBS = sorted(path for path in EXPERIMENTS.rglob("*.py") if path.parent != EXPERIMENTS)  # all files in packages
_FUZZ = (ROOT / "tests" / "fuzz").glob("*.py")
FUZZ = sorted(path for path in _FUZZ if not path.name.startswith("test_"))  # `kvjax fuzz`, which only a clone has
PACKAGES = sorted(path.parent.name for path in JOBS if path.name == "__init__.py" and path.parents[1] == EXPERIMENTS)
# Packages inside a package of experiments: jobs that share its parts.
INNER = ("evaluation.peers", "speed.exact", "speed.kernels", "speed.peers")


def short(path):
    return path.relative_to(ROOT).as_posix()


# The only files of the library that import what stands beside it or above it, and which package that is.
ABOVE = {
    "kvjax/__main__.py": "experiments",
    "kvjax/api/evaluate.py": "experiments",
    "kvjax/models/__init__.py": "models",
}


def tree(path):
    return ast.parse(path.read_text(), filename=str(path))


def imports(path):
    """Top-level packages a file imports absolutely, wherever the statement stands."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


def calls(path, name):
    return [
        node.lineno
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


@pytest.mark.parametrize("path", FILES, ids=short)
def test_dependencies_point_one_way(path):
    used = set(imports(path))
    if path.is_relative_to(ROOT / "kvjax"):
        assert used & {"models", "experiments", "tests", "flax"} <= {ABOVE.get(short(path))}
    if path.is_relative_to(ROOT / "models"):
        assert not used & {"kvjax", "experiments", "tests", "models"}, "relative imports only"
    if path.is_relative_to(ROOT / "pallas_kernels"):
        assert not used & {"kvjax", "models", "experiments", "tests", "flax"}


@pytest.mark.parametrize("path", FILES + JOBS + FUZZ, ids=short)
def test_files_stay_short(path):
    lines = path.read_text().count("\n")
    assert lines <= 400, f"{short(path)} has {lines} lines, at most 400"
    assert path.stem not in ("utils", "misc", "helpers", "common")


@pytest.mark.parametrize("path", FILES, ids=short)
def test_forbidden_constructs_are_absent(path):
    assert not calls(path, "hasattr"), "hasattr"
    assert not [
        node.lineno
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and len(node.args) > 2
    ], "getattr default"
    assert not [node.lineno for node in ast.walk(tree(path)) if isinstance(node, (ast.Global, ast.Nonlocal))], "global"
    assert "os.environ" not in path.read_text() and "os.getenv" not in path.read_text()
    assert not calls(path, "print"), "print"


@pytest.mark.parametrize("path", FILES + JOBS + FUZZ, ids=short)
def test_private_parts_of_jax_are_not_imported_at_import(path):
    """JAX moves them between versions: a module must be importable without them, and say so where it needs one."""
    waiting, at_import = list(tree(path).body), []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            at_import += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            at_import += [f"{node.module}.{alias.name}" for alias in node.names]
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)
    assert not [name for name in at_import if re.match(r"(jax|jaxlib|flax)(\.\w+)*\._\w", name)]


def test_nothing_asks_which_method_it_has():
    """`isinstance` on a concrete method would let one method leak into the others."""
    from kvjax import registry

    wrappers = {"Stages", "PerLayer", "DenseBelow", "Periodic", "Twilight", "LayerBudgets", "Prefill", "Verified"}
    concrete = {cls.__name__ for cls in registry.builtin().values()} | wrappers
    families = {"Eviction", "Retrieval", "SlotMethod", "LayerMethod"}
    for path in (ROOT / "kvjax").rglob("*.py"):
        for node in ast.walk(tree(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("isinstance", "issubclass")
            ):
                named = {leaf.id for leaf in ast.walk(node.args[1]) if isinstance(leaf, ast.Name)}
                assert not named & (concrete | families), f"{short(path)}:{node.lineno}"


def test_no_module_level_mutable_state():
    for path in FILES:
        for node in tree(path).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, (ast.List, ast.Set)):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                assert names == ["__all__"], f"{short(path)}:{node.lineno} {names}"


def modules():
    for package in LIBRARY:
        root = importlib.import_module(package)
        yield root
        for found in pkgutil.walk_packages(root.__path__, f"{package}."):
            if not found.name.endswith("__main__"):
                yield importlib.import_module(found.name)


def test_public_names_have_docstrings():
    """Every public module, class and function, and every abstract method; implementations inherit theirs."""
    missing = []
    for module in modules():
        if not module.__doc__:
            missing.append(module.__name__)
        for name, value in vars(module).items():
            if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
                continue
            if value.__module__ != module.__name__:
                continue
            own = value.__doc__ or ""
            if not own or own.startswith(f"{name}("):  # dataclasses write a signature where there is no docstring
                missing.append(f"{module.__name__}.{name}")
            if inspect.isclass(value):
                missing += [
                    f"{module.__name__}.{name}.{at}"
                    for at, member in vars(value).items()
                    if inspect.isfunction(member) and not at.startswith("_") and not inspect.getdoc(getattr(value, at))
                ]
    assert not missing


def test_method_modules_have_their_five_parts():
    """Idea, what is stored, the score, source, departures."""
    from kvjax import registry

    for name, cls in registry.builtin().items():
        text = inspect.getdoc(sys.modules[cls.__module__])
        at = pathlib.Path(inspect.getfile(cls)).relative_to(ROOT / "kvjax" / "methods")
        assert at.as_posix() in (f"{name}.py", f"{name}/method.py")
        assert text.startswith(f"{cls.__name__}: ")
        for part in ("Stored", "**Source**", "**Departures**"):
            assert part in text, f"{name}: {part}"
        assert cls.PAPER.removeprefix("arXiv:") in text or name == "full"


def test_every_knob_is_explained():
    from kvjax import registry

    for cls in registry.builtin().values():
        for knob in registry.knobs(cls):
            assert knob.doc, f"{cls.__name__}.{knob.name}"
        assert registry.summary(cls)


def test_every_public_name_is_listed_in_one_place():
    """The packages export by explicit import, nothing else, and `kvjax.__all__` lists what `kvjax.public` imports."""
    for node in tree(ROOT / "kvjax/methods/__init__.py").body[1:]:
        assert isinstance(node, ast.ImportFrom) and all(alias.asname == alias.name for alias in node.names)
    *imports, listed = tree(ROOT / "kvjax/public.py").body[1:]
    assert all(isinstance(node, ast.ImportFrom) for node in imports)
    names = {alias.name for node in imports for alias in node.names}
    assert isinstance(listed, ast.Assign) and names == set(ast.literal_eval(listed.value))


def experiment_imports(path):
    """(package of experiments, rest of the module's name, imported names) of a file's imports from `experiments`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module.split(".")[0] == "experiments":
            _, *parts = node.module.split(".")
            names = [alias.name for alias in node.names]
            if parts:
                yield parts[0], parts[1:], names
            else:  # from experiments import PACKAGE
                yield from ((name, [], []) for name in names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "experiments":
                    yield (alias.name.split(".") + [""])[1], alias.name.split(".")[2:], []


def exported(package):
    """The names that a package of experiments exports, each by ``from MODULE import NAME as NAME``."""
    _, *body = tree(EXPERIMENTS / package / "__init__.py").body
    for node in body:
        assert isinstance(node, ast.ImportFrom) and all(alias.asname == alias.name for alias in node.names), package
        assert node.module.startswith(f"experiments.{package}."), package
    return {alias.asname for node in body for alias in node.names}


def in_experiments(path):
    """The dotted name of a file of `experiments`, without ``experiments``; a package's own file has the package's name."""
    parts = path.relative_to(EXPERIMENTS).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_experiments_is_one_package_per_job():
    assert [path.name for path in EXPERIMENTS.glob("*.py")] == ["__init__.py"]
    assert len(PACKAGES) <= 14, PACKAGES
    assert sorted(in_experiments(path) for path in JOBS if path.name == "__init__.py") == sorted((*PACKAGES, *INNER))
    for package in (*PACKAGES, *INNER):
        folder = EXPERIMENTS / package.replace(".", "/")
        assert (folder / "__main__.py").is_file(), f"python -m experiments.{package}"
        assert ast.get_docstring(tree(folder / "__init__.py")), package


@pytest.mark.parametrize("path", JOBS + FUZZ, ids=short)
def test_experiments_import_exported_names_of_their_siblings(path):
    """Nobody knows a sibling's inside; inside a package the files know each other."""
    mine = path.relative_to(EXPERIMENTS).parts[0] if path in JOBS else ""
    for package, inside, names in experiment_imports(path):
        if package and package != mine:
            assert not inside, f"{short(path)} imports {package}.{'.'.join(inside)}"
            assert set(names) <= exported(package), f"{short(path)}: {package} does not export {names}"


def files_imported(path):
    """The files of its own package that a file of `experiments` imports, by their dotted names."""
    known = {in_experiments(other) for other in JOBS}
    for package, inside, names in experiment_imports(path):
        if package == path.relative_to(EXPERIMENTS).parts[0]:
            module = ".".join((package, *inside))
            for name in names or [""]:  # from experiments.PACKAGE import FILE, or from experiments.PACKAGE.FILE import NAME
                yield f"{module}.{name}" if f"{module}.{name}" in known else module


@pytest.mark.parametrize("path", JOBS, ids=short)
def test_a_package_inside_a_package_is_a_leaf(path):
    """It uses the files around it; of these only the package's ``__init__``, which exports its names, uses it."""
    at = in_experiments(path)
    mine = next((inner for inner in INNER if at == inner or at.startswith(f"{inner}.")), None)
    if path.name == "__init__.py" and mine is None:
        return
    for name in files_imported(path):
        used = next((inner for inner in INNER if name == inner or name.startswith(f"{inner}.")), None)
        assert used in (None, mine), f"{short(path)} imports {name}"


def test_experiments_have_no_cycle():
    """Neither between packages nor between the files of a package; ``__main__`` files count."""
    packages = {package: set() for package in PACKAGES}
    files = {in_experiments(path): set(files_imported(path)) for path in JOBS}
    for path in JOBS:
        mine = path.relative_to(EXPERIMENTS).parts[0]
        packages[mine] |= {package for package, _, _ in experiment_imports(path)} - {mine}
    assert list(graphlib.TopologicalSorter(packages).static_order())  # a cycle raises CycleError
    assert list(graphlib.TopologicalSorter(files).static_order())
    assert not packages["records"] and not packages["tasks"] and not packages["cli"] and packages["benchmarks"] == {"tasks"}


def test_prompts_are_made_without_jax():
    """Worker processes that make prompts start fast, and no package imports an optional package. (Flax imports yaml.)"""
    code = (
        "import sys, experiments.tasks, experiments.benchmarks, experiments.cli.main; assert 'jax' not in sys.modules; "
        f"import {', '.join(f'experiments.{package}' for package in PACKAGES)}; "
        "heavy = {'matplotlib', 'optax', 'orbax', 'lm_eval', 'transformers', 'datasets', 'torch', 'kvpress'}; "
        "heavy &= set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_installation_has_all_files():
    """setuptools takes modules, and of other files those that pyproject.toml lists; a clone has them all."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        setuptools = tomllib.load(file)["tool"]["setuptools"]
    folders = [name.removesuffix("*") for name in setuptools["packages"]["find"]["include"]]
    assert {*folders} == {*LIBRARY, "experiments"}
    listed = setuptools["package-data"]
    taken = {path for name in listed for glob in listed[name] for path in (ROOT / name.replace(".", "/")).glob(glob)}
    found = {path for name in folders for path in (ROOT / name).rglob("*") if path.is_file()}
    found = {path for path in found if "__pycache__" not in path.parts}
    assert found - taken == {path for path in found if path.suffix == ".py"}
    for path in {path.parent for path in found if path.suffix == ".py"}:
        assert (path / "__init__.py").is_file(), f"{path} is no package and is left out of an installation"


def test_importing_has_no_side_effects():
    """Importing touches no device, no configuration, neither models nor flax, and no test runner."""
    code = (
        "import jax; before = dict(jax.config.values); import kvjax.testing, pallas_kernels, sys; "
        "assert dict(jax.config.values) == before; "
        "assert not {'flax', 'models', 'experiments', 'orbax', 'tests', 'pytest', '_pytest'} & set(sys.modules); "
        "assert not jax._src.xla_bridge._backends"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
