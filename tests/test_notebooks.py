"""The notebooks run from top to bottom, and are kept without outputs."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CLAIMS = {
    "quickstart": ["Full: 4 of 4 right", "Quest: 4 of 4 right", "SnapKV: 0 of 4 right", "5 settings in 1 group"],
    "write_your_own_method": ["9 settings in 1 group", "16 laws hold", "Spread(budget=96, capacity=96"],
}


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A kernel of this very Python, by the name the notebooks ask for, whatever is installed besides."""
    folder = tmp_path / "jupyter" / "kernels" / "python3"
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # this process may hold the memory of a GPU
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # nearly all of the time is compiling


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, kernel):
    """Every cell, in a kernel of its own, and what the text around the cells says of their output."""
    import nbclient  # here, where its warnings are not errors
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, kernel_name="python3", timeout=300, resources={"metadata": {"path": FOLDER}}
    ).execute()
    printed = "".join(
        out.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs
    )
    assert "tokens attended" in printed
    for claim in CLAIMS[path.stem]:
        assert claim in printed, printed


def test_every_notebook_is_run():
    assert {path.stem for path in NOTEBOOKS} == CLAIMS.keys()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_without_outputs(path):
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert text == json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n", "indent 1, sorted keys"
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
    first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert "%pip install" in "".join(first["source"]), "the first cell installs the package where it is missing"
