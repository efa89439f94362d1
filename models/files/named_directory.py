"""Named models in the user's cache directory: each is downloaded and converted once."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from ..hub.builtin_model import builtin_directory
from ..hub.file import cached, fetched
from ..hub.named_models import ModelFile, NamedModel
from ..hub.packaged_file import pieces_there, unpack
from ..hub.progress import megabytes, progress, say
from ..hub.repository import hub_is_offline
from .gguf import convert

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT)
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")  # files of a converted model


def cache_directory() -> Path:
    """Return the directory in the user's cache that holds the named models; it may not exist yet."""
    return platformdirs.user_cache_path("kvjax") / "models"


def named_directory(model: NamedModel, *, offline: bool = False) -> Path:
    """Return the directory of a named model in Hugging Face's layout; make it if it is absent.

    The file with the weights comes from the local cache of the hub, from the hub, or by pip from packages of the index, in
    this order. It is checked and converted to bfloat16 once; packages are deleted then. The directory appears in one moment,
    when it is whole. An interrupted download goes on behind the last whole piece. Of several processes one downloads, and the
    rest wait.

    Args:
        model: the model.
        offline: whether to raise an error instead of downloading.

    Raises:
        FileNotFoundError: the directory is absent and ``offline``, a part of it was deleted, or the index lacks the package.
        ModuleNotFoundError: pip is not installed.
        ConnectionError: there is no network.
        ValueError: the downloaded file is not the expected one, or the weights in the directory were cut off since.
        OSError: the cache directory cannot be written, or there is no space.
    """
    if model.file is None:
        return builtin_directory()
    target = cache_directory() / model.file.folder
    if target.exists():
        return _checked(model.name, target)
    if offline or hub_is_offline():
        raise FileNotFoundError(
            f"{model.name} is not on this machine and may not be downloaded (offline=True, --offline or HF_HUB_OFFLINE); "
            f"`kvjax fetch {model.name}` gets it once, into {target}"
        )
    with _explained(model.name, model.file, target), _locked(target):
        if not target.is_dir():
            _fetch(model, model.file, target)
    return target


def _checked(name: str, target: Path) -> Path:
    """Check that ``target`` still has all its files, and the weights all their bytes; return it."""
    absent = [file for file in _FILES if not (target / file).is_file()]
    if absent:
        raise FileNotFoundError(
            f"{target} is not whole, it lacks {', '.join(absent)}: delete it, and `kvjax fetch {name}` makes it again"
        )
    try:
        with safe_open(target / "model.safetensors", framework="numpy"):  # compares the file's size with its header
            return target
    except SafetensorError as error:
        raise ValueError(
            f"{target / 'model.safetensors'} is damaged ({error}): delete {target}, and `kvjax fetch {name}` makes it again"
        ) from error


def _fetch(model: NamedModel, file: ModelFile, target: Path) -> None:
    """Make ``target``; the caller holds its lock."""
    partial = _partial(target)
    download = partial / "download"
    _clear(file, partial)
    there = cached(file)
    if there is None:
        _check_space(file, target, download)
        where = " or ".join(([f"the hub's {file.repository}"] if file.repository else []) + [_packages(file)])
        size = file.size if file.repository else file.download
        say(
            f"{model.name} ({model.about}; licence {model.licence}) is not on this machine: downloading {megabytes(size)}, "
            f"{where}; {megabytes(file.kept)} are kept, in {target}"
        )
        there = fetched(file)
    else:
        say(f"{model.name} (licence {model.licence}) is in the local cache of the hub: {there}")
    download.mkdir(parents=True, exist_ok=True)
    try:
        source = unpack(file, download) if there is None else there
        _convert(source, partial / "model")
        (partial / "model").replace(target)
    finally:
        _clear(file, partial, done=target.is_dir())
    say(f"{model.name} is in {target}")


def _partial(target: Path) -> Path:
    """Name the folder in which ``target`` grows."""
    return target.with_name(f".{target.name}.partial")


def _packages(file: ModelFile) -> str:
    """Say in which packages of the index a file is."""
    first, last = file.pieces[0], file.pieces[-1]
    if first == last:
        return f"the package {first.package} {first.version}, with pip"
    return f"{len(file.pieces)} packages of the index, {first.package} to {last.package} {first.version}, with pip"


def _check_space(file: ModelFile, target: Path, download: Path) -> None:
    """Refuse a download for which there is no room: of the file, of a wheel beside it, and of what is kept."""
    wheel = max(piece.download for piece in file.pieces)
    found = download / file.name
    there = found.stat().st_size if found.is_file() else 0
    needed = file.size - min(there, file.size) + max(wheel, file.kept)  # the last wheel goes before the directory is made
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{megabytes(needed)} are needed for a while, {megabytes(free)} are free")


def _clear(file: ModelFile, partial: Path, done: bool = False) -> None:
    """Delete what a try left, but for whole pieces of a file that has several; after a try that is ``done``, all of it."""
    if not done and len(file.pieces) > 1 and pieces_there(file, partial / "download"):
        shutil.rmtree(partial / "model", ignore_errors=True)
        return
    shutil.rmtree(partial, ignore_errors=True)


def _convert(source: Path, directory: Path) -> None:
    """Convert a GGUF file to a directory in Hugging Face layout, and show the progress."""
    with progress(f"converting {source.name}") as show:
        convert(source, directory, dtype="bfloat16", progress=show)


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock of a directory that only one process makes; the parent directory is created."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is making {target}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _explained(name: str, file: ModelFile, target: Path) -> Iterator[None]:
    """Turn the errors of a full or closed cache directory into sentences that say what was to be written, and where."""
    try:
        yield
    except ConnectionError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            said = f"no space for {name} in {target.parent}: {error.strerror}; {_kept(file, target)}"
            raise OSError(error.errno, said) from error
        if error.errno in _CLOSED:
            raise OSError(
                error.errno, f"{name} is kept in {target.parent}, which cannot be written: {error.strerror}"
            ) from error
        raise
    except Exception as error:  # the package `tokenizers` raises Exception itself, for a full disk too
        if "os error 28" not in str(error):
            raise
        raise OSError(errno.ENOSPC, f"no space for {name} in {target.parent}; {_kept(file, target)}") from error


def _kept(file: ModelFile, target: Path) -> str:
    """Say what a try that failed has left on the disk."""
    partial = _partial(target)
    if not (there := pieces_there(file, partial / "download")):
        return "nothing was kept"
    return f"{there} of {len(file.pieces)} pieces are kept for the next try, in {partial}"
