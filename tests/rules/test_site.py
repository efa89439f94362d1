"""The documentation site builds without a warning, runs the notebooks, and makes its tables from docstrings and records."""

from __future__ import annotations

import ast
import html
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import kvjax
import models
from experiments.lab.site import catalogue, methods, records
from kvjax import registry

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CLAIMS = {
    "quickstart": [
        "Full: 4 of 4 right",
        "Quest: 4 of 4 right",
        "SnapKV: 0 of 4 right",
        "5 settings in 1 group",
        "9.9 GiB in all",
        "tokens read, 4711042 found",
    ],  # fmt: skip
    "write_your_own_method": ["9 settings in 1 group", "Spread(budget=96, capacity=96"],
}


def kernel_environment(folder):
    """Environment variables under which a notebook's kernel is this very Python, whatever else is installed."""
    spec = folder / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
    return {
        "JUPYTER_PATH": str(folder / "jupyter"), "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"), "IPYTHONDIR": str(folder / "ipython"), "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",  # this process may hold the memory of a GPU
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # nearly all of the time is compiling
    }  # fmt: skip


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """One test, because one build takes most of its time: pages, knobs, public names, and what the notebooks print."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "trees")]
    environment = {**os.environ, **kernel_environment(tmp_path / "kernel")}
    site = tmp_path / "html"
    done = subprocess.run([*command, DOCS, site], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for name, cls in registry.builtin().items():
        page = (site / "methods" / f"{name}.html").read_text(encoding="utf-8")
        assert f"https://arxiv.org/abs/{cls.PAPER.removeprefix('arXiv:')}" in page
        assert all(f"<h2>{title}<" in page for title in ("Source", "Departures", "Knobs")), name
        body = re.sub(r"<(pre|code).*?</\1>", "", page.partition("<article")[2].partition("</article>")[0], flags=re.DOTALL)
        assert "``" not in body and "**" not in body, f"{name}: markup shows"
    api = (site / "api.html").read_text(encoding="utf-8")
    public = [f"kvjax.{name}" for name in kvjax.__all__ if callable(getattr(kvjax, name))]
    for name in [*public, *(f"models.{name}" for name in models.__all__)]:
        assert f'id="{name}"' in api, f"docs/api.md lacks {name}"
    assert "pallas_triton" in (site / "operations.html").read_text(encoding="utf-8")
    for path in NOTEBOOKS:
        text = html.unescape((site / "notebooks" / f"{path.stem}.html").read_text(encoding="utf-8"))
        assert all(claim in text for claim in CLAIMS[path.stem]), path


def test_a_docstring_becomes_markdown():
    docstring = "Name: idea.\n\nStored: keys_of ``a_b`` and `c`::\n\n    s = a\n\n    t = **c**\n\nMore\ntext.\n\n"
    docstring += "**Source**: A. Uthor (arXiv:2406.10774); some/Code 0123abc.\n**Departures** (few): none."
    assert methods.sections(docstring.replace("\n**Dep", "\n\n**Dep")) == [
        ("What is stored", "Keys\\_of `a_b` and `c`:\n\n```text\ns = a\n\nt = **c**\n```\n\nMore text."),
        ("Source", "A. Uthor ([arXiv:2406.10774](https://arxiv.org/abs/2406.10774)); "
         "[some/Code 0123abc](https://github.com/some/Code/tree/0123abc)."),
        ("Departures", "Few: none."),
    ]  # fmt: skip


def test_tables_are_the_records(monkeypatch):
    """A directive's columns, a record's own tables, and the measured part of a method's page."""
    file = DOCS / "records" / "speed-h200.json"
    table = records.columns(file, ["method", "value"], {"name": "decode", "method": "snapkv", "batch": "1"})
    row = next(x for x in json.loads(file.read_text())["metrics"] if (x["name"], x["method"]) == ("decode", "snapkv"))
    assert f"| snapkv | {row['value']:.4g} |" in table
    with pytest.raises(ValueError, match="no row with"):
        records.columns(file, ["method"], {"method": "nobody"})
    monkeypatch.setattr(records, "_PATTERNS", ("*-h200.json", "fidelity/int8/metrics.json"))  # not all, which takes longer
    monkeypatch.setattr(methods, "_SCORES", ("qwen-full",))
    pages = records.pages(DOCS)
    assert pages.keys() == {"index.md", "offload-h200.md", "speed-h200.md", "fidelity-int8.md"}
    assert "| Full |" in pages["fidelity-int8.md"] and "(speed-h200.md)" in pages["index.md"]
    quest = methods.pages(DOCS)["quest.md"]
    assert "| `num_dense_layers` | `2` | static |" in quest and "## Measured" in quest and "ms on an H200" in quest
    assert "| `gather_attention` |" in catalogue.operations() and "| `llama` | Llama 3" in catalogue.families()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_its_outputs_and_starts_on_any_python(path, monkeypatch):
    text = path.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    printed = "".join("".join(out.get("text", "")) for cell in cells for out in cell["outputs"])
    assert all(claim in printed for claim in CLAIMS[path.stem])
    assert len(text) < 150_000 and str(pathlib.Path.home()) not in text and str(ROOT) not in text
    first = re.sub(r'%pip install -q (".*")', r"installed.append(f\1)", "".join(cells[0]["source"]))
    ast.parse(first, feature_version=(3, 8))  # an older Python reads the whole cell before it runs the check
    monkeypatch.setattr("sys.version_info", (3, 11, 13))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"^kvjax needs Python 3\.12 or later"):
        exec(first, {"installed": None})
