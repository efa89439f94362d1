"""What `kvjax ls cache` shows: what kvjax keeps on disk, which is named models and compiled programs."""

import pathlib
import shutil
from collections.abc import Sequence

from experiments.cli.programs import cache_directory as programs_directory
from models.files.named_directory import cache_directory as models_directory

_PROGRAMS, _MODELS = "programs", "models"


def show() -> str:
    """List what is on disk, with its size."""
    folders = _folders()
    if not folders:
        return f"nothing is kept in {programs_directory().parent}"
    sizes = {path: _size(path) for path in folders}
    lines = [f"{size / 1e6:10,.1f} MB  {folders[path]}  ({path})" for path, size in sizes.items() if path.name[0] != "."]
    total = f"{sum(sizes.values()) / 1e6:10,.1f} MB in all; repositories of the hub are in the hub's own cache"
    return "\n".join([*lines, total])


def clear(names: Sequence[str]) -> str:
    """Delete "programs", "models", "all" or named models' folders; a name that nothing on disk has is refused."""
    folders, freed, lines = _folders(), 0, []
    known = [_PROGRAMS, _MODELS, "all", *(name for path, name in folders.items() if path.name[0] != ".")]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--clear: expected some of {', '.join(dict.fromkeys(known))}, got {unknown[0]!r}")
    for path, name in folders.items():
        if {name, _PROGRAMS if name == _PROGRAMS else _MODELS, "all"} & {*names}:
            freed += _size(path)
            lines.append(f"deleted {path}")
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    return "\n".join([*lines, f"{freed / 1e6:,.1f} MB are free again"])


def _folders() -> dict[pathlib.Path, str]:
    """List the names of the compiled programs, and of each folder or file among the models (a lock begins with a dot)."""
    programs, models = programs_directory(), models_directory()
    folders = {programs: _PROGRAMS} if programs.is_dir() else {}
    return folders | ({path: path.name for path in sorted(models.iterdir())} if models.is_dir() else {})


def _size(path: pathlib.Path) -> int:
    """Count the bytes of the files in a folder, or of a file; of a link only the link counts."""
    files = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
    return sum(file.lstat().st_size for file in files if file.is_symlink() or file.is_file())
