"""``kvjax fetch NAME``: download a model into the cache that the other commands read, and say where it is."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

from experiments.answering.found import find
from experiments.cli import option, run


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvjax fetch``; return the exit code."""
    about = "Download a model, so that the other commands need no network."
    return run(_fetch, FetchCommand, prog="kvjax fetch", about=about, argv=argv)


def _fetch(command: FetchCommand) -> None:
    """Print the directory, the size and the licence."""
    found = find(command.name, offline=command.offline)
    if command.json:
        print(json.dumps({**dataclasses.asdict(found), "directory": str(found.directory)}))
    else:
        print(f"{found.directory}\nsize: {found.size / 1e6:.0f} MB\nlicence: {found.licence}")


if __name__ == "__main__":
    sys.exit(main())
