"""A folder that appears when it is complete: it is filled under another name in the same place, and renamed at the end."""

import contextlib
import hashlib
import os
import pathlib
import shutil
from collections.abc import Iterator

import jax
import numpy as np
from filelock import FileLock, Timeout
from jax.sharding import Mesh

from kvjax.mesh.processes import of_each

_LOCK = ".saving"  # a file that is locked while somebody fills the folder
_KEPT = 50  # characters of a folder's name in the partial folder's name; longer names would be too long for it


@contextlib.contextmanager
def new_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield an empty folder to fill, which becomes ``target`` when the block ends; if the block raises, it is removed.

    What a killed process has left of the same ``target`` is removed first. The operating system drops the lock of a process
    that ends, however it ends.

    Args:
        target: a path at which nothing is.

    Raises:
        ValueError: ``target`` exists already, or exists when the block ends, or another process is filling it.
        OSError: the folder beside ``target`` cannot be made.
    """
    _refuse_existing(target)
    digest = hashlib.sha256(os.fsencode(target.name)).hexdigest()[:8]
    partial = target.with_name(f"{target.name[:_KEPT]}-{digest}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(partial / _LOCK, timeout=0):
            try:
                for path in partial.iterdir():
                    if path.is_dir():
                        shutil.rmtree(path)
                    elif path.name != _LOCK:
                        path.unlink()
                yield partial
                _refuse_existing(target)
                partial.rename(target)
                (target / _LOCK).unlink()
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except Timeout:
        raise ValueError(f"another process is saving a cache as {target}, expected one at a time") from None


@contextlib.contextmanager
def folder_of_all(target: pathlib.Path, mesh: Mesh | None) -> Iterator[pathlib.Path | None]:
    """Yield a `new_folder` in the process of the first device of ``mesh``, and None in the others.

    The folder appears when all processes have left the block, and not at all if one of them raises. Without a mesh there is
    one process.
    """
    if mesh is None or not mesh.is_multi_process:
        with new_folder(target) as folder:
            yield folder
        return
    _refuse_existing(target)
    with contextlib.ExitStack() as stack:
        folder, error = None, None
        if mesh.devices.flat[0].process_index == jax.process_index():
            try:
                folder = stack.enter_context(new_folder(target))
            except (OSError, ValueError) as raised:
                error = raised
        if not _all(mesh, error is None):
            raise error or OSError(f"process {mesh.devices.flat[0].process_index} could not make {target}; nothing was kept")
        finished = False
        try:
            yield folder
            finished = True
        finally:
            together = _all(mesh, finished)
        if not together:
            raise OSError(f"another process could not save to {target}; nothing was kept")
    _all(mesh, True)  # waits until the folder has its name


def _all(mesh: Mesh, good: bool) -> bool:
    """Tell in every process of the mesh whether all of them are ``good``; they wait for each other."""
    return bool(of_each(mesh, np.asarray([good], np.int32)).all())


def _refuse_existing(target: pathlib.Path) -> None:
    if target.exists() or target.is_symlink():
        raise ValueError(f"a cache is saved to a new directory, got {target}, which exists already")
