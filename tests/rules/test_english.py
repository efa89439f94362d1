"""Plain English that a machine can check: see `tests.rules.english`, whose command lists the places."""

from __future__ import annotations

import ast

import pytest

from tests.rules.english import POINTING, broken, files, functions, sentences

PLACES = (
    "kvjax", "pallas_kernels", "models", "experiments", "tests", "docs", "README.md", "CONTRIBUTING.md", "ARCHITECTURE.md",
    "CHANGELOG.md",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_texts_are_plain(place):
    found = [line for path in files(place) for line in broken(path)]
    assert not found, "\n".join(found[:20])


def test_each_rule_finds_what_it_is_for():
    tree = ast.parse("def f():\n    '''The sum.'''\n\n@property\ndef g():\n    '''The sum.'''\n")
    assert [node.name for node, _ in functions(tree)] == ["f"]
    assert POINTING.search("the keys and those of the row") and not POINTING.search("the keys of the row")
    text = "One two. Three `a b c`:\n\n* four five\n* six\n\n| a | table |\n```sh\ncode here\n```\n"
    assert [" ".join(part.split()) for part in sentences(text) if part.strip()] == [
        "One two.", "Three X:", "* four five", "* six",
    ]  # fmt: skip
