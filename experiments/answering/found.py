"""Where a model is on this machine, how large it is, and its licence."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import models
from models.gguf_files import locate


@dataclasses.dataclass(frozen=True)
class Found:
    """A model on this machine.

    Attributes:
        name: its name, repository or path.
        directory: where it is.
        size: bytes of its files.
        licence: as its table or its repository's page states it, "not stated" otherwise.
    """

    name: str
    directory: pathlib.Path
    size: int
    licence: str


def find(name: str, *, offline: bool = False) -> Found:
    """A model's place on this machine; the model is downloaded if it is not there.

    Args:
        name: see `models.checkpoint_directory`.
        offline: whether to raise an error instead of downloading.

    Raises:
        OSError, ValueError, ModuleNotFoundError: see `models.checkpoint_directory`.
        FileNotFoundError: the directory holds no model.
        ValueError: the directory holds several GGUF files.
    """
    directory = models.checkpoint_directory(name, offline=offline)
    if not (directory / "config.json").is_file() and locate(directory) is None:
        raise FileNotFoundError(f"no config.json and no GGUF file in {directory}")
    named = models.NAMED_MODELS.get(name)
    licence = named.licence if named else _stated(directory / "README.md")
    files = [path for path in directory.rglob("*") if path.is_file()]
    return Found(name, directory, sum(path.stat().st_size for path in files), licence)


def _stated(card: pathlib.Path) -> str:
    """The licence that a model card states in the lines before its text."""
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    head = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    found = re.search(r"(?m)^license(?:_name)?: *['\"]?([\w.+-]+)", head.group(1)) if head else None
    return found.group(1) if found else "not stated"
