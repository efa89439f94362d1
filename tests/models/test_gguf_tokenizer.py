"""Tokenizers of GGUF files, byte-level and SentencePiece: ids against transformers and plain loops, frames, templates."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers import models as kinds

import models
from models.files import gguf as gguf_files
from models.files.gguf.splits import SPLITS
from tests.models import gguf_writing
from tests.models.test_parity import GOLDENS

GOLDEN = json.loads((GOLDENS / "gguf" / "tokens.json").read_text(encoding="utf-8"))
VOCABULARY = {token: i for i, token in enumerate(GOLDEN["tokens"])}
RANKS = {tuple(merge.split(" ")): i for i, merge in enumerate(GOLDEN["merges"])}


def write(path, pre, **values):
    """A file that holds the golden's tokenizer and no model."""
    keys = gguf_writing.tokenizer_metadata(GOLDEN["tokens"], GOLDEN["merges"], pre, GOLDEN["kinds"])
    keys |= {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    keys = {key: value for key, value in keys.items() if value is not None}
    gguf_writing.write(path, {"general.architecture": "llama", **keys}, {"a": np.zeros(1, np.float32)})
    return path


def load(tmp_path, pre, **values):
    return models.load_tokenizer(write(tmp_path / "t.gguf", pre, **values))


@pytest.mark.parametrize("pre", sorted(GOLDEN["ids"]))
def test_ids_equal_transformers(pre, tmp_path):
    tokenizer = load(tmp_path, pre)
    for text, ids in zip(GOLDEN["texts"], GOLDEN["ids"][pre], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text


# llama.cpp's patterns (llama-vocab.cpp), which name letters of both cases instead of ignoring case.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CASES = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|"
_LINES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"],
    "smaug-bpe": [_CASES + r"\p{N}{1,3}" + _LINES],
    "llama-bpe": [_CASES + r"\p{N}{1,3}" + _LINES],
    "qwen2": [_CASES + r"\p{N}" + _LINES],
    "deepseek-r1-qwen": [_CASES + r"\p{N}" + _LINES],
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
}


def byte_alphabet():
    """GPT-2's character for each byte: itself where it can be seen, else the next free one from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def cut(pieces, pattern):
    """Every piece cut into the matches of a pattern and what lies between them."""
    regex = pytest.importorskip("regex", reason="the oracle needs the package regex")
    for piece in pieces:
        at = 0
        for match in regex.finditer(pattern, piece):
            yield from (part for part in (piece[at : match.start()], match.group()) if part)
            at = match.end()
        if piece[at:]:
            yield piece[at:]


def oracle(text, pre):
    """Token ids in plain loops: cut into words, spell bytes, join the pair of the lowest rank until there is none."""
    alphabet = byte_alphabet()
    pieces = [text]
    for pattern in PATTERNS[pre]:
        pieces = list(cut(pieces, pattern))
    ids = []
    for piece in pieces:
        symbols = [alphabet[byte] for byte in piece.encode()]
        if pre == "llama-bpe" and "".join(symbols) in VOCABULARY:
            symbols = ["".join(symbols)]
        while True:
            ranked = [(RANKS[pair], i) for i, pair in enumerate(zip(symbols, symbols[1:])) if pair in RANKS]
            if not ranked:
                break
            at = min(ranked)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        ids += [VOCABULARY[symbol] for symbol in symbols]
    return ids


@pytest.mark.parametrize("pre", sorted(PATTERNS))
def test_ids_equal_plain_loops(pre, tmp_path):
    tokenizer = load(tmp_path, pre)
    for text in GOLDEN["texts"]:
        if "<|im_" not in text:
            assert tokenizer.encode(text, add_special_tokens=False).ids == oracle(text, pre), text


def test_every_kind_of_tokenizer_differs(tmp_path):
    """So the tests above would see it if one stood for the other. And each decodes to the text."""
    found = {}
    for pre in ("default", "gpt-2", "smollm", "llama-bpe", "tekken", "qwen2", "falcon", "deepseek-coder"):
        tokenizer = load(tmp_path, pre)
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in GOLDEN["texts"]]
        assert [tokenizer.decode(i, skip_special_tokens=False) for i in ids] == GOLDEN["texts"]
        found[pre] = str(ids)
    assert len(set(found.values())) == len(found), [(a, b) for a in found for b in found if a < b and found[a] == found[b]]
    assert load(tmp_path, None).to_str() == load(tmp_path, "default").to_str()  # as in llama.cpp


def test_qwen2_composes_characters(tmp_path):
    """Qwen's own tokenizer.json does (NFC)."""
    apart, whole = "e\N{COMBINING ACUTE ACCENT}", "é"
    ids = {pre: [load(tmp_path, pre).encode(text).ids for text in (apart, whole)] for pre in ("qwen2", "llama-bpe")}
    assert ids["qwen2"][0] == ids["qwen2"][1] == ids["llama-bpe"][1] != ids["llama-bpe"][0]


def test_whole_words_win_over_merges_in_llama_3(tmp_path):
    """A token that no merges lead to, as in Llama 3's own tokenizer.json (``ignore_merges``)."""
    ids = {pre: load(tmp_path, pre).encode("unmerged").ids for pre in ("llama-bpe", "tekken", "smaug-bpe", "qwen2")}
    assert ids["llama-bpe"] == ids["tekken"] == [VOCABULARY["unmerged"]]
    assert len(ids["smaug-bpe"]) > 1 and len(ids["qwen2"]) > 1


def test_special_tokens_stay_whole(tmp_path):
    tokenizer = load(tmp_path, "smollm")
    start, end = len(GOLDEN["tokens"]) - 2, len(GOLDEN["tokens"]) - 1
    ids = tokenizer.encode("<|im_start|>a<|im_end|>").ids
    assert ids == [start, VOCABULARY["a"], end]
    assert tokenizer.decode(ids) == "a" and tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"


@pytest.mark.parametrize(
    ("pre", "flags", "before", "after"),
    [
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("smollm", {}, False, False),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, True, True),
        ("qwen2", {"add_eos_token": True}, False, True),
    ],
)
def test_special_tokens_frame_an_encoded_text(pre, flags, before, after, tmp_path):
    """Which tokens stand around an encoded text; a rendered chat template is encoded without them."""
    start, end = len(GOLDEN["tokens"]) - 2, len(GOLDEN["tokens"]) - 1
    tokenizer = load(tmp_path, pre, bos_token_id=start, eos_token_id=end, **flags)
    a, b = VOCABULARY["a"], VOCABULARY["b"]
    first, last = [start] * before, [end] * after
    assert tokenizer.encode("a").ids == first + [a] + last
    assert tokenizer.encode("a", "b").ids == first + [a] + last + first + [b] + last
    assert tokenizer.encode("a", add_special_tokens=False).ids == [a]


def test_special_tokens_and_templates_are_read(tmp_path):
    start, end = len(GOLDEN["tokens"]) - 2, len(GOLDEN["tokens"]) - 1
    path = write(
        tmp_path / "t.gguf", "smollm", bos_token_id=start, eos_token_id=end, unknown_token_id=0, padding_token_id=end
    )
    assert models.special_tokens(path) == models.special_tokens(tmp_path) == {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": GOLDEN["tokens"][0], "pad_token": "<|im_end|>",
    }  # fmt: skip
    assert models.ChatTemplate.from_directory(path) is None
    keys = {"general.architecture": "llama", "tokenizer.chat_template": "d", "tokenizer.chat_template.rag": "r"}
    gguf_writing.write(path, {**keys, "tokenizer.chat_templates": ["rag"]}, {})
    assert models.ChatTemplate.from_directory(path) == models.ChatTemplate("d")
    assert models.ChatTemplate.from_directory(tmp_path, "rag").template == "r"
    with pytest.raises(ValueError, match="t.gguf has no chat template 'tool', it has: default, rag"):
        models.ChatTemplate.from_directory(path, "tool")


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    config = models.ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=16,
        max_position_embeddings=64,
    )  # fmt: skip
    with pytest.raises(ValueError, match=rf"t.gguf does not belong to this model: got token ids up to {len(VOCABULARY) - 1}"):
        models.load_tokenizer(write(tmp_path / "t.gguf", "smollm"), config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "llama"}, "tokenizer.ggml.scores"), ({"model": "llama", "scores": [0.5]}, "a score and a type for each"),
        ({"model": "bert"}, "'bert' .WordPiece."),
        ({"model": "plamo2"}, "'plamo2'"), ({"model": None}, "tokenizer.ggml.model"), ({"pre": "kimi-k2"}, "'kimi-k2'"),
        ({"merges": None}, "tokenizer.ggml.merges"), ({"tokens": None, "merges": None}, "ggml.tokens, tokenizer.ggml.merges"),
        ({"tokens": ["a", "b", "a"]}, "repeats tokens"), ({"merges": ["a zz"]}, "merges"), ({"merges": ["azz"]}, "merges"),
        ({"bos_token_id": 10000}, "bos_token_id"),
    ],
)  # fmt: skip
def test_malformed_tokenizers_are_refused(change, named, tmp_path):
    path = write(tmp_path / "t.gguf", **{"pre": "smollm", **change})
    with pytest.raises(ValueError, match=f"t.gguf.*{named}"):
        models.load_tokenizer(path)


def test_every_kind_compiles(tmp_path):
    for pre in SPLITS:
        assert load(tmp_path, pre).encode("a 1").ids


PIECES = {  # piece -> score; the pair of the highest score is merged first
    "<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, **{f"<0x{byte:02X}>": 0.0 for byte in range(256)},
    "\u2581": -9.0, "a": -10.0, "b": -11.0, "c": -12.0, "ab": -2.0, "bc": -1.0, "abc": -3.0, "\u2581a": -4.0,
    "\u2581\u2581": -5.0, "\u2581abc": -6.0, "<mark>": 0.0,
}  # fmt: skip
TYPES = [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 260), 4]


def words(model, **values):
    return {
        "general.architecture": "llama", "tokenizer.ggml.model": model, "tokenizer.ggml.tokens": list(PIECES),
        "tokenizer.ggml.scores": list(PIECES.values()), "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in values.items()},
    }  # fmt: skip


def opened(tmp_path, values):
    gguf_writing.write(tmp_path / "x.gguf", values, {})
    return gguf_files.open_file(tmp_path / "x.gguf")


def bpe(text):
    """SentencePiece's merging in a loop: of all neighbours that are a piece together, the two of the highest score."""
    parts = list(text)
    while True:
        pairs = [(PIECES[a + b], -at) for at, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in PIECES]
        if not pairs:
            return [piece for x in parts for piece in ([x] if x in PIECES else [f"<0x{byte:02X}>" for byte in x.encode()])]
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


TEXTS = ["abc", "a bc  ab", "abcabc é\n", "", "  ", "cab"]


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_merged_as_sentencepiece_merges_them(prefix, tmp_path):
    tokenizer = gguf_files.build_tokenizer(opened(tmp_path, words("llama", add_space_prefix=prefix)))
    for text in TEXTS:
        spaced = ("\u2581" * (prefix and text != "")) + text.replace(" ", "\u2581")
        got = tokenizer.encode(text)
        assert got.tokens == ["<s>", *bpe(spaced)], text
        assert tokenizer.decode(got.ids) == text
    assert tokenizer.encode("ab<mark>", add_special_tokens=False).tokens[-1] == "<mark>"


def test_unigram_takes_the_best_division(tmp_path):
    """Against the same model in the library's own terms."""
    tokenizer = gguf_files.build_tokenizer(opened(tmp_path, words("t5", add_bos_token=False)))
    plain = Tokenizer(kinds.Unigram(list(PIECES.items()), 0, True))
    plain.normalizer = normalizers.Replace(" ", "\u2581")
    plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    plain.decoder = decoders.Metaspace()
    for text in ("abc", "a bc ab", "cab abc"):
        assert tokenizer.encode(text).ids == plain.encode(text).ids, text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
