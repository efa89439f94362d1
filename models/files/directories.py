"""Find the files of a checkpoint (a directory, a named model or a repository of the hub), and read its JSON files."""

import difflib
import json
import os
import re
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ..hub.named_models import NAMED_MODELS
from ..hub.repository import repository_directory
from .named_directory import named_directory

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # "owner/name"; "./name" and "../name" are paths


def checkpoint_directory(checkpoint: str | os.PathLike[str], *, offline: bool = False) -> Path:
    """Return the local directory of a checkpoint. A named model or a repository is downloaded first if it is absent.

    Args:
        checkpoint: one of

            * a name in `NAMED_MODELS`, such as ``"smollm2"``; the model is kept in the user's cache directory. The name comes
              before a directory of the same name; write ``"./smollm2"`` for the directory;
            * a directory;
            * the name of a Hugging Face repository, such as ``"Qwen/Qwen3-0.6B"``, which is kept in the local cache of
              ``huggingface_hub``.
        offline: whether to raise an error instead of downloading.

    Raises:
        FileNotFoundError: the checkpoint does not exist, or it is not on this machine and ``offline``.
        ConnectionError: there is no network.
        PermissionError: the repository is gated.
        ValueError: the downloaded files are not the expected ones.
        OSError: the cache cannot be written, or there is no space.
    """
    text = os.fspath(checkpoint)
    if text in NAMED_MODELS:
        return named_directory(NAMED_MODELS[text], offline=offline)
    directory = local_path(text)
    if directory.is_dir():
        return directory
    if directory.is_file():
        raise FileNotFoundError(f"{directory} is a file, expected a model's directory, its name or its repository")
    if not _REPOSITORY.fullmatch(text) or text.endswith(".gguf"):
        close = difflib.get_close_matches(text.strip(" /").lower(), NAMED_MODELS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        names = f"; named models: {', '.join(NAMED_MODELS)}" if re.fullmatch(r"[\w.-]+", text) else ""
        names += "; a repository of the hub is OWNER/NAME, such as Qwen/Qwen3-0.6B" if names else ""
        raise FileNotFoundError(f"no model directory {text}{hint}{names}")
    return repository_directory(text, offline=offline)


def locate_gguf(checkpoint: str | os.PathLike[str], *, offline: bool = False) -> Path | None:
    """Find the GGUF file that a checkpoint is or holds; return None for a directory in Hugging Face layout.

    A directory with a ``config.json`` is in that layout, whatever else it holds.
    """
    path = local_path(checkpoint)
    if os.fspath(checkpoint) not in NAMED_MODELS:  # a name comes before a file of the same name
        if path.is_file():
            return path
        if path.suffix == ".gguf" and not path.is_dir():
            raise FileNotFoundError(f"no GGUF file {path}")
    directory = checkpoint_directory(checkpoint, offline=offline)
    if (directory / "config.json").is_file():
        return None
    files = sorted(directory.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{directory} holds {len(files)} GGUF files, expected one; pass the path of one of: {names}")
    return files[0] if files else None


def local_path(checkpoint: str | os.PathLike[str]) -> Path:
    """Return the path that a user wrote, with the home directory for a leading ``~``."""
    text = os.fspath(checkpoint)
    if not text:
        raise FileNotFoundError("no model is named: got an empty text, expected a name, a directory or a repository")
    try:
        return Path(text).expanduser()
    except RuntimeError:  # there is no such user
        return Path(text)


def leaves_folder(name: str) -> bool:
    """Tell whether a path ``name`` found in a file leads out of the file's folder on some operating system."""
    return any(path.anchor or ".." in path.parts for path in (PurePosixPath(name), PureWindowsPath(name)))


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in the file ``path``."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if type(value) is not dict:
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
