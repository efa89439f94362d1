"""The repository's address, which pyproject.toml holds, in every other file that has to spell it out."""

from __future__ import annotations

import pathlib
import re
import tomllib

PLACEHOLDER = "OWNER"  # of an address that nobody has filled in
_FILES = ("*.md", "*.cff", "docs/**/*.md", "models/*/*.md", "notebooks/*.ipynb")
_SPELLED = re.compile(r"(github\.com/|/github/)[\w.-]+/kvjax\b")


def owner(root: pathlib.Path) -> str:
    """Read the owner's name from the address in pyproject.toml.

    Raises:
        ValueError: the address is not of the form https://github.com/OWNER/kvjax.
    """
    urls = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    found = re.fullmatch(r"https://github\.com/([\w.-]+)/kvjax", urls["Repository"])
    if found is None:
        raise ValueError(f"pyproject.toml: expected https://github.com/OWNER/kvjax as Repository, got {urls['Repository']!r}")
    return found[1]


def addressed(root: pathlib.Path) -> dict[pathlib.Path, str]:
    """Write the address into the text of every file that spells it out; return the texts by file."""
    name = owner(root)
    files = sorted({file for pattern in _FILES for file in root.glob(pattern)})
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    return {file: _SPELLED.sub(rf"\g<1>{name}/kvjax", text) for file, text in texts.items() if _SPELLED.search(text)}
