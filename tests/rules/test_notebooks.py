"""The notebooks install what they need, run from top to bottom, and are kept with the outputs of their code."""

from __future__ import annotations

import ast
import json
import pathlib
import re
import sys
import tomllib

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CLAIMS = {
    "quickstart": [
        "Full: 4 of 4 right", "Quest: 4 of 4 right", "SnapKV: 0 of 4 right", "5 settings in 1 group", "9.9 GiB in all",
        "tokens read, 4711042 found",
    ],  # fmt: skip
    "write_your_own_method": ["9 settings in 1 group", "17 laws hold", "Spread(budget=96, capacity=96"],
}


def kernel_environment(folder):
    """Environment variables under which a kernel is this very Python, by the name the notebooks ask for.

    Args:
        folder: a new directory; what is installed besides does not count.
    """
    spec = folder / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
    return {
        "JUPYTER_PATH": str(folder / "jupyter"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "IPYTHONDIR": str(folder / "ipython"),
        "PYTHONPATH": str(FOLDER.parent),
        "JAX_PLATFORMS": "cpu",  # this process may hold the memory of a GPU
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # nearly all of the time is compiling
    }


def check_outputs(name, printed):
    """What a notebook printed is what the text around its cells says."""
    assert "tokens attended" in printed
    for claim in CLAIMS[name]:
        assert claim in printed, printed


@pytest.mark.thorough  # building the site runs them, too: tests/rules/test_docs.py, a line of .ci/run
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_of_a_notebook_runs(path, tmp_path, monkeypatch):
    """Every cell, in a kernel of its own."""
    import nbclient  # here, where its warnings are not errors
    import nbformat

    for name, value in kernel_environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, kernel_name="python3", timeout=300, resources={"metadata": {"path": FOLDER}}
    ).execute()
    printed = (out.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs)
    check_outputs(path.stem, "".join(printed))


def test_every_notebook_is_run():
    assert {path.stem for path in NOTEBOOKS} == CLAIMS.keys()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_with_the_outputs_of_its_code(path):
    text = path.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    check_outputs(path.stem, "".join("".join(out.get("text", "")) for cell in cells for out in cell["outputs"]))
    assert len(text) < 150_000 and str(pathlib.Path.home()) not in text and str(FOLDER.parent) not in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_cell_names_the_model_that_is_loaded_with_its_template(path):
    code = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    (first,) = [cell for cell in code if re.search('^MODEL = "builtin"', cell, re.MULTILINE)]
    assert "model = models.load(MODEL)" in first and "model.encode(" in "".join(code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize(("device", "extra"), [("", ""), ("gpu", ",cuda12"), ("tpu", ",tpu")])
def test_first_cell_installs_from_a_clone_or_from_github(path, device, extra, tmp_path, monkeypatch):
    """What is missing, and nothing where the package is there; the badge opens the same repository in Colab."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    with (FOLDER.parent / "pyproject.toml").open("rb") as file:
        repository = tomllib.load(file)["project"]["urls"]["Repository"]
    badge = f"https://colab.research.google.com/github/{repository.removeprefix('https://github.com/')}/blob/main/"
    assert f"]({badge}notebooks/{path.name})" in "".join(notebook["cells"][0]["source"])
    first = next("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    source = re.sub(r'%pip install -q (".*")', r"installed.append(f\1)", first)
    installed: list[str] = []
    monkeypatch.setattr("shutil.which", lambda name: name if device == "gpu" else None)
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/accel0"] if device == "tpu" and "accel" in pattern else [])
    monkeypatch.chdir(FOLDER)
    exec(source, {"installed": installed})  # noqa: S102
    assert not installed
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    exec(source, {"installed": installed})  # noqa: S102
    monkeypatch.chdir(tmp_path)
    exec(source, {"installed": installed})  # noqa: S102
    extras = f"plot,hf{extra}"
    assert installed == [f"{FOLDER.parent}[{extras}]", f"kvjax[{extras}] @ git+{repository}"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_first_cell_stops_in_one_sentence_on_an_older_python(path, monkeypatch):
    """As Colab's runtimes of earlier years; nothing is installed."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    first = next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    source = re.sub(r'%pip install -q (".*")', r"installed.append(f\1)", first)
    ast.parse(source, feature_version=(3, 8))  # an older Python reads the whole cell before it runs the check
    monkeypatch.setattr("sys.version_info", (3, 11, 13))
    monkeypatch.setattr("sys.version", "3.11.13 (main)")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="^kvjax needs Python 3.12 or later; this runtime has 3.11.13, "):
        exec(source, {"installed": None})  # noqa: S102
