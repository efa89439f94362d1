"""Random tokenizers of the kinds that models have: pieces of texts, ends of rows, tokens beyond the embedding.

tests/experiments/test_texts.py has begin-of-text tokens and truncation.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvjax.api.text import GrowingText, rows_of, texts_of
from models import load_tokenizer
from tests.fuzz.arguments import World
from tests.fuzz.values import texts
from tests.fuzz.verdicts import judge

_Draw = Callable[[st.SearchStrategy], Any]
_NO_LETTER = "\ufffd"
_WORDS = ("the", "and", "an", "in", "th", "ab", "日本", "é", "20", "\n\n", "  ", "😀", "()", "।", "ab c")
_PADS = ("<pad>", "[PAD]", "<|pad|>", "<PADDING>", "<|vision_pad|>")
_TEXTS = ("<|im_end|>", "<tool>", "<|python|>", "[INST]", "padding")


@dataclasses.dataclass
class Subject:
    """A tokenizer and what is known about it.

    Attributes:
        kind: byte-level, fallback or metaspace.
        tokenizer: the tokenizer.
        lossless: whether it decodes the ids of a text to the text.
        folder: for files.
    """

    kind: str
    tokenizer: Tokenizer
    lossless: bool
    folder: pathlib.Path

    def ids(self, text: str) -> list[int]:
        """Encode a text without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def check(data: st.DataObject, folder: pathlib.Path) -> Iterator[None]:
    """Check one law of one tokenizer."""
    subject = _subject(data.draw, folder)
    law = data.draw(st.sampled_from(_LAWS))
    about = f"{law.__name__} of a {subject.kind} tokenizer"
    judge(about, lambda: law(subject, data.draw), right=lambda fault: fault)
    yield


# ---- laws ---------------------------------------------------------------------------------------------------------


def _pieces_are_the_text(subject: Subject, draw: _Draw) -> str | None:
    """The pieces of a row, in blocks of any size, are together what its ids decode to."""
    text = draw(texts(60))
    ids = subject.ids(text)
    pieces, want = [*_streamed(subject.tokenizer, ids, draw)], subject.tokenizer.decode(ids)
    if "".join(pieces) != want:
        return f"{text!r}: pieces {pieces!r}, expected {want!r}"
    if _NO_LETTER not in want and (any(_NO_LETTER in piece for piece in pieces) or len(ids) > 40 and not any(pieces[:20])):
        return f"{text!r}: pieces {pieces!r} have half a character, or come late"
    special = any(token in text for token in ("<s>", "</s>"))  # which no text has
    return None if not subject.lossless or special or want == text else f"{text!r} became {want!r}"


def _garbage_is_shown_once(subject: Subject, draw: _Draw) -> str | None:
    """Ids that no text has: what can be read is shown once and in order, and the pieces have no more letters than bytes."""
    size = subject.tokenizer.get_vocab_size()
    high = draw(st.sampled_from((min(260, size), size)))  # many tokens of single bytes
    ids = draw(st.lists(st.integers(0, high - 1), min_size=1, max_size=39))
    pieces, want = "".join(_streamed(subject.tokenizer, ids, draw)), subject.tokenizer.decode(ids)
    if subject.kind == "byte-level" or _NO_LETTER not in want:
        return None if pieces == want else f"{ids}: pieces {pieces!r}, expected {want!r}"
    letters = iter(pieces)
    missing = [letter for letter in want if letter != _NO_LETTER and letter not in letters]
    if missing:
        return f"{ids}: pieces {pieces!r} lack {missing} of {want!r}"
    alone = sum(len(subject.tokenizer.decode([x])) + 1 for x in ids)
    return None if len(pieces) <= alone else f"{ids}: {len(pieces)} letters {pieces!r}, expected {want!r}"


def _streamed(tokenizer: Tokenizer, ids: Sequence[int], draw: _Draw) -> Iterator[str]:
    growing, at = GrowingText(tokenizer), 0
    while at < len(ids):
        size = draw(st.sampled_from((1, 1, 2, 5, 16)))
        yield growing.add(ids[at : at + size], last=False)
        at += size
    yield growing.add([], last=True)


def _rows_end_where_they_end(subject: Subject, draw: _Draw) -> str | None:
    """Rows of several lengths, padded by an end token, decode to their texts."""
    rows = [[*subject.ids(text), 2] for text in draw(st.lists(texts(8), min_size=3, max_size=3))]
    width = max(map(len, rows)) + 2
    tokens = np.array([row + [2] * (width - len(row)) for row in rows], np.int32)
    got = rows_of(jnp.asarray(tokens), jnp.asarray([len(row) for row in rows]))
    if got != rows:
        return f"rows {got}, expected {rows}"
    want, decoded = [subject.tokenizer.decode(row[:-1]) for row in rows], texts_of(subject.tokenizer, got, jnp.asarray([2]))
    return None if decoded == want else f"texts {decoded}, expected {want}"


def _beyond_the_embedding(subject: Subject, draw: _Draw) -> str | None:
    """A token beyond the embedding is refused, unless it is for padding."""
    tokenizer = Tokenizer.from_str(subject.tokenizer.to_str())
    size, folder, settings = tokenizer.get_vocab_size(), subject.folder, {}
    for text in draw(st.lists(st.sampled_from((*_PADS, *_TEXTS)), max_size=3)):
        if tokenizer.token_to_id(text) is None:
            special = draw(st.booleans())
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([AddedToken(text, special=special)])
            settings |= draw(st.sampled_from(({}, {}, {}, {"pad_token": text}, {"pad_token": {"content": text}})))
    pad = settings.get("pad_token")
    pad = pad["content"] if isinstance(pad, dict) else pad
    beyond = [token for at, token in tokenizer.get_added_tokens_decoder().items() if at >= size]
    fits = all(token.content == pad or (token.special and "pad" in token.content.lower()) for token in beyond)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    try:
        load_tokenizer(folder, dataclasses.replace(World.config, vocab_size=size, eos_token_ids=(2,)))
    except ValueError as error:
        named = "got token ids up to" in str(error) and str(folder) in str(error)
        return None if not fits and named else f"refused: {error}"
    return None if fits else "a token without a row in the embedding was accepted"


_LAWS = (_pieces_are_the_text, _garbage_is_shown_once, _rows_end_where_they_end, _beyond_the_embedding)


# ---- tokenizers ---------------------------------------------------------------------------------------------------


def _subject(draw: _Draw, folder: pathlib.Path) -> Subject:
    kind = draw(st.sampled_from(("byte-level", "byte-level", "fallback", "metaspace")))
    words = draw(st.lists(st.sampled_from(_WORDS), unique=True))
    tokenizer = _byte_level(words) if kind == "byte-level" else fallback(words, kind == "metaspace")
    lossless = kind == "byte-level" and draw(st.integers(0, 2)) < 2
    if kind == "byte-level" and not lossless:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<s>", "</s>")])
    for text in draw(st.lists(st.sampled_from(("<tool>", "[INST]")), unique=True)):
        tokenizer.add_tokens([AddedToken(text, normalized=False)])
    return Subject(kind, tokenizer, lossless, folder)


def _byte_level(words: Sequence[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(("<unk>", "<s>", "</s>", *alphabet))}
    merges: list[tuple[str, str]] = []
    for word in words:
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)[0][0]
        for at in range(1, len(letters)):
            vocabulary.setdefault(letters[: at + 1], len(vocabulary))
            merges.append((letters[:at], letters[at]))
    tokenizer = Tokenizer(models.BPE(vocabulary, list(dict.fromkeys(merges))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def fallback(words: Sequence[str], metaspace: bool) -> Tokenizer:
    """The tokenizer of Llama 2 (a normalizer, and a decoder that strips a space), or with Metaspace as newer ones have."""
    pieces = ["▁", *"abcdefghXYZ0123456789,.", "é", "日", *(word.replace(" ", "▁") for word in words)]
    vocabulary = {x: i for i, x in enumerate(("<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))))}
    merges: list[tuple[str, str]] = []
    for piece in dict.fromkeys(pieces):
        known = len(piece) == 1 or all(letter in vocabulary for letter in piece)
        for at in range(1, len(piece)) if known else ():
            vocabulary.setdefault(piece[: at + 1], len(vocabulary))
            merges.append((piece[:at], piece[at]))
        if len(piece) == 1:
            vocabulary.setdefault(piece, len(vocabulary))
    merges = list(dict.fromkeys(merges))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    space = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = decoders.Sequence(space)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([*space, decoders.Strip(" ", 1, 0)])
    return tokenizer
