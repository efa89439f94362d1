"""``kvjax fetch NAME``: download a model into the cache that the other commands read, and say where it is."""

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


def find(name: str, *, offline: bool = False) -> dict[str, str | int]:
    """Find a model on this machine, see `models.checkpoint_directory`; unless ``offline``, download it first if it is absent.

    Returns its name, directory, size in bytes, and the licence that `models.NAMED_MODELS` or the model card states. A folder
    without a model is refused by a ``FileNotFoundError``, and one with several GGUF files by a ``ValueError``.
    """
    directory = models.checkpoint_directory(name, offline=offline)
    if not (directory / "config.json").is_file() and locate_gguf(directory) is None:
        raise FileNotFoundError(f"no config.json and no GGUF file in {directory}")
    named = models.NAMED_MODELS.get(name)
    licence = named.licence if named else _stated(directory / "README.md")
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return {"name": name, "directory": str(directory), "size": size, "licence": licence}


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
        print(json.dumps(model))
    else:
        print(f"{model['directory']}\nsize: {int(model['size']) / 1e6:.0f} MB\nlicence: {model['licence']}")


main = Job(_fetch, FetchCommand)


if __name__ == "__main__":
    sys.exit(main())
