"""Pages are true where a machine can tell: links, paths, commands, code, versions, and the README's numbers."""

import ast
import contextlib
import importlib.util
import inspect
import io
import json
import pathlib
import re
import shlex
import tomllib

import pytest
import yaml

import kvjax
from experiments.cli.main import COMMANDS
from experiments.lab import fits
from experiments.lab.site import records
from experiments.records import method_title
from kvjax import registry

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("models/**/MODEL_CARD.md"), *DOCS.glob("*.md")]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def text_of(page):
    """The text of a page without the commands of finished studies, which are of other commits."""
    return re.sub(r"at commit [0-9a-f]{8}: `[^`]+`", "", page.read_text(encoding="utf-8"))


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)


def test_links_lead_to_files():
    made, broken = ("methods/", "notebooks/", "tables/"), []  # by the site
    for page in [*PAGES, *DOCS.glob("notebook/*.md"), *(ROOT / "notebooks").glob("*.ipynb")]:
        for target in re.findall(r"\]\(([^)#:\s]+)[^):]*\)", text_of(page)):
            inside = target.removeprefix("../") if page.parent.name == "notebook" else target
            if not (page.parent / target).exists() and not (DOCS in page.parents and inside.startswith(made)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


def headings(page):
    """The names by which links find a page's headings, as GitHub and the site make them."""
    lines = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", re.sub(r"\]\([^)]*\)", "", line).strip().lower()).replace(" ", "-") for line in lines}


def test_links_lead_to_headings():
    pages = {page.resolve(): page for page in [*PAGES, *DOCS.glob("notebook/*.md")]}
    links = [(x, *link) for x in pages.values() for link in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", text_of(x))]
    found = [(pages.get((page.parent / name).resolve() if name else page), page, anchor) for page, name, anchor in links]
    assert not [f"{x.relative_to(ROOT)}: {anchor}" for to, x, anchor in found if to and anchor not in headings(to)]


def test_paths_in_code_spans_exist():
    """Files that a command writes, and names with a part left open, do not count."""
    paths = re.compile(r"(?<![\w/.])(?:docs|experiments|kvjax|models|pallas_kernels|tests)/[\w/.-]+\.\w+\b(?!\()")
    spans = [(page, span) for page in PAGES for span in re.findall(r"`([^`\n]+)`", text_of(page)) if not {*"<*"} & {*span}]
    spans = [(page, path) for page, span in spans for path in paths.findall(span) if f"--out {path}" not in span]
    assert not [f"{page.relative_to(ROOT)}: {path}" for page, path in spans if not (ROOT / path).exists()]


def test_commands_exist_and_their_settings_files_too():
    wrong = []
    for page in (page for page in PAGES if page.name != "CHANGELOG.md"):  # which says where commands went
        for line in commands(page):
            files = [ROOT / file for file in re.findall(r"--config (docs/\S+)", line)]
            if re.search(r"\bkvjax ([a-z-]+)", line)[1] not in COMMANDS or not all(file.is_file() for file in files):
                wrong.append(f"{page.relative_to(ROOT)}: {line}")
        names = {*re.findall(r"python -m (experiments[\w.]*\w)", text_of(page))}
        wrong += [f"{page.relative_to(ROOT)}: {name}" for name in names if not importlib.util.find_spec(name)]
    assert not wrong


def commands(page):
    """The code spans and blocks of a shell of a page that begin with a command of ours."""
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"`((?:python -m )?kvjax [a-z][^`]*)`", text_of(page))
    return [line for line in [*lines, *spans] if re.match(r"(\S*python -m )?kvjax [a-z]", line)]


@pytest.mark.usefixtures("quick_compile")
def test_the_program_of_the_readme_finds_the_needle():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(blocks(ROOT / "README.md", "python")[0], "README.md", "exec"), {})
    answer, stats = printed.getvalue().splitlines()
    assert answer.strip() == "4711042." and "tokens attended" in stats


def test_ci_runs_the_commands_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    first, tests = (block.strip() for block in blocks(ROOT / "README.md", "sh")[:2])
    assert tests in script
    assert " ".join(shlex.split(first.rpartition("&&")[2])[1:4]) == "-m kvjax demo" and "-m kvjax demo" in script


def cells_of(heading):
    """The rows of the first table below a heading of the README, by the first cell."""
    lines = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return rows[0], {row[0]: row for row in rows[2:]}


def test_quality_of_the_readme_is_the_records():
    """Means over the tasks on which Full has at least 60, code left out; a cell may say more behind the number."""
    head, rows = cells_of("Quality")
    columns = {length: at for at, name in enumerate(head) for length in (16, 32) if name == f"score at {length}K"}
    assert len(rows) >= 5 and columns
    for length, at in columns.items():
        folder = DOCS / "records" / "results" / f"qwen-{length}k"
        means = {row["method"]: float(row["score"]) for row in records.rows(folder) if "(" not in row["method"]}
        for name, row in rows.items():
            assert float(row[at].split()[0]) == means[name], (name, length)


def test_speed_of_the_readme_is_the_record():
    """The first number of a cell is milliseconds per token at 131,072 tokens; rows of several methods are left out."""
    head, rows = cells_of("Speed")
    record = json.loads((DOCS / "records" / "speed-h200.json").read_text(encoding="utf-8"))
    at = head.index("ms per token")
    times: dict[str, set[str]] = {}
    for row in record["metrics"]:
        if (row["name"], row["length"], row["batch"], row["error"]) == ("decode", 131_072, 1, None):
            times.setdefault(method_title(row["method"]), set()).add(f"{1e3 * row['value']:.2f}")
    single = {name: row for name, row in rows.items() if name in times}
    assert len(single) >= 5
    for name, row in single.items():
        assert row[at].split()[0] in times[name], name


def test_every_method_is_in_the_readme_and_links_to_its_file():
    for cls in registry.builtin().values():
        assert re.search(rf"\b({cls.__name__}|{cls.TITLE or cls.__name__})\b", README), cls


def test_the_worked_example_is_the_library():
    method, oracle, line, *_ = blocks(DOCS / "adding_a_method.md", "python")
    assert method == (ROOT / "kvjax" / "methods" / "tova.py").read_text()
    assert oracle == (ROOT / "tests" / "oracles" / "tova.py").read_text()
    assert line in (ROOT / "kvjax" / "methods" / "__init__.py").read_text()


def test_calls_of_the_page_for_other_libraries_fit():
    """Every call of kvjax in its code has these arguments, and every method of its tables exists."""
    page, calls = DOCS / "coming_from.md", 0
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)) if block.startswith("# kvjax") else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("kvjax."):
                function = eval(ast.unparse(node.func), {"kvjax": kvjax})
                inspect.signature(function).bind(*node.args, **{keyword.arg: keyword.value for keyword in node.keywords})
                calls += 1
    assert calls >= 6


@pytest.mark.slow
def test_code_of_the_page_on_jax_runs(quick_compile):
    scope: dict = {}
    for block in blocks(DOCS / "jax_programs.md", "python"):
        exec(compile(block, "jax_programs.md", "exec"), scope)
    assert scope["tokens"].shape == (2, 4) and scope["drawn"].shape == (4, 2) and scope["logits"].shape == (2, 61)


@pytest.mark.slow
def test_code_of_the_page_on_rollouts_runs(quick_compile):
    exec(compile(blocks(DOCS / "rollouts.md", "python")[0], "rollouts.md", "exec"), {})


@pytest.mark.slow
def test_what_fits_is_what_memory_needed_says():
    """Cells of the page's table, and its code; beyond the model's positions the printed line says so."""
    page, scope, printed = text_of(DOCS / "fits.md"), {}, io.StringIO()
    rows = [[x.strip() for x in line.strip("| ").split("|")] for line in page.splitlines() if line.startswith("| ")]
    methods = next(row for row in rows if row[:2] == ["model", "GB"])
    for model, card, method in (("1.5B", 24, "full"), ("8B in int8", 24, "snapkv"), ("70B on 2", 141, "pariskv")):
        (row,) = (row for row in rows if row[:2] == [model, str(card)])
        assert row[methods.index(method)] == fits.cell(model, method, card), (model, card, method)
    with contextlib.redirect_stdout(printed):
        exec(blocks(DOCS / "fits.md", "python")[0], scope)
    assert "at the peak" in printed.getvalue() and "beyond" not in printed.getvalue()
    assert "24832 tokens are beyond" in str(
        kvjax.memory_needed("snapkv", scope["config"], **scope["sizes"] | {"prompt_slots": 65536})
    )


def test_version_and_address_are_those_of_pyproject():
    """A release is a tag v and the version, under which CHANGELOG.md says what is new."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (str(citation["version"]), citation["license"]) == (PROJECT["version"], PROJECT["license"].partition(" AND ")[0])
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]
    changes = text_of(ROOT / "CHANGELOG.md")
    assert f"## {PROJECT['version']}" in changes or "There is no release yet." in changes
    owner = PROJECT["urls"]["Repository"].removeprefix("https://github.com/").removesuffix("/kvjax")
    for file in [*PAGES, *(ROOT / "notebooks").glob("*.ipynb")]:
        assert {*re.findall(r"(?:github\.com|/github)/([\w.-]+)/kvjax\b", text_of(file))} <= {owner}, file
