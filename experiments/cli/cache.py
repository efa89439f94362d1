"""``kvjax cache``: show what kvjax keeps on disk, and clear it: named models and compiled programs."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Sequence

from experiments.cli.job import Job
from experiments.cli.programs import cache_directory as programs_directory
from experiments.cli.settings import option
from models.files.named_directory import cache_directory as models_directory

_PROGRAMS, _MODELS = "programs", "models"


@dataclasses.dataclass(frozen=True)
class CacheCommand:
    """What to do with the files on disk.

    Attributes:
        names: nothing, to show what is there; or 'clear' and what to delete: 'programs', 'models', or the name of a model's
            folder as this command shows it (default: all)
    """

    names: tuple[str, ...] = option((), positional=True, metavar="clear NAME")

    def __post_init__(self) -> None:
        if self.names and self.names[0] != "clear":
            raise ValueError(f"kvjax cache takes nothing, or 'clear' and what to delete, got {self.names[0]!r}")


@dataclasses.dataclass(frozen=True)
class Kept:
    """Something on disk.

    Attributes:
        name: as `kvjax cache` shows it.
        path: the file or folder.
        kind: "programs" or "models".
        size: bytes.
    """

    name: str
    path: pathlib.Path
    kind: str
    size: int


def kept() -> list[Kept]:
    """List what is on disk: the compiled programs, and each folder or file among the models."""
    found = []
    if (programs := programs_directory()).is_dir():
        found.append(Kept(_PROGRAMS, programs, _PROGRAMS, _size(programs)))
    if (models := models_directory()).is_dir():
        found += [Kept(path.name, path, _MODELS, _size(path)) for path in sorted(models.iterdir())]
    return found


def _cache(command: CacheCommand) -> None:
    found = kept()
    if command.names:
        _clear(found, command.names[1:])
        return
    if not found:
        print(f"nothing is kept in {programs_directory().parent}")
        return
    for item in found:
        if not item.name.startswith("."):  # a lock, which is empty
            print(f"{item.size / 1e6:10,.1f} MB  {item.name}  ({item.path})")
    total = sum(item.size for item in found)
    print(f"{total / 1e6:10,.1f} MB in all; repositories of the hub are in the hub's own cache")


def _clear(found: Sequence[Kept], names: Sequence[str]) -> None:
    """Delete what the names say; without names, all.

    Raises:
        ValueError: a name that nothing on disk has.
    """
    for name in names:
        if name not in (_PROGRAMS, _MODELS, *(item.name for item in found)):
            known = ", ".join(dict.fromkeys([_PROGRAMS, _MODELS, *(x.name for x in found if not x.name.startswith("."))]))
            raise ValueError(f"kvjax cache clear: expected one of {known}, got {name!r}")
    freed = 0
    for item in found:
        if not names or item.name in names or item.kind in names:
            if item.path.is_dir() and not item.path.is_symlink():
                shutil.rmtree(item.path)
            else:
                item.path.unlink(missing_ok=True)
            freed += item.size
            print(f"deleted {item.path}")
    print(f"{freed / 1e6:,.1f} MB are free again")


def _size(path: pathlib.Path) -> int:
    """Count the bytes of the files in a folder, or of a file; what another process deletes meanwhile counts nothing."""
    total = 0
    for file in [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]:
        try:
            total += file.lstat().st_size if file.is_symlink() or file.is_file() else 0
        except FileNotFoundError:
            continue
    return total


main = Job(_cache, CacheCommand)
