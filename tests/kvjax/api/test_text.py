"""Text that grows by pieces of whole characters, and ends within a character or before a stop string."""

import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvjax.api.text import GrowingText, stop_in, until_stop
from models import builtin_directory, load_tokenizer

LETTERS = "abcXYZ019., \n<>{}()éüßø日本語。עبي😀👩\u200d👧e\u0301\u2028\u00a0\u200b\ufeffﬁ"
NO_LETTER = "\ufffd"


def fallback(metaspace):
    """The tokenizer of Llama 2 (a normalizer, and a decoder that strips a space), or with Metaspace as newer ones have."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcXYZ019.,", "é", "日", "a▁b"]
    vocabulary = {token: i for i, token in enumerate([*tokens, "a▁"])}
    merges = [("a", "▁"), ("a▁", "b")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    space = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = decoders.Sequence(space)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([*space, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<s>", "</s>")])
    return tokenizer


KINDS = {
    "byte-level": lambda: load_tokenizer(builtin_directory()),
    "fallback": lambda: fallback(False),
    "metaspace": lambda: fallback(True),
}


def grown(tokenizer, ids, block, stops=()):
    text = GrowingText(tokenizer, stops)
    return [text.add(ids[at : at + block], at + block >= len(ids)) for at in range(0, max(len(ids), 1), block)]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_the_text_and_what_no_text_has_is_shown_once(kind):
    """In blocks of any size; of ids that no text has, what can be read comes in order, with no more letters than bytes."""
    tokenizer, draw, size = KINDS[kind](), random.Random(0), KINDS[kind]().get_vocab_size()
    for _ in range(300):
        text = "".join(draw.choices(LETTERS, k=draw.randint(1, 60)))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        pieces, want = grown(tokenizer, ids, draw.choice((1, 1, 2, 5, 16))), tokenizer.decode(ids)
        assert "".join(pieces) == want and (kind != "byte-level" or want == text)
        assert NO_LETTER in want or not any(NO_LETTER in piece for piece in pieces), "half a character"
        ids = [draw.randrange(draw.choice((min(260, size), size))) for _ in range(draw.randint(1, 39))]
        shown, want = "".join(grown(tokenizer, ids, draw.choice((1, 1, 2, 5, 16)))), tokenizer.decode(ids)
        if kind == "byte-level" or NO_LETTER not in want:
            assert shown == want
        else:
            letters = iter(shown)
            assert all(letter in letters for letter in want if letter != NO_LETTER)
            assert len(shown) <= sum(len(tokenizer.decode([x])) + 1 for x in ids)


def test_a_row_that_ends_within_a_character_keeps_what_was_shown():
    """A byte-fallback tokenizer turns the whole characters before the broken one into U+FFFD, too."""
    tokenizer = fallback(metaspace=False)
    byte, letter = tokenizer.token_to_id("<0xC3>"), tokenizer.token_to_id("a")
    ids = tokenizer.encode("你好").ids[:-1]
    assert "".join(grown(tokenizer, ids, 1)) == "你\ufffd\ufffd"
    bad = [byte, *tokenizer.encode("a你").ids[1:]]  # a first byte without its second
    assert "".join(grown(tokenizer, bad, 1)) == "\ufffda你"
    assert "".join(grown(tokenizer, [*tokenizer.encode("你").ids, byte, letter], 1)) == "你\ufffda"


class Letters:
    def decode(self, ids):
        return "".join("abc"[token] for token in ids)


def test_a_text_ends_before_a_stop_string_whatever_its_pieces_are():
    rng, cut = np.random.default_rng(0), 0
    for _ in range(300):
        ids = rng.integers(0, 3, rng.integers(0, 12)).tolist()
        stops = [Letters().decode(rng.integers(0, 3, size)) for size in rng.integers(1, 5, rng.integers(1, 4))]
        whole = Letters().decode(ids)
        ends = [end for end in range(len(whole) + 1) if whole[:end].endswith(tuple(stops))]
        assert until_stop(Letters(), ids, stops) == (ends[0] if ends else len(ids))
        if ends:
            longest = max(len(stop) for stop in stops if whole[: ends[0]].endswith(stop))
            whole, cut = whole[: ends[0] - longest], cut + 1
        for block in (1, 2, 5):
            assert "".join(grown(Letters(), ids, block, stops)) == whole
    assert 50 < cut < 250 and stop_in("abc", ["d"]) is None
