"""Text that grows and ends within a character. `tests.fuzz.tokenizers` has the law of whole characters."""

import numpy as np

from kvjax.api.text import GrowingText, stop_in, until_stop
from tests.fuzz.tokenizers import fallback


def grown(tokenizer, ids, block, stops=()):
    text = GrowingText(tokenizer, stops)
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
