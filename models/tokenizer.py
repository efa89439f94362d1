"""The tokenizer of a checkpoint."""

from __future__ import annotations

import os
from typing import Any

from tokenizers import Tokenizer

from . import gguf_files
from .config import ModelConfig
from .hub import checkpoint_directory, read_json


def load_tokenizer(
    directory: str | os.PathLike, config: ModelConfig | None = None, *, offline: bool = False
) -> Tokenizer:
    """Read ``tokenizer.json``, or the byte-level BPE tokenizer of a GGUF file.

    Truncation and padding are switched off even if the file asks for them, as in transformers, so that a prompt stays whole.

    Args:
        directory: a Hugging Face checkpoint directory, a GGUF file, a directory that holds one, or a name, see
            `checkpoint_directory`.
        config: the model, whose embedding must have a row for every token; it can have more. None checks nothing.
        offline: whether to raise an error instead of downloading.

    Raises:
        FileNotFoundError: the directory does not exist.
        ValueError: the file is absent, damaged or of an unsupported kind (GGUF), or its ids do not fit ``config.vocab_size``.
    """
    path = gguf_files.locate(directory, offline=offline)
    if path is not None:
        tokenizer = gguf_files.build_tokenizer(gguf_files.open_file(path))
    else:
        path = checkpoint_directory(directory, offline=offline) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"no tokenizer.json in {directory}")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself for a file that it cannot parse
            raise ValueError(f"{path} is not a readable tokenizer: {error}") from error
    needed = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if config is not None and needed > config.vocab_size:
        raise ValueError(
            f"{path} does not belong to this model: got token ids up to {needed - 1}, "
            f"expected ids below vocab_size {config.vocab_size}"
        )
    return _whole(tokenizer)


def as_tokenizer(tokenizer: Any) -> Tokenizer:
    """Convert a tokenizer object to a ``tokenizers.Tokenizer``.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``, which is returned itself; or a fast tokenizer of transformers. The fast
            tokenizer is copied without truncation and padding, because its last call may have switched these on.

    Raises:
        ValueError: ``tokenizer`` is neither, for example a tokenizer of transformers that is written in Python.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    try:
        backend = tokenizer.backend_tokenizer
    except AttributeError:
        backend = None
    if not isinstance(backend, Tokenizer):
        raise ValueError(
            "tokenizer must be a tokenizers.Tokenizer or a fast tokenizer of transformers (PreTrainedTokenizerFast), "
            f"got {type(tokenizer).__name__}"
        )
    return _whole(Tokenizer.from_str(backend.to_str()))


def special_tokens(directory: str | os.PathLike) -> dict[str, str]:
    """Read the special tokens of a checkpoint by name, for example {"bos_token": "<s>", "eos_token": "</s>"}.

    They come from ``tokenizer_config.json`` and, for names that it lacks, from ``special_tokens_map.json``. Without these
    files the result is empty. The special tokens of a GGUF file come from its metadata.
    """
    path = gguf_files.locate(directory)
    if path is not None:
        return gguf_files.special_tokens(gguf_files.open_file(path))
    named: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        path = checkpoint_directory(directory) / file
        for name, value in read_json(path).items() if path.is_file() else ():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                named[name] = text
    return named


def _whole(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
