"""The README and the pages beside it are true: tables, commands, links, paths and the file map agree with the code."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re

import pytest

from experiments.lab.site import method_pages
from experiments.lab.site.marks import with_parts
from kvjax import registry

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "models/builtin/MODEL_CARD.md")]
PAGES += sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "records.md"})  # which the site writes
NOTES = sorted((ROOT / "docs" / "notebook").glob("*.md"))  # their links work; their paths are those of their day
README = (ROOT / "README.md").read_text()


def test_method_table_is_generated():
    found = re.search(r"<!-- methods: generated[^>]*-->\n(.*?)<!-- end of methods -->", README, re.DOTALL)
    assert found.group(1).strip() == method_pages.front()
    for cls in registry.builtin().values():
        assert re.search(rf"\b{cls.__name__}\b", found.group(1))
    parts = {"methods": registry.markdown, "quality": lambda: "| a table |"}
    made = with_parts(README, parts)
    assert registry.markdown() in made and "| a table |\n<!-- end of quality -->" in made
    assert with_parts(made.replace(found.group(1), "\n"), parts) == made
    with pytest.raises(ValueError, match="a page has the part 'quality', expected one of methods"):
        with_parts(README, {"methods": registry.markdown})


def test_no_page_decodes_the_padding_of_rows():
    """Rows end in padding, which a tokenizer decodes as any token: pages show `Generation.texts`."""
    for page in [*PAGES, *(ROOT / "notebooks").glob("*.ipynb")]:
        found = re.search(r"\.decode\([^)\n]*(tokens\b|row\.tolist)", page.read_text(encoding="utf-8"))
        assert not found, f"{page}: {found[0]}"


@pytest.mark.usefixtures("quick_compile")
def test_snippet_finds_the_needle():
    source = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "README.md", "exec"), {})  # noqa: S102
    answer, stats = printed.getvalue().splitlines()
    assert answer.strip() == "4711042."
    assert "tokens attended" in stats


def test_ci_runs_the_readme_test_command():
    commands = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)
    tests = next(command for command in commands if "pytest" in command)
    assert tests in (ROOT / ".ci" / "run").read_text()


def test_readme_is_one_page():
    assert README.count("\n") <= 150


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda page: page.name)
def test_linked_files_exist(page):
    for target in re.findall(r"\]\(([^)#:]+)[^):]*\)", page.read_text()):
        assert (page.parent / target).exists() or is_made_by_the_site(page, target), f"{page.name} links to {target}"


def is_made_by_the_site(page, target):
    """Whether a page of the documentation links to a page that is written or copied there when the site is built."""
    return page.parent.name == "docs" and target.startswith(("methods/", "notebooks/", "records.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_code_spans_exist(page):
    """A path to a file of this repository; a command's output and names with a part left open do not count."""
    paths = re.compile(r"(?<![\w/.])(?:docs|experiments|kvjax|models|pallas_kernels|tests)/[\w/.-]+\.\w+\b(?!\()")
    for span in re.findall(r"`([^`\n]+)`", page.read_text()):
        for path in paths.findall(span):
            made = f"--out {path}" in span or "<" in span or "*" in span
            assert made or (ROOT / path).exists(), f"{page.name} names {path}"
