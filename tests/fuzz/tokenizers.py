"""Random tokenizers of the kinds that models have: pieces of texts, one begin-of-text token, truncation, saving."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from experiments.benchmarks import TRUNCATIONS, Cell, Example, Reading, encode_cell
from experiments.tasks import encode_prompt
from kvjax.api.text import GrowingText, rows_of, texts_of
from models import load_tokenizer, param_shapes, save_pretrained
from tests.fuzz.arguments import World
from tests.fuzz.report import Outcome
from tests.fuzz.verdicts import verify
from tests.fuzz.words import one, random_text

_NO_LETTER = "\ufffd"
_WORDS = ("the", "and", "an", "in", "th", "ab", "日本", "é", "20", "\n\n", "  ", "😀", "()", "।", "ab c")
_PADS = ("<pad>", "[PAD]", "<|pad|>", "<PADDING>", "<|vision_pad|>")
_TEXTS = ("<|im_end|>", "<tool>", "<|python|>", "[INST]", "padding")


@dataclasses.dataclass
class Made:
    """A tokenizer and what is known about it.

    Attributes:
        kind: byte-level, fallback or metaspace.
        tokenizer: the tokenizer.
        opening: the tokens that it puts before a text.
        closed: whether it puts a token behind a text.
        lossless: whether it decodes the ids of a text to the text.
    """

    kind: str
    tokenizer: Tokenizer
    opening: tuple[str, ...]
    closed: bool
    lossless: bool


class Tokenizers:
    """Random tokenizers, and random texts for them.

    Args:
        seed: of all cases.
        folder: for files; the caller removes it.
    """

    def __init__(self, seed: int, folder: pathlib.Path) -> None:
        self.seed, self.folder, self.config = seed, folder, World.config

    def check(self, number: int) -> Iterator[Outcome]:
        """Give the outcomes of one tokenizer: each law counts as a case."""
        rng = np.random.default_rng([self.seed, 8, number])
        made = _random_tokenizer(rng)
        about = f"a {made.kind} tokenizer with {made.opening or 'nothing'} before a text"
        laws: tuple[Callable[[Made, np.random.Generator], str | None], ...] = (
            _pieces_are_the_text, _garbage_is_shown_once, _rows_end_where_they_end, _one_opening, self._truncation,
            self._saved, self._beyond_the_embedding,
        )  # fmt: skip
        for law in laws:
            if law in (self._saved, self._beyond_the_embedding, self._truncation) and number % 3:
                continue
            yield verify(f"{law.__name__} of {about}", lambda law=law: law(made, rng), right=lambda x: x, named=None)

    def _truncation(self, made: Made, rng: np.random.Generator) -> str | None:
        """A prompt that is cut keeps its opening, its template and its question, and has as many tokens as fit."""
        folder = self._folder()
        made.tokenizer.save(str(folder / "tokenizer.json"))
        around = ("".join(made.opening) + "User: ", "\nAnswer:") if rng.random() < 0.5 else None
        context, question = random_text(rng, 200, 0.8), "?" + random_text(rng, 5)
        example = Example("t", context, question, "", ("a",), int(rng.integers(1, 9)), "ruler_all")
        mode, limit = one(rng, TRUNCATIONS[:-1]), int(rng.integers(4, 200))
        reading = Reading(folder / "tokenizer.json", around, limit, mode)
        try:
            made_of = encode_cell(reading, Cell("t", None, 1, given=(example,)))
        except ValueError as error:
            return None if f"must fit {limit} tokens, got" in str(error) else f"refused in other words: {error}"
        plain = lambda text: made.tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
        head, tail, whole = made_of.heads[0], made_of.tails[0], made_of.wholes[0]
        before, after = around or ("".join(made.opening), "")
        opening = tuple(plain(before))
        if tail != tuple(plain(question + after)):
            return "the question is not whole"
        if len(head) + len(tail) + example.max_new_tokens > limit or len(whole) + example.max_new_tokens > limit:
            return f"{len(head)} + {len(tail)} tokens and {example.max_new_tokens} new ones for {limit}"
        # The template's last token may merge with the first of the context.
        sure = len(opening) - 1 if around else len(opening)
        if head[:sure] != opening[:sure]:
            return f"{mode} cut the opening: {head[:9]} for {opening}"
        if made.opening and head[len(made.opening) : 2 * len(made.opening)] == head[: len(made.opening)]:
            return f"the opening comes twice: {head[:9]}"
        return None

    def _saved(self, made: Made, rng: np.random.Generator) -> str | None:
        """A tokenizer object that is saved with a model is the tokenizer that is loaded."""
        config = dataclasses.replace(self.config, vocab_size=made.tokenizer.get_vocab_size() + 3, eos_token_ids=(2,))
        folder = self._folder()
        params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), param_shapes(config))
        save_pretrained(folder, params, config, tokenizer=made.tokenizer)
        back, text = load_tokenizer(folder, config), random_text(rng)
        ids = made.tokenizer.encode(text).ids
        return None if back.encode(text).ids == ids and back.decode(ids) == made.tokenizer.decode(ids) else "other ids"

    def _beyond_the_embedding(self, made: Made, rng: np.random.Generator) -> str | None:
        """A token beyond the embedding is refused, unless it is for padding."""
        tokenizer = Tokenizer.from_str(made.tokenizer.to_str())
        size, folder = tokenizer.get_vocab_size(), self._folder()
        config, named = dataclasses.replace(self.config, vocab_size=size, eos_token_ids=(2,)), {}
        for _ in range(int(rng.integers(0, 4))):
            special, text = bool(rng.random() < 0.6), one(rng, (*_PADS, *_TEXTS))
            if tokenizer.token_to_id(text) is not None:
                continue
            token = AddedToken(text, special=special)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
            if rng.random() < 0.2:
                named["pad_token"] = one(rng, (text, {"content": text}))
        pad = named.get("pad_token")
        pad = pad["content"] if isinstance(pad, dict) else pad
        fits = all(_pads(tokenizer, i, pad) for i in range(size, tokenizer.get_vocab_size()))
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
        try:
            load_tokenizer(folder, config)
        except ValueError as error:
            told = "got token ids up to" in str(error) and str(folder) in str(error)
            return None if not fits and told else f"refused: {error}"
        return None if fits else "a token without a row in the embedding was accepted"

    def _folder(self) -> pathlib.Path:
        folder = self.folder / "tokenizer"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder


def _pads(tokenizer: Tokenizer, at: int, named: str | None) -> bool:
    token = tokenizer.get_added_tokens_decoder()[at]
    return token.content == named or (token.special and "pad" in token.content.lower())


# ---- laws ---------------------------------------------------------------------------------------------------------


def _pieces_are_the_text(made: Made, rng: np.random.Generator) -> str | None:
    """The pieces of a row, in blocks of any size, are together what its ids decode to."""
    text = random_text(rng, int(one(rng, (3, 20, 60))), one(rng, (0.0, 0.4, 0.9)))
    ids = made.tokenizer.encode(text, add_special_tokens=bool(rng.random() < 0.5)).ids
    shown, want = "".join(_streamed(made.tokenizer, ids, rng)), made.tokenizer.decode(ids)
    if shown != want:
        return f"{text!r}: pieces {shown!r}, expected {want!r}"
    special = any(token in text for token in ("<s>", "</s>"))  # which no text has
    return None if not made.lossless or special or want == text else f"{text!r} became {want!r}"


def _garbage_is_shown_once(made: Made, rng: np.random.Generator) -> str | None:
    """Ids that no text has: what can be read is shown once and in order, and the pieces have no more letters than bytes."""
    size = made.tokenizer.get_vocab_size()
    high = 260 if rng.random() < 0.5 else size  # many tokens of single bytes
    ids = rng.integers(0, high, int(rng.integers(1, 40))).tolist()
    shown, want = "".join(_streamed(made.tokenizer, ids, rng)), made.tokenizer.decode(ids)
    if made.kind == "byte-level" or _NO_LETTER not in want:
        return None if shown == want else f"{ids}: pieces {shown!r}, expected {want!r}"
    letters = iter(shown)
    missing = [letter for letter in want if letter != _NO_LETTER and letter not in letters]
    if missing:
        return f"{ids}: pieces {shown!r} lack {missing} of {want!r}"
    alone = sum(len(made.tokenizer.decode([x])) + 1 for x in ids)
    return None if len(shown) <= alone else f"{ids}: {len(shown)} letters {shown!r}, expected {want!r}"


def _streamed(tokenizer: Tokenizer, ids: Sequence[int], rng: np.random.Generator) -> Iterator[str]:
    growing, at = GrowingText(tokenizer), 0
    while at < len(ids):
        size = int(one(rng, (1, 1, 2, 5, 16)))
        yield growing.add(ids[at : at + size], last=False)
        at += size
    yield growing.add([], last=True)


def _rows_end_where_they_end(made: Made, rng: np.random.Generator) -> str | None:
    """Rows of several lengths, padded by an end token, decode to their texts."""
    texts = [random_text(rng, 8) for _ in range(3)]
    rows = [[*made.tokenizer.encode(text, add_special_tokens=False).ids, 2] for text in texts]
    width = max(map(len, rows)) + 2
    tokens = np.array([row + [2] * (width - len(row)) for row in rows], np.int32)
    got = rows_of(jnp.asarray(tokens), jnp.asarray([len(row) for row in rows]))
    if got != rows:
        return f"rows {got}, expected {rows}"
    want = [made.tokenizer.decode(row[:-1]) for row in rows]
    shown = texts_of(made.tokenizer, got, jnp.asarray([2]))
    return None if shown == want else f"texts {shown}, expected {want}"


def _one_opening(made: Made, rng: np.random.Generator) -> str | None:
    """A prompt has the opening once, whether a template has written it or not."""
    text = "a" + random_text(rng, 10)
    written = made.tokenizer.encode("".join(made.opening) + text, add_special_tokens=False).ids
    added = made.tokenizer.encode(text).ids[: -1 if made.closed else None]
    for given, want in ((text, added), ("".join(made.opening) + text, written)):
        ids = encode_prompt(made.tokenizer, given)
        if ids != want:
            return f"{given!r}: {ids}, expected {want}"
    return None


# ---- tokenizers ---------------------------------------------------------------------------------------------------


def _random_tokenizer(rng: np.random.Generator) -> Made:
    kind = one(rng, ("byte-level", "byte-level", "fallback", "metaspace"))
    words = [str(x) for x in rng.permutation(_WORDS)[: int(rng.integers(0, len(_WORDS)))]]
    if kind == "byte-level":
        tokenizer = _byte_level(words)
        if rng.random() < 0.3:
            tokenizer.normalizer = normalizers.NFC()
    else:
        tokenizer = _fallback(words, bool(kind == "metaspace"))
    opening = one(rng, ((), ("<s>",), ("<s>",), ("[gMASK]", "<s>")))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<s>", "</s>", *opening)])
    for text in ("<tool>", "[INST]"):
        if rng.random() < 0.3:
            tokenizer.add_tokens([AddedToken(text, normalized=False)])
    end = ["</s>"] if opening and rng.random() < 0.2 else []  # some tokenizers end texts, too
    if opening:
        ids = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys((*opening, "</s>"))]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*opening, "$A", *end], pair=[*opening, "$A", "$B"], special_tokens=ids
        )
    return Made(kind, tokenizer, opening, bool(end), kind == "byte-level" and tokenizer.normalizer is None)


def _byte_level(words: Sequence[str]) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(("<unk>", "<s>", "</s>", *letters))}
    merges: list[tuple[str, str]] = []
    for word in words:
        made = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)[0][0]
        for at in range(1, len(made)):
            vocabulary.setdefault(made[: at + 1], len(vocabulary))
            if (made[:at], made[at]) not in merges:
                merges.append((made[:at], made[at]))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _fallback(words: Sequence[str], metaspace: bool) -> Tokenizer:
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
