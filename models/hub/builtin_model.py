"""The directory of the trained model that ships with the package."""

from __future__ import annotations

from pathlib import Path


def builtin_directory() -> Path:
    """Return the directory of the shipped retrieval model, in Hugging Face layout.

    Raises:
        FileNotFoundError: this installation lacks the model.
    """
    directory = Path(__file__).parents[1] / "builtin"
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"the builtin model is not installed: no config.json in {directory}")
    return directory
