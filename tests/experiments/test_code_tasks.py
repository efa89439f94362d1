"""The tasks of real code: the files, new names, what is asked and its answers, the haystack, results of two Pythons."""

import ast
import asyncio.events
import io
import pathlib
import random
import re
import tokenize

import pytest

from experiments import tasks
from experiments.records import beside, check_library
from experiments.tasks import code_completion, code_files, code_names, code_recall, haystack
from tests.experiments.test_tasks import coarse, documents

NAMES = tasks.GROUPS["code"]
COMPLETION, RECALL = NAMES[:2], NAMES[2:]
LENGTH = 6000


def samples(name: str, length: int = LENGTH, number: int = 4, **options) -> list[tasks.Example]:
    return [document.samples()[0] for document in documents(name, length, number, count_tokens=coarse, **options)]


# The files


def test_files_are_the_running_pythons_sorted():
    files = code_files.code_files()
    assert len({file.package for file in files}) > 50 and sum(len(file.text) for file in files) > 2_000_000
    paths = [tuple(file.path.split("/")) for file in files]
    assert paths == sorted(paths) and not {"test", "encodings"} & {part for path in paths for part in path}
    (text,) = (file.text for file in files if file.path == "asyncio/events.py")
    assert text.split() == pathlib.Path(asyncio.events.__file__).read_text().split()


def test_origin_names_the_version_and_changes_with_the_files(monkeypatch):
    origin = tasks.library_origin()
    assert origin["files"] == len(code_files.code_files()) and len(origin["sha256"]) == 64
    fewer = code_files.code_files()[1:]
    monkeypatch.setattr(code_files, "code_files", lambda: fewer)
    assert code_files.library_origin.__wrapped__()["sha256"] != origin["sha256"]


def test_a_python_without_sources_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(code_files.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="expected the sources of Python's standard library"):
        code_files.code_files.__wrapped__()
    (tmp_path / "aifc.py").write_text("def f():\n    pass\n" * 30)
    (tmp_path / "asyncio").mkdir()
    (tmp_path / "asyncio" / "broken.py").write_text("x = (\n" * 30)
    (tmp_path / "asyncio" / "latin.py").write_bytes("def ä():\n    pass\n".encode("latin-1") * 30)
    (tmp_path / "asyncio" / "data.py").write_text("x = 1\n" * 30)
    assert {file.path for file in code_files.code_files.__wrapped__()} == {"aifc.py"}


def test_pieces_are_the_text():
    text = code_files.code_text()
    assert haystack.held_out_text("code") == text
    assert all(piece.count("\n") < code_files.PIECE_LINES for piece in code_files.code_pieces())
    file = code_files.code_files()[3]
    assert f"# file: {file.path}\n{file.text}" in text + "\n"


# New names


def identifiers(text: str) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


@pytest.mark.parametrize("start", [0, 90])
def test_renamed_files_parse_and_no_old_name_is_left(start):
    files = code_files.code_files()[start : start + 12]
    changed, names = code_names.rename(files, random.Random(start))
    assert len(names) > 100 and len(set(names.values())) == len(names)
    before = {word for file in files for word in re.findall(r"\w+", file.text)}
    assert not before & set(names.values())
    for old, new in zip(files, changed, strict=True):
        assert len(new.lines) == len(old.lines)
        kinds = [[type(node).__name__ for node in ast.walk(file.tree)] for file in (old, new)]
        assert kinds[0] == kinds[1]  # the same program, but for its names
        assert not identifiers(new.text) & names.keys()
        assert not set(re.findall(r"(?<!\\)\b[^\W\d]\w*", new.text)) & names.keys()
        assert old.path != new.path


SOURCE = '''
import os.path
from json import dumps as write
import helper_module

LIMIT = 3

class WorkItem(Exception):
    """A WorkItem holds payload, and rises."""

    def __init__(self, payload, *, max_size=LIMIT):
        self.payload = payload
        self.file_name = os.path.join(payload, "\\tab_size")
        helper_module.configure(max_size, verbose=True)

    def append(self, verbose, tab_size):
        # payload of append
        return write(self.payload, indent=verbose), print(f"{self.file_name}")
'''


def test_what_is_renamed_and_what_is_kept():
    names = code_names.new_names([code_files.CodeFile("made/up.py", SOURCE)], random.Random(0))
    # verbose is a keyword argument of a foreign function, append a method of list, and tab_size stands in an escape.
    assert set(names) == {"LIMIT", "WorkItem", "payload", "max_size", "file_name"}
    assert names["LIMIT"].isupper() and names["WorkItem"][0].isupper() and "_" in names["max_size"]
    text = code_names.renamed(SOURCE, names)
    assert f"# {names['payload']} of append" in text and f"{{self.{names['file_name']}}}" in text
    assert "os.path.join" in text and r"\tab_size" in text and names["payload"] + ", and rises" in text


def test_names_imported_within_a_package_are_renamed_everywhere():
    files = [
        code_files.CodeFile("made/one.py", "class Reader:\n    pass\n"),
        code_files.CodeFile("made/two.py", "from .one import Reader\nfrom . import one\nvalue = one.Reader()\n"),
    ]
    (_, two), names = code_names.rename(files, random.Random(1))
    new = names["Reader"]
    assert two.text.startswith(f"from .one import {new}\n") and f"one.{new}()" in two.text


def test_more_than_all_files_is_refused():
    with pytest.raises(ValueError, match="length 90000000 is too long: the files of code have"):
        samples("code_completion", 90_000_000, 1)


# The next line


def test_next_line_follows_in_the_file():
    text = code_files.code_text()
    for sample in samples("code_completion", number=8):
        code = sample.prompt.removesuffix("\n")
        last = code[code.rindex("# file: ") :]
        start = text.index(last.split("\n", 1)[1])  # without the header, because the beginning may be cut
        following = text[start + len(last.split("\n", 1)[1]) :].lstrip("\n").split("\n")[0]
        assert (following.strip(),) == sample.answers
        assert sample.question.count("\n") == code_completion.QUESTION_LINES + 1 and sample.answer_prefix == ""


def test_next_line_stands_once_more_far_above():
    for name in COMPLETION:  # with new names, too: renaming was the same in the line and above
        for sample in samples(name):
            lines = [line.strip() for line in sample.prompt.split("\n") if line.strip()]
            source = len(lines) - 1 - lines[::-1].index(sample.answers[0])
            assert lines[source - code_completion.SAME_LINES : source] == lines[-code_completion.SAME_LINES :]
            between = sample.prompt[sample.prompt.rindex(sample.answers[0]) :]
            assert coarse(between) > 0.8 * code_completion.NEAREST * LENGTH  # counted with the old names, in whole lines


def test_source_lines_by_hand():
    text = "a\nb\nx\n\nc\na\n  b\n  x\nb\nx\na\nb\ny\na\nb\ny"
    # Line 11 repeats lines 1 and 6, but the line stands in between, too. Line 12 follows "a, b" with another line.
    assert code_completion.source_lines(text.split("\n")) == {6: 1, 7: 2, 9: 7, 14: 11, 15: 12}


@pytest.mark.slow
def test_next_line_has_only_words_from_above():
    for file in code_files.code_files()[:40]:
        for number in code_completion.next_lines(file):
            words = set(re.findall(r"\b[^\W\d]\w*", file.lines[number - 1])) - code_completion._KNOWN
            above = "\n".join(file.lines[: number - 1])
            assert words and all(re.search(rf"\b{word}\b", above) for word in words)
            assert number > code_completion.FIRST_LINE


def test_renamed_task_asks_for_the_same_line():
    for plain, changed in zip(samples("code_completion"), samples("code_completion_renamed")):
        forms = [re.sub(r"\w+", "w", sample.answers[0]) for sample in (plain, changed)]
        assert forms[0] == forms[1] and plain.context != changed.context


# Facts of a function


def functions(text: str) -> dict[str, list[str]]:
    """An independent reading of the text: for the name of a function its head and body, by indentation."""
    made: dict[str, list[str]] = {}
    lines = text.split("\n")
    for at, line in enumerate(lines):
        if found := re.match(r"(\s*)(?:async )?def (\w+)\(", line):
            stop = at + 1
            while stop < len(lines) and (
                not lines[stop].strip() or lines[stop].startswith(found.group(1) + " ") or lines[stop].strip()[0] in ")#"
            ):
                stop += 1
            made.setdefault(found.group(2), []).append("\n".join(lines[at:stop]))
    return made


@pytest.mark.parametrize("name", RECALL)
def test_answer_stands_in_the_only_function_of_the_name(name):
    kinds = set()
    for sample in samples(name, number=24):
        asked = re.search(r"function `(\w+)`", sample.question).group(1)
        found = functions(sample.context)[asked]
        assert len(found) == 1 and len(re.findall(rf"\b(?:def|class)\s+{asked}\b", sample.context)) == 1
        (answer,) = sample.answers
        assert answer.lower() not in (sample.question + sample.answer_prefix).lower()
        at = sample.context.index(found[0])
        assert coarse(sample.context[at:]) > LENGTH // 10  # the last quarter of the lines lies between
        kind = sample.question.split("Question: ")[1].split()[1]
        kinds.add(kind)
        if kind == "parameters":
            assert re.search(rf"def {asked}\({re.escape(answer)}\):", found[0])
        elif kind == "exception":
            assert re.search(rf"raise {re.escape(answer)}\b", found[0])
        elif "default" in sample.question:
            parameter = re.search(r"parameter `(\w+)`", sample.question).group(1)
            assert re.search(rf"\b{parameter}\b[^=]*=\s*{re.escape(answer)}\s*[,)]", found[0])
        else:
            assert f"-> {answer}:" in found[0]
    assert {"parameters", "exception", "is"} <= kinds


@pytest.mark.slow
def test_several_questions_ask_for_different_functions():
    (document,) = documents("code_recall", 12_000, number=1, num_questions=4)
    assert len({re.search(r"function `(\w+)`", q.question).group(1) for q in document.questions}) == 4
    with pytest.raises(ValueError, match="expected 500 functions to ask for"):
        documents("code_recall", 100_000, number=1, num_questions=500)


@pytest.mark.parametrize("depth", [0.1, 0.5, 0.9])
def test_function_stands_at_the_depth(depth):
    for sample in samples("code_recall", 16_000, number=2, depth=depth):
        asked = re.search(r"function `(\w+)`", sample.question).group(1)
        place = sample.context.index(f"def {asked}(") / len(sample.context)
        assert abs(place - depth) < 0.1


FACTS = """
class Box:
    def put(self, item, *, place="top", count=2, force=False) :
        raise ValueError
    async def get(self, item: str, size=(1, 2)) -> "list[int]":
        if item:
            raise errors.BoxError(item) from None
        def inner():
            raise KeyError
        raise
def both(one, two=None):
    raise ValueError(one)
    raise TypeError
def again(one):
    try: pass
    except OSError as failure: raise failure
"""


def test_facts_by_hand():
    facts = code_recall.facts_of(code_files.CodeFile("box.py", FACTS))
    assert {(fact.kind, fact.name, fact.parameter, fact.answer) for fact in facts} == {
        ("default", "put", "place", '"top"'), ("default", "put", "count", "2"), ("exception", "put", "", "ValueError"),
        ("default", "get", "size", "(1, 2)"), ("exception", "get", "", "errors.BoxError"),
        ("returns", "get", "", '"list[int]"'), ("parameters", "both", "", "one, two=None"),
        ("exception", "inner", "", "KeyError"),
    }  # fmt: skip


# Code as a haystack


@pytest.mark.parametrize(
    "name", ["niah_single_2", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("niah_multivalue", "vt", "passkey"))]
)
def test_needles_hide_in_code(name):
    (made,) = samples(name, 3000, 1, haystack="code")
    assert 3000 - 250 < coarse(made.prompt) + made.max_new_tokens <= 3000
    assert all(made.context.count(answer) >= 1 for answer in made.answers)
    pieces = [line for line in made.context.split("\n")[3:-3] if len(line) > 30 and "magic" not in line]
    text = code_files.code_text()
    assert sum(line in text for line in pieces) > 0.8 * len(pieces)


def test_which_tasks_read_the_library():
    assert all(tasks.reads_library(name, None) for name in NAMES)
    assert tasks.reads_library("vt", "code") and not tasks.reads_library("vt", None)
    assert not tasks.reads_library("niah_single_2", "prose")


# Results of two Pythons


ONE = {"python": "3.12.1", "files": 3, "sha256": "a" * 64}
TWO = {"python": "3.13.0", "files": 4, "sha256": "b" * 64}


def test_rows_of_two_libraries_are_refused():
    check_library([{"library": ONE}, {"name": "vt"}, {"library": ONE}], "a folder", ONE)
    with pytest.raises(ValueError, match=r"a folder: .* Python 3.12.1 \(3 files.* and Python 3.13.0 \(4 files"):
        check_library([{"library": ONE}], "a folder", TWO)
    with pytest.raises(ValueError, match=r"Python 3.13.0 .* and Python 3.12.1"):
        check_library([{"library": ONE}, {"library": TWO}], "two folders")


def test_rows_of_two_libraries_are_not_shown_beside_each_other():
    row = {"name": "code_recall", "method": "full", "value": 50.0, "unit": "percent"}
    records = [{"experiment": "eval", "settings": {}, "metrics": [{**row, "library": origin}]} for origin in (ONE, TWO)]
    assert "no row is in both" in beside(*records) and "no row is in both" not in beside(records[0], records[0])
