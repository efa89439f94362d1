"""``kvjax fetch NAME``: download a model into the cache that the other commands read, and say where it is."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import sys

import models
from experiments.cli import Job, option
from models.files.directories import locate_gguf


@dataclasses.dataclass(frozen=True)
class FetchCommand:
    """What to download.

    Attributes:
        name: a name (see kvjax ls models), or a repository OWNER/NAME of the hub
        offline: only look whether it is on this machine
        json: print JSON
    """

    name: str = option(positional=True, metavar="NAME")
    offline: bool = False
    json: bool = False


@dataclasses.dataclass(frozen=True)
class Found:
    """A model on this machine.

    Attributes:
        name: the model's name, repository or path.
        directory: the directory of the model's files.
        size: bytes of the files.
        licence: the licence that `models.NAMED_MODELS` or the model card states, else "not stated".
    """

    name: str
    directory: pathlib.Path
    size: int
    licence: str


def find(name: str, *, offline: bool = False) -> Found:
    """Find a model on this machine, see `models.checkpoint_directory`; unless ``offline``, download it first if it is absent.

    A directory without a model is refused by a ``FileNotFoundError``, and one with several GGUF files by a ``ValueError``.
    """
    directory = models.checkpoint_directory(name, offline=offline)
    if not (directory / "config.json").is_file() and locate_gguf(directory) is None:
        raise FileNotFoundError(f"no config.json and no GGUF file in {directory}")
    named = models.NAMED_MODELS.get(name)
    licence = named.licence if named else _stated(directory / "README.md")
    files = [path for path in directory.rglob("*") if path.is_file()]
    return Found(name, directory, sum(path.stat().st_size for path in files), licence)


def _stated(card: pathlib.Path) -> str:
    """Read the licence that a model card states in the lines before its text."""
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    head = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    licence = re.search(r"(?m)^license(?:_name)?: *['\"]?([\w.+-]+)", head.group(1)) if head else None
    return licence.group(1) if licence else "not stated"


def _fetch(command: FetchCommand) -> None:
    """Print the directory, the size and the licence."""
    model = find(command.name, offline=command.offline)
    if command.json:
        print(json.dumps({**dataclasses.asdict(model), "directory": str(model.directory)}))
    else:
        print(f"{model.directory}\nsize: {model.size / 1e6:.0f} MB\nlicence: {model.licence}")


main = Job(_fetch, FetchCommand)


if __name__ == "__main__":
    sys.exit(main())
