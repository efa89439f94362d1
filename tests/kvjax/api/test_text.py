"""Text that grows: its pieces are the whole text, whatever the tokenizer does with bytes of half a character."""

from __future__ import annotations

import itertools
import json

import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from kvjax.api.text import GrowingText

# SentencePiece's way, as in Llama 2, Mistral and Yi: characters without a token are the tokens of their bytes.
BYTE_FALLBACK = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "vocab": {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁": 257, "a": 258, "é": 259},
            "merges": [],
        },
    }
)
BYTE_LEVEL = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {char: at for at, char in enumerate(sorted(ByteLevel.alphabet()))},
            "merges": [],
        },
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    }
)
TEXTS = "你好，世界", "▁a 你a é好", "👩\u200d🚀👩\u200d🚀", "aé", "\ufffd你", "कि", ""


def grown(tokenizer, ids, block):
    text = GrowingText(tokenizer)
    return [text.add(ids[at : at + block], at + block >= len(ids)) for at in range(0, max(len(ids), 1), block)]


@pytest.mark.parametrize("kind", [BYTE_FALLBACK, BYTE_LEVEL], ids=["byte_fallback", "byte_level"])
def test_pieces_of_text_are_the_text(kind):
    tokenizer = Tokenizer.from_str(kind)
    for text, block in itertools.product(TEXTS, (1, 2, 3, 4, 7, 100)):
        ids = tokenizer.encode(text).ids
        pieces = grown(tokenizer, ids, block)
        assert "".join(pieces) == tokenizer.decode(ids), (text, block, pieces)
        if "\ufffd" not in text:
            assert all("\ufffd" not in piece for piece in pieces) and (block > 2 or len(ids) < 9 or any(pieces[: 8 // block]))


def test_a_row_that_ends_within_a_character_keeps_what_was_shown():
    """A byte-fallback tokenizer turns the whole characters before the broken one into U+FFFD, too."""
    tokenizer = Tokenizer.from_str(BYTE_FALLBACK)
    ids = tokenizer.encode("你好").ids[:-1]
    assert "".join(grown(tokenizer, ids, 1)) == "你\ufffd\ufffd"
    bad = [0xC3 + 1, *tokenizer.encode("a你").ids]  # a first byte without its second
    assert "".join(grown(tokenizer, bad, 1)) == "\ufffda你"
    assert "".join(grown(tokenizer, [*tokenizer.encode("你").ids, 0xC3 + 1, 258], 1)) == "你\ufffda"
