"""GGUF files, the format of llama.cpp: one file with sizes, weights (often quantised), tokenizer and chat template.

The package ``gguf`` knows the types and dequantises blocks. This package parses the file and translates it for this decoder.

Sources: the GGUF specification (``docs/gguf.md`` in the ggml repository); for what a file of each architecture holds,
llama.cpp's ``convert_hf_to_gguf.py``, which writes such files.
"""

from .blocks import decoded
from .codes import coder
from .config import read_config
from .conversion import convert, save_tokenizer
from .reader import GGUFFile, open_file
from .tensors import GGUFTensors
from .tokenizer import build_tokenizer, chat_templates, special_tokens

__all__ = [
    "GGUFFile", "GGUFTensors", "build_tokenizer", "chat_templates", "coder", "convert", "decoded", "open_file", "read_config",
    "save_tokenizer", "special_tokens",
]  # fmt: skip
