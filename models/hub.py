"""Where the files of a checkpoint are: a directory, a named model or a repository of the hub; their JSON files."""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from .named_cache import named_directory
from .named_models import NAMED_MODELS
from .repository import repository_directory

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # "owner/name"; "./name" and "../name" are paths


def checkpoint_directory(checkpoint: str | os.PathLike, *, offline: bool = False) -> Path:
    """The local directory of a checkpoint. What has a name and is not on this machine is downloaded first.

    Args:
        checkpoint: one of

            * a name in `NAMED_MODELS`, such as ``"smollm2"``, which is kept in the user's cache directory. It comes before a
              directory of the same name; write ``"./smollm2"`` for the directory;
            * a directory;
            * the name of a Hugging Face repository, such as ``"Qwen/Qwen3-0.6B"``, which is kept in the local cache of
              ``huggingface_hub``.
        offline: whether to raise an error instead of downloading.

    Raises:
        FileNotFoundError: there is none of these, or it would have to be downloaded and ``offline``.
        ConnectionError: there is no network.
        PermissionError: the repository is gated.
        ValueError: what was downloaded is not what was expected.
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
        raise FileNotFoundError(f"no model directory {text}{hint}{names}")
    return repository_directory(text, offline=offline)


def local_path(checkpoint: str | os.PathLike) -> Path:
    """The path that a user wrote, with the home directory for a leading ``~``.

    Raises:
        FileNotFoundError: the text is empty, which as a path would be the current directory.
    """
    text = os.fspath(checkpoint)
    if not text:
        raise FileNotFoundError("no model is named: got an empty text, expected a name, a directory or a repository")
    try:
        return Path(text).expanduser()
    except RuntimeError:  # there is no such user
        return Path(text)


def leaves_folder(name: str) -> bool:
    """Whether the path ``name``, which a file names, is one outside of the file's folder on some operating system."""
    return any(path.anchor or ".." in path.parts for path in (PurePosixPath(name), PureWindowsPath(name)))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file ``path``.

    Raises:
        ValueError: the file is not JSON, is nested too deeply, or holds another JSON value.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if type(value) is not dict:
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
