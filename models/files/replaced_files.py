"""Files of a directory that are replaced together, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

_SCRATCH = ".saving"  # a folder in the directory, which exists while the files are written


@contextlib.contextmanager
def replaced_files(directory: str | os.PathLike, names: Sequence[str]) -> Iterator[Path]:
    """Yield a scratch folder for new files, which replace the old files of ``directory`` together when the block ends.

    If the block raises, or a file cannot be moved, the directory stays unchanged. A process that is killed while it moves
    files leaves a directory without the last of ``names``, never a mixture; the old files are then in ``.saving/old``. The
    next call removes what a killed process has left.

    Args:
        directory: is created if absent.
        names: the files, which the block writes into the folder; no reader accepts the directory without the last file.

    Raises:
        ValueError: another process is replacing the files.
        OSError: there is no space, or no permission to write.
    """
    directory = Path(directory)
    created = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    scratch = directory / _SCRATCH
    scratch.mkdir(exist_ok=True)
    lock = FileLock(scratch / "lock")
    try:
        lock.acquire(timeout=0)  # the operating system drops it when a process ends, however it ends
    except Timeout:
        raise ValueError(f"another process is writing to {directory}, expected one at a time") from None
    try:
        for name in (*names, "old"):
            _remove(scratch / name)
        yield scratch
        for name in names:
            (scratch / name).chmod(0o644)  # safetensors makes files that nobody else may read
        _move(scratch, directory, names)
    except BaseException:
        _remove(scratch)
        if created and not any(directory.iterdir()):
            directory.rmdir()
        raise
    else:
        _remove(scratch)
    finally:
        lock.release()


def _move(scratch: Path, directory: Path, names: Sequence[str]) -> None:
    """Move the new files into the directory; restore the old files if a new file cannot be moved."""
    old = scratch / "old"
    old.mkdir()
    kept, put = [], []
    try:
        for name in reversed(names):
            if (directory / name).exists():
                os.replace(directory / name, old / name)
                kept.append(name)
        for name in names:
            os.replace(scratch / name, directory / name)
            put.append(name)
    except BaseException:
        for name in put:
            _remove(directory / name)
        for name in kept:
            os.replace(old / name, directory / name)
        raise


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
