"""Random tokenizers of the kinds that models have: pieces of texts, one begin-of-text token, truncation, saving."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from experiments.benchmarks import TRUNCATIONS, Cell, Example, Reading, encode_cell
from experiments.tasks import encode_prompt
from kvjax.api.text import GrowingText, rows_of, texts_of
from models import load_tokenizer, param_shapes, save_pretrained
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
        opening: the tokens that it puts before a text.
        closed: whether it puts a token behind a text.
        lossless: whether it decodes the ids of a text to the text.
        folder: for files.
    """

    kind: str
    tokenizer: Tokenizer
    opening: tuple[str, ...]
    closed: bool
    lossless: bool
    folder: pathlib.Path

    def ids(self, text: str, special: bool = False) -> list[int]:
        """Encode a text, with what the tokenizer puts around it or without."""
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def emptied(self) -> pathlib.Path:
        """The folder, without the files of the law before."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        return self.folder


def check(data: st.DataObject, folder: pathlib.Path) -> Iterator[None]:
    """Check one law of one tokenizer."""
    subject = _subject(data.draw, folder / "tokenizer")
    law = data.draw(st.sampled_from(_LAWS))
    about = f"{law.__name__} of a {subject.kind} tokenizer with {subject.opening or 'nothing'} before a text"
    judge(about, lambda: law(subject, data.draw), right=lambda fault: fault)
    yield


# ---- laws ---------------------------------------------------------------------------------------------------------


def _pieces_are_the_text(subject: Subject, draw: _Draw) -> str | None:
    """The pieces of a row, in blocks of any size, are together what its ids decode to."""
    text = draw(texts(60))
    ids = subject.ids(text, draw(st.booleans()))
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


def _one_opening(subject: Subject, draw: _Draw) -> str | None:
    """A prompt has the opening once, whether a template has written it or not."""
    text = "a" + draw(texts(10))
    written = "".join(subject.opening) + text
    for prompt, want in ((text, subject.ids(text, True)[: -1 if subject.closed else None]), (written, subject.ids(written))):
        if (ids := encode_prompt(subject.tokenizer, prompt)) != want:
            return f"{prompt!r}: {ids}, expected {want}"
    return None


def _truncated(subject: Subject, draw: _Draw) -> str | None:
    """A prompt that is cut keeps its opening, its template and its question, and has as many tokens as fit."""
    folder = subject.emptied()
    subject.tokenizer.save(str(folder / "tokenizer.json"))
    around = ("".join(subject.opening) + "User: ", "\nAnswer:") if draw(st.booleans()) else None
    question, room = "?" + draw(texts(5)), draw(st.integers(1, 8))
    example = Example("t", draw(texts(200)), question, "", ("a",), room, "ruler_all")
    mode, limit = draw(st.sampled_from(TRUNCATIONS[:-1])), draw(st.integers(4, 199))
    reading = Reading(folder / "tokenizer.json", around, limit, mode)
    try:
        encoded = encode_cell(reading, Cell("t", None, 1, given=(example,)))
    except ValueError as error:
        return None if f"must fit {limit} tokens, got" in str(error) else f"refused in other words: {error}"
    head, tail, whole = encoded.heads[0], encoded.tails[0], encoded.wholes[0]
    before, after = around or ("".join(subject.opening), "")
    opening = tuple(subject.ids(before))
    if tail != tuple(subject.ids(question + after)):
        return "the question is not whole"
    if max(len(head) + len(tail), len(whole)) + room > limit:
        return f"{len(head)} + {len(tail)} tokens and {room} new ones for {limit}"
    # The template's last token may merge with the first of the context.
    sure = len(opening) - 1 if around else len(opening)
    if head[:sure] != opening[:sure]:
        return f"{mode} cut the opening: {head[:9]} for {opening}"
    count = len(subject.opening)
    return f"the opening comes twice: {head[:9]}" if count and head[count : 2 * count] == head[:count] else None


def _saved(subject: Subject, draw: _Draw) -> str | None:
    """A tokenizer object that is saved with a model is the tokenizer that is loaded."""
    config = dataclasses.replace(World.config, vocab_size=subject.tokenizer.get_vocab_size() + 3, eos_token_ids=(2,))
    folder = subject.emptied()
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), param_shapes(config))
    save_pretrained(folder, params, config, tokenizer=subject.tokenizer)
    back, text = load_tokenizer(folder, config), draw(texts())
    ids = subject.ids(text, True)
    return None if back.encode(text).ids == ids and back.decode(ids) == subject.tokenizer.decode(ids) else "other ids"


def _beyond_the_embedding(subject: Subject, draw: _Draw) -> str | None:
    """A token beyond the embedding is refused, unless it is for padding."""
    tokenizer = Tokenizer.from_str(subject.tokenizer.to_str())
    size, folder, settings = tokenizer.get_vocab_size(), subject.emptied(), {}
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


_LAWS = (
    _pieces_are_the_text, _garbage_is_shown_once, _rows_end_where_they_end, _one_opening, _truncated, _saved,
    _beyond_the_embedding,
)  # fmt: skip


# ---- tokenizers ---------------------------------------------------------------------------------------------------


def _subject(draw: _Draw, folder: pathlib.Path) -> Subject:
    kind = draw(st.sampled_from(("byte-level", "byte-level", "fallback", "metaspace")))
    words = draw(st.lists(st.sampled_from(_WORDS), unique=True))
    tokenizer = _byte_level(words) if kind == "byte-level" else fallback(words, kind == "metaspace")
    lossless = kind == "byte-level" and draw(st.integers(0, 2)) < 2
    if kind == "byte-level" and not lossless:
        tokenizer.normalizer = normalizers.NFC()
    opening = draw(st.sampled_from(((), ("<s>",), ("<s>",), ("[gMASK]", "<s>"))))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<s>", "</s>", *opening)])
    for text in draw(st.lists(st.sampled_from(("<tool>", "[INST]")), unique=True)):
        tokenizer.add_tokens([AddedToken(text, normalized=False)])
    end = ["</s>"] if opening and draw(st.integers(0, 4)) == 4 else []  # some tokenizers end texts, too
    if opening:
        ids = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys((*opening, "</s>"))]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*opening, "$A", *end], pair=[*opening, "$A", "$B"], special_tokens=ids
        )
    return Subject(kind, tokenizer, opening, bool(end), lossless, folder)


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
