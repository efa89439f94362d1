"""SentencePiece tokenizers of a GGUF file, of both kinds: byte-pair encoding ("llama") and unigram ("t5").

A file has the pieces and their scores. Pairs are merged in the order of the merged pieces' scores, and a text that no piece
covers becomes pieces of single bytes, if there are such pieces. A space is the character U+2581.

Sources: llama.cpp's ``llama-vocab.cpp``; Kudo and Richardson (arXiv:1808.06226); the order of equal scores as in the
conversion of SentencePiece models in transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from .reader import GGUFFile

KINDS = ("llama", "t5")  # values of tokenizer.ggml.model
_SPACE = "\u2581"
_UNKNOWN, _BYTE = 2, 6  # values of tokenizer.ggml.token_type


def sentencepiece(file: GGUFFile) -> Tokenizer:
    """Build the tokenizer of a file, without its special tokens and without what begins and ends a text."""
    absent = [key for key in ("tokens", "scores", "token_type") if f"tokenizer.ggml.{key}" not in file.metadata]
    if absent:
        raise ValueError(f"{file.path}: the tokenizer lacks {', '.join(f'tokenizer.ggml.{key}' for key in absent)}")
    tokens, scores, kinds = (file.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    numbers = isinstance(scores, list) and all(type(score) is float for score in scores)
    if not numbers or not len(tokens) == len(scores) == len(kinds) or len(set(tokens)) < len(tokens):
        raise ValueError(
            f"{file.path}: the tokenizer must have a score and a type for each of {len(tokens)} different tokens"
        )
    has_bytes = _BYTE in kinds
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    if file.metadata["tokenizer.ggml.model"] == "llama":
        vocabulary = {token: at for at, token in enumerate(tokens)}
        model = BPE(vocabulary, merges(tokens, scores), unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    else:
        at = None if unknown is None else tokens.index(unknown)
        model = Unigram(list(zip(tokens, scores, strict=True)), at, has_bytes)
    tokenizer = Tokenizer(model)
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    if file.metadata["tokenizer.ggml.model"] == "t5":
        tokenizer.pre_tokenizer = pre_tokenizers.Split(_SPACE, "merged_with_next")
    joined: list = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*joined, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return tokenizer


def merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """List the pairs of pieces that are a piece together, the pair of the highest score first."""
    ids = {token: at for at, token in enumerate(tokens)}
    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:at], token[at:]) for at in range(1, len(token)) if token[:at] in ids and token[at:] in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        ranked += [(pair, score) for pair in pairs]
    ranked.sort(key=lambda each: (each[1], len(each[0][0]), len(each[0][1])), reverse=True)
    return [pair for pair, _ in ranked]
