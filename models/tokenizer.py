"""The tokenizer that belongs to a checkpoint directory."""

from __future__ import annotations

import os
from pathlib import Path

from tokenizers import Tokenizer

from .config import ModelConfig


def load_tokenizer(directory: str | os.PathLike, config: ModelConfig | None = None) -> Tokenizer:
    """Read ``tokenizer.json``.

    Args:
        directory: a Hugging Face checkpoint directory.
        config: if given, the model whose embedding must have a row for every token (it may have spare rows).

    Raises:
        ValueError: if the file is absent or damaged, or its ids do not fit ``config.vocab_size``.
    """
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"no tokenizer.json in {directory}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a file it cannot parse
        raise ValueError(f"{path} is not a readable tokenizer: {error}") from error
    needed = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if config is not None and needed > config.vocab_size:
        raise ValueError(
            f"{path} does not belong to this model: got token ids up to {needed - 1}, "
            f"expected ids below vocab_size {config.vocab_size}"
        )
    return tokenizer
