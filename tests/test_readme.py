"""The README is true: its table is the code's, its snippet runs, its test command is what CI runs."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re

from kvjax import registry

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_method_table_is_generated():
    found = re.search(r"<!-- methods:[^>]*-->\n(.*)<!-- end of methods -->", README, re.DOTALL)
    assert found.group(1).strip() == registry.markdown()


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


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), f"README links to {target}, which does not exist"
