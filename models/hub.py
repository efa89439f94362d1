"""Checkpoints on this machine: directories, and Hugging Face repositories that were downloaded before; their JSON files."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")  # "name" or "owner/name"


def checkpoint_directory(checkpoint: str | os.PathLike) -> Path:
    """The local directory of a checkpoint. Nothing is downloaded.

    Args:
        checkpoint: a directory, or the name of a Hugging Face repository such as ``"Qwen/Qwen3-0.6B"`` whose snapshot
            is in the local cache of ``huggingface_hub``.

    Raises:
        FileNotFoundError: there is neither. For the name of a repository the message says how to get it.
    """
    directory = Path(checkpoint)
    if directory.is_dir():
        return directory
    name = directory.as_posix()
    if not _REPOSITORY.fullmatch(name):
        raise FileNotFoundError(f"no model directory {directory}")
    snapshot = _cached_snapshot(name)
    if snapshot is None:
        raise FileNotFoundError(
            f"no model directory {name}. If this is the name of a Hugging Face repository: checkpoints are read from "
            f"this machine and never downloaded. Get it once with huggingface_hub.snapshot_download({name!r}); then pass "
            "the path it returns, or the same name again, which is looked up in the local cache"
        )
    return snapshot


def _cached_snapshot(name: str) -> Path | None:
    """The snapshot of a repository in the local cache of ``huggingface_hub``, or None."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
    except (FileNotFoundError, ValueError):  # not in the cache; not a name that a repository can have
        return None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file ``path``.

    Raises:
        ValueError: the file is not JSON, or holds another JSON value.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if type(value) is not dict:
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
