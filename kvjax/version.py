"""The version of this package; pyproject.toml is its only source."""

import importlib.metadata
import pathlib
import tomllib


def _version() -> str:
    """Return the installed package's version, or the version in pyproject.toml if this checkout is not installed."""
    try:
        return importlib.metadata.version("kvjax")
    except importlib.metadata.PackageNotFoundError:
        file = pathlib.Path(__file__).resolve().parents[1] / "pyproject.toml"
        return tomllib.loads(file.read_text(encoding="utf-8"))["project"]["version"]


__version__ = _version()
