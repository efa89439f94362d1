"""A folder that appears when it is complete: it is filled under another name in the same place, and renamed at the end."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np
from filelock import FileLock, Timeout
from jax.sharding import Mesh

from kvjax.mesh.processes import of_each

_PARTIAL = ".partial-"  # between the name of the folder and some letters
_LOCK = ".saving"  # a file that is locked while somebody fills the folder
_KEPT = 50  # characters of a folder's name in the partial folder's name; longer names would be too long for it
_LONGEST = 1024  # bytes of the name of a folder
_TRIES, _WAIT = 50, 0.1  # attempts to remove a folder; seconds between attempts


@contextlib.contextmanager
def new_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield an empty folder to fill, which becomes ``target`` when the block ends; if the block raises, it is removed.

    Folders that killed processes have left beside ``target`` are removed first. The operating system drops the lock of a
    process that ends, however it ends, so the folders that other processes fill at this moment stay.

    Args:
        target: a path at which nothing is.

    Raises:
        ValueError: ``target`` exists already, or exists when the block ends.
        OSError: the folder beside ``target`` cannot be made.
    """
    _refuse_existing(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_killed(target.parent)
    partial = pathlib.Path(tempfile.mkdtemp(prefix=target.name[:_KEPT] + _PARTIAL, dir=target.parent))
    lock = FileLock(partial / f"{_LOCK}-made")
    try:
        lock.acquire()
        (partial / f"{_LOCK}-made").rename(partial / _LOCK)  # other processes see the lock's file only when it is locked
        yield partial
        _refuse_existing(target)
        partial.chmod(0o755)  # mkdtemp makes it private
        partial.rename(target)
        (target / _LOCK).unlink()
    except BaseException:
        _remove(partial)
        raise
    finally:
        lock.release()


@contextlib.contextmanager
def folder_of_all(target: pathlib.Path, mesh: Mesh | None) -> Iterator[tuple[pathlib.Path, bool]]:
    """Yield a `new_folder`, and whether this process made it: the process of the first device of ``mesh`` does.

    All processes of a mesh fill the folder, so it must be on a file system that they share. Without a mesh there is one
    process.
    """
    if mesh is None or not mesh.is_multi_process:
        with new_folder(target) as folder:
            yield folder, True
        return
    _refuse_existing(target)
    makes = mesh.devices.flat[0].process_index == jax.process_index()
    with contextlib.ExitStack() as stack:
        made, error = "", None
        if makes:
            try:
                made = stack.enter_context(new_folder(target)).name
            except (OSError, ValueError) as raised:
                error = raised
        told = of_each(mesh, np.frombuffer(made.encode().ljust(_LONGEST, b"\0"), np.int32))[0]
        name = told.tobytes().rstrip(b"\0").decode()
        if not name:
            raise error or OSError(f"process {mesh.devices.flat[0].process_index} could not make {target}; nothing was kept")
        yield target.parent / name, makes
    of_each(mesh, np.zeros(1, np.int32))  # waits until the folder has its name


def _refuse_existing(target: pathlib.Path) -> None:
    if target.exists() or target.is_symlink():
        raise ValueError(f"a cache is saved to a new directory, got {target}, which exists already")


def _remove_killed(parent: pathlib.Path) -> None:
    """Remove the partial folders in ``parent`` whose locks nobody holds."""
    for file in parent.glob(f"*{_PARTIAL}*/{_LOCK}"):
        try:
            with FileLock(file).acquire(timeout=0):
                if file.is_file():  # not renamed meanwhile, by a process that has just finished
                    _remove(file.parent)
        except (Timeout, OSError):  # somebody fills it, or it is another user's
            continue


def _remove(folder: pathlib.Path) -> None:
    """Remove a folder, the lock's file last: the next call finds again what cannot be removed now."""
    was_gone = False
    for _ in range(_TRIES):  # threads that were writing when an error came may write a little longer
        for path in folder.glob("*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _LOCK:
                with contextlib.suppress(OSError):
                    path.unlink()
        if [path.name for path in folder.glob("*")] in ([], [_LOCK]):
            shutil.rmtree(folder, ignore_errors=True)
        gone = not folder.exists()
        if gone and was_gone:  # such a thread may also make the folder again
            return
        was_gone = gone
        time.sleep(_WAIT)
