"""Users' texts: encodings of files, and one begin-of-text token in a prompt, whatever is cut out of it."""

import codecs
import json

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import models.loaded
import models.text.tokenizer
from experiments.benchmarks import Cell, Reading, encode_cell
from experiments.cli import read_record
from experiments.evaluation import EvaluationSettings
from experiments.tasks import Example, encode_prompt, held_out_text, opening_ids, read_text, source_text
from models import ChatTemplate, builtin_directory

TEXT = "Größe — naïve 日本\nnext line"


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    """The shipped tokenizer, which puts a begin-of-text token first, as Llama 3 does."""
    tokenizer = Tokenizer.from_file(str(builtin_directory() / "tokenizer.json"))
    tokenizer.add_special_tokens(["<bos>", "<user>", "<model>"])
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-be"])
def test_a_text_is_read_without_its_byte_order_mark(encoding, tmp_path):
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    (tmp_path / "book.txt").write_bytes(mark + TEXT.replace("\n", "\r\n").encode(encoding))
    assert read_text(tmp_path / "book.txt") == source_text(f"file:{tmp_path / 'book.txt'}") == TEXT


@pytest.mark.parametrize(
    "data, told",
    [
        ("a\nGröße".encode("latin-1"), r"book.txt is not UTF-8 text, .* \(line 2\); for a file in Latin-1: iconv"),
        ("plain".encode("utf-16-le"), "book.txt is not text: got a NUL character, as in UTF-16 without a byte-order mark"),
        (codecs.BOM_UTF16_LE + b"abc", "book.txt is not UTF-8 text, expected .* truncated data"),
        (b"\x1f\x8b\x08\x00", "book.txt is not UTF-8 text"),
    ],
)
def test_a_text_of_an_unknown_encoding_is_refused(data, told, tmp_path):
    (tmp_path / "book.txt").write_bytes(data)
    for read in (read_text, lambda path: source_text(f"file:{path}"), lambda path: held_out_text(f"file:{path}")):
        with pytest.raises(ValueError, match=told):
            read(tmp_path / "book.txt")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "shift_jis", "utf-16"])
def test_templates_settings_and_records_are_utf_8_or_refused(encoding, tmp_path):
    text = "Größe" if encoding == "latin-1" else "日本語"
    record = {"experiment": "speed", "metrics": [{"name": "time", "value": 1.0}], "settings": {"model": text}}
    for name, content, read in (
        ("chat_template.jinja", text, lambda file: ChatTemplate.from_directory(file.parent).template),
        ("settings.yaml", f"model: {text}", lambda file: EvaluationSettings.from_yaml(file).model),
        ("record.json", json.dumps(record, ensure_ascii=False), lambda file: read_record(file)["settings"]["model"]),
    ):
        (tmp_path / name).write_bytes(content.encode(encoding))
        if encoding.startswith("utf-8"):
            assert read(tmp_path / name) == text
        else:
            with pytest.raises(ValueError, match=name):
                read(tmp_path / name)


def test_a_rendered_template_gets_no_second_begin_of_text(tokenizer_file):
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    bos, plain = tokenizer.token_to_id("<bos>"), tokenizer.encode("a b", add_special_tokens=False).ids
    assert encode_prompt(tokenizer, "a b") == encode_prompt(tokenizer, "<bos>a b") == [bos, *plain]
    assert encode_prompt(tokenizer, "") == encode_prompt(tokenizer, "<bos>") == [bos]
    assert encode_prompt(tokenizer, "<bos><bos>a b") == [bos, bos, *plain]
    silent = Tokenizer.from_file(str(builtin_directory() / "tokenizer.json"))
    assert encode_prompt(silent, "a a b") == silent.encode("a a b").ids


def test_an_opening_of_two_tokens_comes_once_and_nothing_ends_a_prompt(tmp_path):
    """GLM's tokenizers put two tokens before a text; some others put an end-of-text token behind it."""
    tokenizer = Tokenizer.from_file(str(builtin_directory() / "tokenizer.json"))
    tokenizer.add_special_tokens(["[gMASK]", "<sop>", "<eos>"])
    first, second, end = ids = [tokenizer.token_to_id(text) for text in ("[gMASK]", "<sop>", "<eos>")]
    named = [*zip(("[gMASK]", "<sop>", "<eos>"), ids, strict=True)]
    tokenizer.post_processor = TemplateProcessing(single="[gMASK] <sop> $A <eos>", special_tokens=named)
    assert tokenizer.encode("a b").ids[-1] == end
    plain = tokenizer.encode("a b", add_special_tokens=False).ids
    assert opening_ids(tokenizer) == models.text.tokenizer.opening_ids(tokenizer) == [first, second]
    assert encode_prompt(tokenizer, "a b") == encode_prompt(tokenizer, "[gMASK]<sop>a b") == [first, second, *plain]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    example = Example("mine", "a b" * 99, "a b", "", ("x",), 4, "ruler_all")
    made = encode_cell(Reading(tmp_path / "tokenizer.json", None, 30, "tail"), Cell("mine", None, 1, given=(example,)))
    assert made.heads[0][:2] == (first, second) and len(made.wholes[0]) == 26 and end not in made.wholes[0]
    loaded = models.loaded.Loaded("a model", {}, None, tokenizer, tmp_path, None)
    for bad in (("a\ud800b", "q"), ("a", "\udcff")):  # as JSON and a command line of another encoding hold it
        with pytest.raises(ValueError, match=r"expected Unicode text, got half of a surrogate pair at character \d"):
            loaded.encode(*bad)
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            encode_prompt(tokenizer, "".join(bad))
    assert loaded.encode("a b", "a b") == loaded.encode("[gMASK]<sop>a b", "a b") == ([first, second, *plain], plain)


@pytest.mark.parametrize("mode", ["middle", "head", "tail"])
@pytest.mark.parametrize("around", [None, ("<bos><user> be brief.\n", "\n<model>")], ids=["plain", "template"])
@pytest.mark.parametrize("begins", ["", "<bos>"])
def test_truncation_cuts_the_context_alone(mode, around, begins, tokenizer_file):
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    context = " ".join(f"word{n}" for n in range(80))
    if around is None:
        context = begins + context
    example = Example("mine", context, "\nWhy?", "", ("x",), 4, "answer")
    before = encode_prompt(tokenizer, "") if around is None else tokenizer.encode(around[0], add_special_tokens=False).ids
    cell = Cell("mine", None, 1, given=(example,))
    encoded, uncut = (encode_cell(Reading(tokenizer_file, around, limit, mode), cell) for limit in (100, 9999))
    whole = list(encoded.wholes[0])
    assert whole[: len(before)] == list(encoded.heads[0][: len(before)]) == before and encoded.cut[0] > 0
    assert whole.count(before[0]) == 1 and len(whole) + 4 <= 100
    assert whole[-len(encoded.tails[0]) :] == list(encoded.tails[0]) == list(uncut.tails[0])
    rest = tokenizer.decode(whole[len(before) : len(whole) - len(encoded.tails[0])])
    assert rest.startswith("word0 ") == (mode != "tail") and rest.endswith(" word79") == (mode != "head")
    assert uncut.cut == (0,) and uncut.keys != encoded.keys  # it reads other tokens
    for reading in (Reading(tokenizer_file, around, 8, mode), Reading(tokenizer_file, around, 100, "error")):
        with pytest.raises(ValueError, match="token"):
            encode_cell(reading, cell)


def test_a_system_message_that_fills_the_length_is_named(tokenizer_file):
    around = ("<bos><user> " + "be brief. " * 200, "\n<model>")
    size = len(Tokenizer.from_file(str(tokenizer_file)).encode("".join(around), add_special_tokens=False).ids)
    told = r"the chat template and the system message in it take \d+ of the length of {} tokens"
    for length, end in ((128, ", expected fewer"), (size + 20, "$")):
        with pytest.raises(ValueError, match=told.format(length) + end):
            encode_cell(Reading(tokenizer_file, around), Cell("niah_single_1", length, 1))
    example = Example("mine", "some context", "Why?", "", ("x",), 4, "answer")
    told = r"must fit 128 tokens, got \d+ without the context, \d+ of them for what precedes it: .*system message"
    with pytest.raises(ValueError, match=told):
        encode_cell(Reading(tokenizer_file, around, 128), Cell("mine", None, 1, given=(example,)))
