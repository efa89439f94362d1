"""The documentation site builds without a warning, runs the notebooks, and makes its tables from docstrings and records."""

import ast
import html
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

import kvjax
import models
from experiments.cli import read_record
from experiments.cli.settings import parse
from experiments.evaluation import EvaluationSettings
from experiments.evaluation.__main__ import Output
from experiments.lab.site import catalogue, methods, records, scores
from kvjax import registry

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
EIGHT = {  # tasks that count at 16K
    "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multivalue", "niah_multiquery", "vt",
    "number_string",
}  # fmt: skip
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CLAIMS = {
    "quickstart": [
        "Full: 4 of 4 right",
        "Quest: 4 of 4 right",
        "SnapKV: 0 of 4 right",
        "5 settings in 1 group",
        "8.5 GiB in all",
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
        assert cls.PAPER.replace("arXiv:", "https://arxiv.org/abs/") in page
        assert all(f"<h2>{title}<" in page for title in ("Source", "Departures", "Knobs")), name
        body = re.sub(r"<(pre|code).*?</\1>", "", page.partition("<article")[2].partition("</article>")[0], flags=re.DOTALL)
        assert "``" not in body and "**" not in body, f"{name}: markup shows"
    api = (site / "api.html").read_text(encoding="utf-8")
    public = [f"kvjax.{name}" for name in kvjax.__all__ if callable(getattr(kvjax, name))]
    for name in [*public, *(f"models.{name}" for name in models.__all__)]:
        assert f'id="{name}"' in api, f"docs/api.md lacks {name}"
    assert "pallas_triton" in (site / "operations.html").read_text(encoding="utf-8")
    table = (site / "tables" / "scores.html").read_text(encoding="utf-8")
    rows = json.loads(re.search(r'id="scores-data">(.*?)</script>', table, re.DOTALL)[1])["rows"]
    assert len(rows) > 1000 and (site / "_static" / "scores.js").is_file() and "_static/scores.css" in table
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
    assert pages.keys() == {"index.md", "scores.md", "offload-h200.md", "speed-h200.md", "fidelity-int8.md"}
    assert "| Full |" in pages["fidelity-int8.md"] and "(speed-h200.md)" in pages["index.md"]
    quest = methods.pages(DOCS)["quest.md"]
    assert "| `num_dense_layers` | `2` | static |" in quest and "## Measured" in quest and "ms on an H200" in quest
    assert "| `gather_attention` |" in catalogue.operations() and "| `llama` | Llama 3" in catalogue.families()


_ASK = """const [data, Scores] = [JSON.parse(require("fs").readFileSync(0)), require(process.argv[1])];
const quest = Scores.filter(data, {...Scores.FIRST, method: "quest", most: "30"});
console.log(JSON.stringify({
  quest: Scores.sort(data, quest, "score", true), sorted: Scores.sort(data, data.rows, "of the oracle", true),
  commands: data.rows.map((row) => Scores.command(data, row)), tasks: Scores.values(data, "task"), clicked: clicked(),
}));
function clicked() {  // the page in as much of a browser as it needs
  class Node {
    childNodes = []; dataset = {};
    get all() { return this.parent.childNodes; }
    get nextSibling() { return this.all[this.all.indexOf(this) + 1]; }
    appendChild(node) { this.childNodes.push(node); node.parent = this; return node; }
    after(node) { node.remove(); this.all.splice(this.all.indexOf(this) + 1, 0, node); }
    remove() { this.all.splice(this.all.indexOf(this), 1); }
    replaceChildren() { this.childNodes = []; }
  }
  global.document = {createElement: () => new Node()};
  const root = new Node();
  Scores.show(root, data);
  const body = root.childNodes[2].childNodes[1], line = body.childNodes[3], before = body.childNodes.length;
  line.onclick();
  const below = body.childNodes[4].childNodes[0].childNodes[0].textContent;
  line.onclick();
  const names = line.childNodes.map((cell) => cell.dataset.name);
  const tokens = root.childNodes[0].childNodes[2].childNodes[0];
  const shut = [names, line.childNodes[6].textContent, below, body.childNodes.length - before];
  tokens.onchange({target: {value: "1"}});
  return [...shut, root.childNodes[1].textContent];
}
"""


def test_the_table_of_all_scores_sorts_filters_and_says_how_to_measure_a_cell_again():
    """The script of the page in Node, on a record; its commands are read as `kvjax eval` reads them."""
    folder = DOCS / "records" / "results" / "qwen-16k"
    data = scores.data([folder])
    at = {name: place for place, name in enumerate(scores.COLUMNS)}
    (own,) = (row for row in data["rows"] if row[at["method"]] == "Quest" and row[at["task"]] == scores.MEAN)
    metrics = read_record(folder)["metrics"]
    cells = [row["value"] for row in metrics if row["method"] == "quest" and row["name"] in EIGHT]
    assert own[at["score"]] == round(sum(cells) / 8, 1) and len(cells) == 8
    oracle = at["of the oracle"]  # on fewer samples than the others
    assert own[oracle] and sum(row[oracle] is not None for row in data["rows"] if row[at["task"]] == scores.MEAN) > 50
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node")
    for place, row in enumerate(data["rows"]):
        row[oracle] = None if place % 3 else place
    script = [node, "-e", _ASK, str(DOCS / "_static" / "scores.js")]
    done = subprocess.run(script, input=json.dumps(data), capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(done.stdout)
    wanted = {"task": scores.MEAN, "tokens": 16384, "question": "prefill", "model": "qwen2.5-coder-1.5b"}
    quest = [row for row in data["rows"] if "Quest" in row[0] and all(row[at[name]] == x for name, x in wanted.items())]
    assert len(found["quest"]) == sum(row[at["of Full's"]] <= 30 for row in quest) < len(quest)
    assert [row[at["score"]] for row in found["quest"]] == sorted((row[at["score"]] for row in found["quest"]), reverse=True)
    numbers = [row[oracle] for row in found["sorted"]]
    full = [x for x in numbers if x is not None]
    assert full == sorted(full, reverse=True) and numbers == full + [None] * (len(numbers) - len(full))
    assert {scores.MEAN, *EIGHT} <= set(found["tasks"])
    first = [(row, text) for row, text in zip(data["rows"], found["commands"], strict=True)
             if all(row[at[name]] == value for name, value in wanted.items())]  # fmt: skip
    row, text = sorted(first, key=lambda each: -each[0][at["score"]])[3]
    nothing = f'0 rows here; {len(data["rows"])} of such methods with other choices above: take "all" there.'
    assert found["clicked"] == [list(scores.COLUMNS[:-2]), str(row[at["score"]]), text, 0, nothing]
    today = [shlex.split(line) for line in found["commands"] if not line.startswith("measured at commit ")]
    assert len(today) > 0.9 * len(found["commands"])
    for line in today[:: len(today) // 5]:
        settings, *_ = parse([EvaluationSettings, Output], line[2:])
        assert line[:2] == ["kvjax", "eval"] and len(settings.methods) == 1
        assert settings.samples in {row["samples"] for row in metrics}


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
