"""The tokenizer of a checkpoint."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..files import gguf as gguf_files
from ..files.directories import checkpoint_directory, locate_gguf, read_json
from ..sizes.architecture import Architecture

_FILES = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"


def load_tokenizer(
    directory: str | os.PathLike[str], config: Architecture | None = None, *, offline: bool = False
) -> Tokenizer:
    """Read ``tokenizer.json``, or the tokenizer of a GGUF file.

    Truncation and padding are switched off even if the file asks for them, as in transformers, so that a prompt stays whole.

    Args:
        directory: a Hugging Face checkpoint directory, a GGUF file, a directory that holds one, or a name, see
            `checkpoint_directory`.
        config: the model, whose embedding must have a row for every token but a token for padding, which no text contains and
            fine-tuning often adds; it can have more rows. None checks nothing.
        offline: whether to raise an error instead of downloading.

    Raises:
        FileNotFoundError: the directory does not exist.
        ValueError: the file is absent, damaged or of an unsupported kind (GGUF), or its ids do not fit ``config.vocab_size``.
    """
    path = locate_gguf(directory, offline=offline)
    if path is not None:
        tokenizer, source = gguf_files.build_tokenizer(gguf_files.open_file(path)), path
    else:
        source = checkpoint_directory(directory, offline=offline)
        path = source / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"no tokenizer.json in {directory}")
        try:
            tokenizer = Tokenizer.from_buffer(path.read_bytes())  # whose path may be no Unicode text
        except Exception as error:  # the library raises Exception itself for a file that it cannot parse
            raise ValueError(f"{path} is not a readable tokenizer: {error}") from error
    if config is not None:
        unneeded = _padding_ids(tokenizer, special_tokens(source).get("pad_token"))
        ids = set(tokenizer.get_vocab(with_added_tokens=True).values()) - unneeded
        if (most := max(ids, default=-1)) >= config.vocab_size:
            raise ValueError(
                f"{path} does not belong to this model: got token ids up to {most}, "
                f"expected ids below vocab_size {config.vocab_size}"
            )
    return _whole(tokenizer)


def _padding_ids(tokenizer: Tokenizer, named: str | None) -> set[int]:
    """Find added tokens that only pad: the token of this name, and special tokens that say so."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {at for at, token in added if token.content == named or (token.special and "pad" in token.content.lower())}


def tokenizer_files(tokenizer: Any, config: Architecture) -> dict[str, bytes]:
    """Build the files that `load_tokenizer`, transformers and `models.ChatTemplate` read, by their names."""
    if isinstance(tokenizer, (str, os.PathLike)):
        load_tokenizer(tokenizer, config)
        gguf = locate_gguf(tokenizer)
        if gguf is None:
            directory = checkpoint_directory(tokenizer)
            return {name: (directory / name).read_bytes() for name in _FILES if (directory / name).is_file()}
        with tempfile.TemporaryDirectory() as folder:
            gguf_files.save_tokenizer(gguf_files.open_file(gguf), Path(folder))
            return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    fast = as_tokenizer(tokenizer)
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    if config.eos_token_ids and (end := fast.id_to_token(config.eos_token_ids[0])) is not None:
        about["eos_token"] = end
    texts = {"tokenizer.json": fast.to_str(pretty=True), "tokenizer_config.json": json.dumps(about, indent=2) + "\n"}
    return {name: text.encode() for name, text in texts.items()}


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


def check_unicode(text: str) -> None:
    """Refuse half of a surrogate pair, which JSON and a command line of another encoding can hold, and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"expected Unicode text, got half of a surrogate pair at character {error.start}") from error


def opening_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that a tokenizer puts before every text: begin-of-text, or several; none for many models."""
    plain, whole = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
    starts = range(len(whole) - len(plain) + 1)
    return next((whole[:at] for at in starts if whole[at : at + len(plain)] == plain), [])


def special_tokens(directory: str | os.PathLike[str]) -> dict[str, str]:
    """Read the special tokens of a checkpoint by name, for example {"bos_token": "<s>", "eos_token": "</s>"}.

    They come from ``tokenizer_config.json`` and, for names that it lacks, from ``special_tokens_map.json``. Without these
    files the result is empty. The special tokens of a GGUF file come from its metadata.
    """
    path = locate_gguf(directory)
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


def special_ids(directory: Path) -> dict[str, int]:
    """Read the ids of the tokens that were added to the vocabulary, by their texts; a directory may have no tokenizer.

    Both files may list them, and one may lack what the other has; ``tokenizer.json`` is what encodes.
    """
    settings, whole = directory / "tokenizer_config.json", directory / "tokenizer.json"
    listed = read_json(settings).get("added_tokens_decoder") if settings.is_file() else None
    entries = [(value, str(key)) for key, value in listed.items()] if isinstance(listed, dict) else []
    added = read_json(whole).get("added_tokens") if whole.is_file() else None
    entries += [(value, str(value.get("id"))) for value in added or () if isinstance(value, dict)]
    return {
        value["content"]: int(number)
        for value, number in entries
        if isinstance(value, dict) and isinstance(value.get("content"), str) and number.isdigit()
    }


def _whole(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
