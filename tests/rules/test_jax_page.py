"""The code of docs/jax_programs.md runs, from the first block to the last."""

from __future__ import annotations

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "jax_programs.md"


@pytest.mark.slow
def test_code_of_the_page_runs(quick_compile):
    text = PAGE.read_text()
    scope: dict = {}
    for found in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        line = text[: found.start()].count("\n") + 1
        exec(compile("\n" * line + found[1], str(PAGE), "exec"), scope)
    assert scope["tokens"].shape == (2, 4) and scope["drawn"].shape == (4, 2) and scope["logits"].shape == (2, 61)
