"""``kvjax fetch NAME``: download a model into the cache that the other commands read, and say where it is."""

from __future__ import annotations

import dataclasses
import json
import sys

from experiments.answering.found import find
from experiments.cli import Job, option


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


def _fetch(command: FetchCommand) -> None:
    """Print the directory, the size and the licence."""
    found = find(command.name, offline=command.offline)
    if command.json:
        print(json.dumps({**dataclasses.asdict(found), "directory": str(found.directory)}))
    else:
        print(f"{found.directory}\nsize: {found.size / 1e6:.0f} MB\nlicence: {found.licence}")


main = Job(_fetch, FetchCommand)


if __name__ == "__main__":
    sys.exit(main())
