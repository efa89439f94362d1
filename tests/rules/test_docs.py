"""The documentation site builds without a warning, has a page for every method, and its worked example is right."""

from __future__ import annotations

import ast
import html
import importlib.util
import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import kvjax
import models
from experiments.evaluation import examples, load
from experiments.lab.site import (
    method_costs,
    method_pages,
    method_scores,
    operations,
    pages,
    record_pages,
    record_tables,
)
from kvjax import registry
from kvjax.testing import laws
from kvjax.testing.subject import Subject
from tests import harness
from tests.kvjax import cases
from tests.rules import test_notebooks

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
RECORDS = DOCS / "records"


def build_site(folder, **environment):
    """The site as users build it, which runs the notebooks, under variables of the ``environment``."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    built = subprocess.run(
        [*command, "-d", str(folder / "trees"), str(DOCS), str(folder / "html")],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},  # this process may hold the memory of a GPU
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder / "html"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """One test, because one build takes most of its time: no warning, nothing is missing, notebooks print what they say."""
    site = build_site(tmp_path, **test_notebooks.kernel_environment(tmp_path / "kernel"))
    check_method_pages(site)
    check_links_of_the_readme(site)
    check_public_names(site)
    for path in test_notebooks.NOTEBOOKS:
        page = (site / "notebooks" / f"{path.stem}.html").read_text(encoding="utf-8")
        test_notebooks.check_outputs(path.stem, html.unescape(page))


def check_method_pages(site):
    """Every method has a page with its parts and knobs, and no markup shows."""
    listed = (site / "methods" / "index.html").read_text()
    for name, cls in registry.classes().items():
        html = (site / "methods" / f"{name}.html").read_text()
        assert f"{name}.html" in listed
        assert f"https://arxiv.org/abs/{cls.PAPER.removeprefix('arXiv:')}" in html
        for title in ("Source", "Departures", "Knobs", "Memory"):
            assert f"<h2>{title}<" in html, f"{name} has no part {title}"
        for knob in registry.knobs(cls):
            kind = "traced" if knob.traced else "static"
            row = rf"<span class=\"pre\">{knob.name}</span></code></p></td>\s*<td>[^\n]*</td>\s*<td><p>{kind}</p>"
            assert re.search(row, html), f"{name}'s page lacks {knob.name}"
        body = html.partition("<article")[2].partition("</article>")[0]
        assert "``" not in body and "**" not in re.sub(r"<(pre|code).*?</\1>", "", body, flags=re.DOTALL)


def check_links_of_the_readme(site):
    """What the README links to in docs exists, and is a page of the site if it is text."""
    targets = re.findall(r"\]\((docs/[^)#]+)\)", (ROOT / "README.md").read_text())
    assert targets
    for target in targets:
        path = ROOT / target
        assert path.exists(), f"README links to {target}, which does not exist"
        page = site / path.relative_to(DOCS).with_suffix(".html")
        assert path.suffix != ".md" or page.exists(), f"README links to {target}, which the site lacks"


def check_public_names(site):
    """The API page has every public name."""
    html = (site / "api.html").read_text()
    public = [f"kvjax.{name}" for name in kvjax.__all__ if callable(getattr(kvjax, name))]
    for name in [*public, *(f"models.{name}" for name in models.__all__)]:
        assert f'id="{name}"' in html, f"docs/api.md lacks {name}"


# ---- what pages are made of -------------------------------------------------------------------------------------------


def test_docstring_becomes_markdown():
    docstring = """Name: the idea.

    Stored: keys_of ``a_b`` and `SnapKV`, `extend`::

        s_i = a * b

        t = **c**

    More text
    on two lines.

    **Source**: A. Uthor (arXiv:2406.10774); some/Code 0123abc.
    **Departures** (few): none.
    """
    parts = method_pages.sections("\n".join(line.removeprefix("    ") for line in docstring.splitlines()), "quest")
    assert parts == [
        (
            "What is stored and how it is scored",
            "Keys\\_of `a_b` and [`SnapKV`](snapkv.md), `extend`:\n\n"
            "```text\ns_i = a * b\n\nt = **c**\n```\n\nMore text on two lines.",
        ),
        (
            "Source",
            "A. Uthor ([arXiv:2406.10774](https://arxiv.org/abs/2406.10774)); "
            "[some/Code 0123abc](https://github.com/some/Code/tree/0123abc).",
        ),
        ("Departures", "Few: none."),
    ]


def test_unknown_method_is_refused():
    with pytest.raises(ValueError, match="expected a method, one of adakv, .*got 'qest'"):
        method_pages.page("qest", DOCS)


def test_memory_is_what_a_full_cache_takes():
    """Worked out by hand: 32 layers of 8 heads, a key and a value of 128 bfloat16 and an int32 position per slot."""
    config = models.shapes.llama31_8b()
    slots = 32_768 + method_costs.NEW_TOKENS
    assert method_costs.held_bytes(registry.make("full"), config, 32_768) == 32 * (8 * slots * (512 + 4) + 4)
    assert "516 bytes per layer and KV head" in method_costs.memory("full")
    assert "costs nothing once the budget is full" in method_costs.memory("snapkv")


def test_scores_are_the_records(tmp_path):
    row = {"method": "Quest", "task": "qa", "length": 4096, "score": 50.0, "interval_95": [40.0, 60.0], "samples": 8}
    rows = [
        {**row, "question": "extend", "attended_tokens": 100.0},
        {**row, "question": "extend", "task": "vt", "score": 75.0, "interval_95": None, "attended_tokens": 200.0},
        {**row, "question": "prefill", "score": 12.5},
        {**row, "method": "quest(budget=1/8)", "question": "extend", "name": "qa", "depth": 0.5, "length": None},
        {**row, "method": "full"},
    ]
    folder = tmp_path / "records" / "results" / "tiny"
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps({"rows": rows, "date": "2026-01-02T03"}))
    text = method_scores.scores("quest", tmp_path)
    assert "| `qa` | 50.0 (40 - 60) |\n| `vt` | 75.0 |\n| **mean** | 62.5 |\n| tokens attended | 150 |" in text
    assert "question after compression; 8 samples a cell" in text
    assert "| `qa` | 12.5 (40 - 60) |\n\nquestion in the prompt" in text
    assert "| task | as given |" in text and "| `qa`, depth 50% | 50.0" in text and "`quest(budget=1/8)`" in text
    assert "2026-01-02; [record](../records/results/tiny/metrics.json)." in text
    assert method_scores.scores("snapkv", tmp_path) == "" == method_costs.speed("snapkv", tmp_path)
    with pytest.raises(ValueError, match="expected one cell per task and length"):
        method_scores.score_tables([rows[0], rows[0]])


def test_scores_of_result_folders_are_on_the_page():
    record = json.loads((RECORDS / "results" / "toy" / "metrics.json").read_text())
    row = next(x for x in record["metrics"] if (x["task"], x["method"], x["length"]) == ("vt", "tokenselect", 8192))
    low, high = row["interval_95"]
    assert f"| `vt` | {row['value']:.1f} ({low:.0f} - {high:.0f}) |" in method_pages.page("TokenSelect", DOCS)


def test_measured_rows_equal_the_speed_record():
    record = json.loads((RECORDS / "speed.json").read_text())
    row = next(x for x in record["metrics"] if (x["name"], x["method"]) == ("decode", "pariskv"))
    text = method_costs.speed("pariskv", DOCS)
    assert f"| {row['length']:,} | {row['batch']} | {1e3 * row['value']:.2f} (" in text
    assert f"| {row['ratio']:.2f} |" in text


def test_every_record_is_listed():
    text = record_pages.page(DOCS)
    for path in [*RECORDS.glob("*.json"), *RECORDS.glob("ablations/*.json")]:
        record = json.loads(path.read_text())
        if "commit" not in record:  # no record of `experiments.records.record`
            continue
        line = next(line for line in text.splitlines() if f"({path.relative_to(DOCS).as_posix()})" in line)
        assert record["date"][:10] in line and record["device"]["kind"] in line


def test_tables_equal_their_records():
    """Tables of result folders, too: without their predictions, `examples.npz` holds what the tables need."""
    made = record_tables.pages(DOCS)
    assert {RECORDS / "results" / "toy" / "table.md", DOCS / "tables" / "speed.md"} < made.keys()
    for file, text in made.items():
        assert file.read_text(encoding="utf-8") == text, f"{file}: run python -m experiments.lab.site docs --tables"


def test_scores_equal_the_means_of_their_examples():
    """A row and its examples come from one run, so that a score and its difference to Full cannot disagree."""
    folders = [file.parent for file in sorted(RECORDS.glob("results/*/examples.npz"))]
    entries = [entry for folder in folders for entry in load([folder]) if entry.row["unit"] == "percent"]
    assert len(folders) > 20 and len(entries) > 2000
    for entry in entries:
        mean = 100 * sum(entry.scores.values()) / len(entry.scores)
        assert abs(mean - entry.row["value"]) < 0.02, (entry.folder.name, entry.row["predictions"])


def test_the_figures_that_pages_show_are_known_and_there():
    files = [ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("tables/*.md"), *RECORDS.glob("*/*/*.md")]
    files += [*(ROOT / "notebooks").glob("*.ipynb"), *ROOT.glob("models/*/MODEL_CARD.md")]
    shown = [x for file in files for x in re.findall(r"[(/]records/([^)\s]+\.png)", file.read_text(encoding="utf-8"))]
    assert set(shown) == pages.figures(DOCS).keys()
    for file in shown:
        assert (RECORDS / file).is_file(), f"{file}: run python -m experiments.lab.site docs --figures, and git add -f"


def titles_of_pages():
    """The title of every page that is kept, by file; code in a page has no titles."""
    files = [*DOCS.glob("*.md"), *DOCS.glob("tables/*.md"), *DOCS.glob("notebook/*.md"), *RECORDS.glob("*/*/*.md")]
    made = {}
    for file in files:
        text = re.sub(r"^```.*?^```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        (made[file],) = re.findall(r"^# (.+)$", text, re.MULTILINE)
    return made


def test_every_page_has_one_title_of_its_own_and_speed_names_its_card():
    titles = titles_of_pages()
    assert len(set(titles.values())) == len(titles)
    for file, title in titles.items():
        if file.parent.name == "tables" and (file.stem.startswith(("speed", "offload")) or file.stem in ("kernels", "peers")):
            device = json.loads((RECORDS / f"{file.stem}.json").read_text())["device"]
            assert device["kind"] in title, file


def test_the_front_page_has_a_result_and_a_figure():
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    assert re.search(r"!\[.+\]\(records/.+\.png\)", text)
    for begin, end in re.findall(r':start-after: "(.+)"\n:end-before: "(.+)"', text):
        part = (ROOT / "README.md").read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]
        assert len(part) > 500, "the README still has the part that the front page shows"


def test_a_missing_figure_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "FIGURES", {"ablations/drift.png": pages.FIGURES["ablations/drift.png"]})
    file = tmp_path / "records" / "ablations" / "drift.png"
    file.parent.mkdir(parents=True)
    shutil.copy(RECORDS / "ablations" / "drift.json", file.parent)
    assert pages.draw_figures(tmp_path, again=False) == [file] and file.read_bytes().startswith(b"\x89PNG")
    assert pages.draw_figures(tmp_path, again=False) == [] and pages.draw_figures(tmp_path) == [file]


def test_parts_of_pages_equal_their_records():
    made = pages.marked_pages(DOCS)
    assert {ROOT / "README.md", DOCS / "quality.md", DOCS / "quality-toy.md", DOCS / "choosing.md"} <= made.keys()
    for file, text in made.items():
        assert file.read_text(encoding="utf-8") == text, f"{file}: run python -m experiments.lab.site docs --tables"


def test_what_is_kept_of_predictions_is_small():
    """About four bytes an example; the record of the main table has some 75 settings of 1,100 to 1,500 examples."""
    for folder in (RECORDS / "results").iterdir():
        assert (folder / examples.FILE).stat().st_size < 600_000


def test_pages_that_the_index_does_not_name_are_found(tmp_path):
    (tmp_path / "tables").mkdir()
    (tmp_path / "records" / "results" / "tiny").mkdir(parents=True)
    for name in ("index", "records", "named", "new", "tables/one", "records/results/tiny/report"):
        (tmp_path / f"{name}.md").write_text("```{toctree}\nnamed\n```\n")
    assert record_pages.other_pages(tmp_path) == ["new", "tables/one", "records/results/tiny/report"]
    assert "\n\nnew\ntables/one\nrecords/results/tiny/report\n```\n" in record_pages.page(tmp_path)


# ---- the worked example of docs/adding_a_method.md ----------------------------------------------------------------------


def blocks_of_the_page():
    """The Python code of the page: the method, its oracle, the import line, and the test file of an outside method."""
    return re.findall(r"```python\n(.*?)```", (DOCS / "adding_a_method.md").read_text(), re.DOTALL)


def test_worked_example_is_the_code_of_the_library():
    method, oracle, line, _ = blocks_of_the_page()
    assert method == (ROOT / "kvjax" / "methods" / "tova.py").read_text()
    assert oracle == (ROOT / "tests" / "oracles" / "tova.py").read_text()
    assert line in (ROOT / "kvjax" / "methods" / "__init__.py").read_text()
    code = ast.parse(method)
    assert method.count("\n") - code.body[0].end_lineno <= 40, "an evicting method should take at most 40 lines"


@pytest.fixture
def worked_example(tmp_path, monkeypatch):
    """`TOVA` and its oracle as the page has them, instead of the library's."""
    method, oracle, *_ = blocks_of_the_page()
    made = {}
    for module, text in (("kvjax.methods.tova", method), ("tests.oracles.tova", oracle)):
        path = tmp_path / f"{module}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(module, path)
        made[module] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module, made[module])
        spec.loader.exec_module(made[module])
    monkeypatch.setattr(kvjax.methods, "TOVA", made["kvjax.methods.tova"].TOVA)


@pytest.mark.usefixtures("quick_compile", "worked_example")
def test_worked_example_agrees_with_its_oracle():
    q, k, v, lengths = cases.batch("tova", 2, 2, 16, seed=1)
    knobs, frequencies = harness.oracle("tova").KNOBS, harness.frequencies(16)
    assert cases.run("tova", knobs, q, k, v, lengths, frequencies) == len(lengths) * 10


@pytest.mark.usefixtures("quick_compile", "worked_example")
def test_worked_example_obeys_a_law():
    """One law as a sample: tests/kvjax/test_contract.py runs all of them on the library's copy."""
    laws.rows_are_independent(Subject(harness.example("tova"), harness.TINY, harness.tiny_params()))


@pytest.mark.usefixtures("worked_example")
def test_worked_example_has_a_page_and_knobs():
    text = method_pages.page("tova", DOCS)
    assert "| `budget` | `1024` | traced | tokens kept per KV head" in text
    assert "## Score\n\nScore of token i in a layer" in text
    with pytest.raises(ValueError, match="TOVA: budget must be a whole number of at least 1, got 0"):
        kvjax.make("tova", budget=0)


# ---- coming from kvpress or transformers ------------------------------------------------------------------------------


def test_the_calls_of_the_page_for_other_libraries_exist():
    """Every call of kvjax in its code has these arguments, and every method of its tables exists."""
    text = (DOCS / "coming_from.md").read_text()
    calls = 0
    for block in re.findall(r"```python\n(# kvjax.*?)```", text, re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("kvjax."):
                found = eval(ast.unparse(node.func), {"kvjax": kvjax})
                inspect.signature(found).bind(*node.args, **{keyword.arg: keyword.value for keyword in node.keywords})
                calls += 1
    assert calls >= 6
    for name in re.findall(r"`([A-Z]\w+)(?:\(|`)", text.partition("## The presses")[2].partition("## Score")[0]):
        if not name.endswith("Press"):
            assert name.lower() in {**registry.builtin(), **registry.WRAPPERS}, name


# ---- the page of operations -------------------------------------------------------------------------------------------


def test_the_page_of_operations_has_all_of_them_and_the_methods_that_call_them():
    rows = {row["name"]: set(row["methods"]) for row in json.loads((RECORDS / operations.FILE).read_text())["metrics"]}
    assert rows.keys() == operations.operations().keys()
    text = (DOCS / "operations.md").read_text()
    for name, (_, table, _) in operations.operations().items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"| [`{name}`]")]
        assert all(f"`{kernel}` (" in line for kernel in table.implementations if kernel != "xla")
    known = {*registry.builtin(), *registry.WRAPPERS}
    assert set().union(*rows.values()) == known, "python -m experiments.lab.site docs --tables --operations traces them again"
    for method in ("snapkv", "pariskv"):
        assert operations.uses(method) == {name for name, methods in rows.items() if method in methods}
