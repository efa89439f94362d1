"""A tiny random model as a GGUF file that has all a model needs: weights, tokenizer, chat template, end of text."""

import dataclasses
import json
import pathlib

from safetensors.numpy import load_file

import models
from tests.models import gguf_writing
from tests.tiny_models import FAMILIES, write_model


def write_tiny_gguf(folder: pathlib.Path) -> pathlib.Path:
    """Writes ``folder/tiny.gguf``, with the tokens of the tokenizer that ships, and the same weights in ``folder/hf``."""
    words = json.loads((models.builtin_directory() / "tokenizer.json").read_text())["model"]
    tokens = sorted(words["vocab"], key=words["vocab"].get)
    config = dataclasses.replace(FAMILIES["llama"], vocab_size=len(tokens), max_position_embeddings=2048, eos_token_ids=(0,))
    write_model(folder / "hf", config)
    hf = json.loads((folder / "hf" / "config.json").read_text())
    merges, kinds = [" ".join(pair) for pair in words["merges"]], [3] + [1] * (len(tokens) - 1)
    values = gguf_writing.metadata(hf) | gguf_writing.tokenizer_metadata(
        tokens, merges, "smollm", kinds, eos_token_id=0, bos_token_id=1, add_bos_token=True
    )
    values["tokenizer.chat_template"] = "<{{ messages[0].content }}>"
    weights = gguf_writing.stored(hf, load_file(folder / "hf" / "model.safetensors"))
    gguf_writing.write(folder / "tiny.gguf", values, weights)
    return folder / "tiny.gguf"
