"""Boundary tables of SentenceKV: which tokens of a tokenizer end a sentence."""

import pathlib

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvjax.methods.sentencekv.boundaries import boundary_table

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("sentencekv")]
BUILTIN = pathlib.Path(__file__).parents[3] / "models" / "builtin" / "tokenizer.json"
OFFICIAL = [".", "!", "?", ". ", "! ", "? ", "...", "\n\n", "\n\n\n", "。", "！", "？", "。。"]


def shipped():
    return Tokenizer.from_file(str(BUILTIN))


def byte_level(texts):
    """A tokenizer with the 256 byte tokens and ``texts``, all spelled as byte-level BPE spells them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merged = [spell.pre_tokenize_str(text)[0][0] for text in texts]
    names = list(dict.fromkeys(alphabet + merged))
    tokenizer = Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, [names.index(name) for name in merged]


def plain_words(texts):
    """A tokenizer whose vocabulary holds the texts as they are."""
    return Tokenizer(models.WordLevel({text: at for at, text in enumerate(["<unk>", *texts])}, unk_token="<unk>"))


def marked(tokenizer, mode, size=None):
    """Vocabulary entries a table marks."""
    size = size or tokenizer.get_vocab_size()
    ends = boundary_table(tokenizer, size, mode=mode)
    assert isinstance(ends, np.ndarray) and ends.dtype == bool and ends.shape == (size,)
    return {tokenizer.id_to_token(int(at)) for at in np.flatnonzero(ends)}


def test_code_table_of_the_shipped_tokenizer():
    """Of the published list a byte-level vocabulary has only the bare marks."""
    assert marked(shipped(), "code", 5120) == {".", "!", "?", "..."}


def test_robust_table_of_the_shipped_tokenizer():
    tokenizer = shipped()
    got, vocabulary = marked(tokenizer, "robust", 5120), tokenizer.get_vocab()
    for ends in ".", "!", "?", "..", "...", "....", "Ġ.", "_.", "!...", ".âĢĿ", "!âĢĿ", "?âĢĿ", "...âĢĿ", ".âĢĻ":
        assert ends in vocabulary and ends in got, ends
    for goes_on in "Ċ", "Ġ", ",", "âĢĿ", 'Ġ"', ",âĢĿ", "?âĢĶ", "the", "Ġthe", "0", ")", "ĠâĢľ":
        assert goes_on not in got, goes_on
    want = set()
    for name, at in vocabulary.items():
        text = tokenizer.decode([at])
        while text and text[-1] in " \n\t\"'”’“‘)]}":
            text = text[:-1]
        if text and text[-1] in ".!?…。！？":
            want.add(name)
    assert got == want  # no entry of it has a blank line


ENDS = [
    ".\n", ".)", '?"', ". ", " .", "! ", "...", "。", "！", "？", "。。", "…", "\n\n", "\n\n\n", " \n\n", ".”", "!)", ".']",
]  # fmt: skip
GOES_ON = ["\n", " ", ",", ".5", "e.g", "(", ")", '"', " the", "?—", "。a", ":", ";", "\t"]


def test_tables_of_a_byte_level_tokenizer():
    tokenizer, at = byte_level(ENDS + GOES_ON)
    size = tokenizer.get_vocab_size()
    robust = boundary_table(tokenizer, size, mode="robust")
    code = boundary_table(tokenizer, size, mode="code")
    for text, index in zip(ENDS + GOES_ON, at, strict=True):
        assert robust[index] == (text in ENDS), repr(text)
        assert code[index] == (text == "..."), repr(text)
    assert marked(tokenizer, "code") == {".", "!", "?", "..."}  # entries with a space, newline or wide mark are not found


def test_tables_of_a_vocabulary_of_plain_strings():
    tokenizer = plain_words([*OFFICIAL, ".\n", '?"', ".)", "word", "..", "。！"])
    assert marked(tokenizer, "code") == set(OFFICIAL)
    assert marked(tokenizer, "robust") == {*OFFICIAL, ".\n", '?"', ".)", "..", "。！"}


def test_rows_of_the_embedding_without_a_token_end_nothing():
    for mode in ("robust", "code"):
        ends = boundary_table(shipped(), 5200, mode=mode)
        assert ends.shape == (5200,) and not ends[5120:].any()
        np.testing.assert_array_equal(ends[:5120], boundary_table(shipped(), 5120, mode=mode))


def test_the_default_table_is_the_robust_one():
    np.testing.assert_array_equal(boundary_table(shipped(), 5120), boundary_table(shipped(), 5120, mode="robust"))


def test_a_vocabulary_without_any_mark():
    for mode in ("robust", "code"):
        assert not boundary_table(plain_words(["one", "two"]), 3, mode=mode).any()


def test_unknown_modes_and_empty_vocabularies_are_refused():
    with pytest.raises(ValueError, match="mode must be one of robust, code, got 'strict'"):
        boundary_table(shipped(), 5120, mode="strict")
    with pytest.raises(ValueError, match="vocab_size must be at least 1 token, got 0"):
        boundary_table(shipped(), 0)
