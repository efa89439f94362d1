"""Text that grows and ends within a character. `tests.fuzz.tokenizers` has the law of whole characters."""

from __future__ import annotations

from kvjax.api.text import GrowingText
from tests.fuzz.tokenizers import fallback


def grown(tokenizer, ids, block):
    text = GrowingText(tokenizer)
    return [text.add(ids[at : at + block], at + block >= len(ids)) for at in range(0, max(len(ids), 1), block)]


def test_a_row_that_ends_within_a_character_keeps_what_was_shown():
    """A byte-fallback tokenizer turns the whole characters before the broken one into U+FFFD, too."""
    tokenizer = fallback([], metaspace=False)
    byte, letter = tokenizer.token_to_id("<0xC3>"), tokenizer.token_to_id("a")
    ids = tokenizer.encode("你好").ids[:-1]
    assert "".join(grown(tokenizer, ids, 1)) == "你\ufffd\ufffd"
    bad = [byte, *tokenizer.encode("a你").ids[1:]]  # a first byte without its second
    assert "".join(grown(tokenizer, bad, 1)) == "\ufffda你"
    assert "".join(grown(tokenizer, [*tokenizer.encode("你").ids, byte, letter], 1)) == "你\ufffda"
