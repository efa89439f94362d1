"""The version of this package; pyproject.toml is its only source."""

from __future__ import annotations

import importlib.metadata
import pathlib
import tomllib


def _version() -> str:
    """The installed package's version, or that in pyproject.toml if this is a checkout that is not installed."""
    try:
        return importlib.metadata.version("kvjax")
    except importlib.metadata.PackageNotFoundError:
        file = pathlib.Path(__file__).resolve().parents[1] / "pyproject.toml"
        return tomllib.loads(file.read_text(encoding="utf-8"))["project"]["version"]


__version__ = _version()
