"""The notebooks run from top to bottom, and are kept without outputs."""

from __future__ import annotations

import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from tests.kvjax import test_contract

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CLAIMS = {
    "quickstart": ["Full: 4 of 4 right", "Quest: 4 of 4 right", "SnapKV: 0 of 4 right", "5 settings in 1 group"],
    "write_your_own_method": ["9 settings in 1 group", "no effect at this length in 4 of 4 rows"],
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


@pytest.mark.usefixtures("quick_compile")
def test_notebook_method_obeys_laws():
    """The method that the second notebook writes, under the strict promotion of this suite."""
    cells = json.loads((FOLDER / "write_your_own_method.ipynb").read_text(encoding="utf-8"))["cells"]
    source = next("".join(cell["source"]) for cell in cells if "class Spread" in "".join(cell["source"]))
    space: dict = {"__name__": __name__}  # dataclasses look their module up
    exec(compile(source, "write_your_own_method.ipynb", "exec", dont_inherit=True), space)  # noqa: S102
    method = space["Spread"](budget=12, page_size=4)
    plain = test_contract.one_layer(method)
    test_contract.same(test_contract.one_layer(method, poison=True), plain, tolerance=0)
    assert not plain.attended[-1, 0].all(), "the method attends to everything, so that nothing was shown"
    rebuilt = method.index(plain.state.cache)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), plain.state.aux, rebuilt)
