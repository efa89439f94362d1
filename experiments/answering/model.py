"""A model, loaded with its tokenizer: the loader of every command."""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import numpy as np

import models
from experiments.cli import Settings, option
from models import gguf_files

DTYPES = ("float32", "bfloat16")
_NUMBERS = 64  # of a leaf; enough to differ between two quantisations of a model


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """Which model answers; the base of the settings of all commands that load a model.

    Attributes:
        model: a name (see kvjax ls models), a Hugging Face directory, a GGUF file, or a repository OWNER/NAME of the hub
        dtype: dtype of computation (default: float32 on a CPU, bfloat16 elsewhere)
        offline: never download a model that is not on this machine
    """

    model: str = "builtin"
    dtype: str | None = option(None, choices=DTYPES)
    offline: bool = False


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to answer.

    Attributes:
        name: the name for tables and records.
        params: its parameters.
        config: its description.
        tokenizer: its tokenizer.
        tokenizer_file: the tokenizer.json from which worker processes load the tokenizer.
    """

    name: str
    params: Any
    config: models.ModelConfig
    tokenizer: Any
    tokenizer_file: pathlib.Path

    @property
    def directory(self) -> pathlib.Path:
        """The directory of the tokenizer, which also holds the chat template."""
        return self.tokenizer_file.parent

    @property
    def weights(self) -> str:
        """Twelve hexadecimal digits that tell the parameters from others of the same name, by some numbers of every leaf."""
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(self.params):
            some = leaf.reshape(-1)[:: max(1, leaf.size // _NUMBERS)]
            digest.update(np.asarray(some, np.float32).tobytes())
        return digest.hexdigest()[:12]


def load_model(model: str | pathlib.Path, dtype: str | None = None, *, offline: bool = False) -> LoadedModel:
    """Loads a model that has a name, a Hugging Face directory, a GGUF file or a repository of the hub.

    Args:
        model: a GGUF file, or see `models.checkpoint_directory`; what has a name and is not on this machine is downloaded.
        dtype: compute dtype; None takes float32 on a CPU and bfloat16 elsewhere.
        offline: whether to raise an error instead of downloading.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: the checkpoint is damaged or of a kind that `models` does not know.
        OSError: a download failed.
    """
    name = str(model)
    gguf = gguf_files.locate(model, offline=offline)
    directory = models.checkpoint_directory(model, offline=offline) if gguf is None else _tokenizer_directory(gguf)
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    params, config = models.from_pretrained(model, dtype=dtype, offline=offline)
    tokenizer = models.load_tokenizer(directory if gguf is None else gguf, config)  # its errors name the user's file
    if gguf is not None:
        name = gguf.stem
    elif name not in models.NAMED_MODELS and pathlib.Path(name).expanduser().is_dir():
        name = directory.resolve().name
    return LoadedModel(name, params, config, tokenizer, directory / "tokenizer.json")


def _tokenizer_directory(gguf: pathlib.Path) -> pathlib.Path:
    """A directory with the tokenizer and the chat template of a GGUF file; it goes when this process ends."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="kvjax-tokenizer-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    gguf_files.save_tokenizer(gguf_files.open_file(gguf), directory)
    return directory
