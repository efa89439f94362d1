"""Users' tables of questions, right ones and ones with a fault: read as what they are, or refused with file and line."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow
import pyarrow.parquet
from hypothesis import strategies as st

from experiments.benchmarks import Cell, Encoded, Example, Reading, encode_cell, read, score
from models import builtin_directory
from tests.fuzz.values import nested, texts, visible_texts
from tests.fuzz.verdicts import judge

_FORMS = ("csv", "json", "columns", "jsonl", "parquet")  # columns: as pandas writes JSON
_AS_JSON = ("json", "columns", "jsonl")
_TASKS = {
    "niah_single_1": "ruler_all", "qa_1": "ruler_part", "hotpotqa": "longbench_f1", "lcc": "longbench_code",
    "trec": "longbench_class_line", "passkey": "infinitebench_first_integer", "math_find": "infinitebench_math_find",
    "longdialogue_qa_eng": "infinitebench_dialogue", "my own": "quest_passkey", "日本": "scbench_any",
}  # fmt: skip
_WHOLE = ("infinitebench_first_integer", "quest_passkey")
_MAY_BE_0 = ("longbench_f1", "longbench_code")  # the suite leaves out articles, marks, and lines with marks of comments
_MARK = b"\xef\xbb\xbf"
# References that no row may have: as JSON, and as a cell of a csv.
NO_REFERENCE = (
    '""', '" "', '"\\u200b"', "NaN", "Infinity", "null", "false", "{}", "[]", '["a", ""]', "[NaN]", "[[1]]", '"nan"', "1e30",
    '["a", null]', '"\\ud800"', "[true]", '"\\n\\t"', "-1e400", '[{"a": 1}]', '"<NA>"', '"\\u3000"', "[[]]", "[1e17]",
)  # fmt: skip
NO_CELL = (
    "", " ", "nan", "<NA>", "[]", "['']", "['a', None]", "[nan]", "71432.0", "7.14E+09", "[true]", '["a", ""]', "[[1]]",
    "NaN", "[null]", "1e+20", '[" "]', "NaT", "\u200b",
)  # fmt: skip
_NO_COUNT = (0, -1, 1.5, "x", "", None, True, [], "4 tokens", "1e3", "9" * 400, "-0", float("nan"), 10**400, {}, "0.5", 2**40)
_TEXTS = ("context", "question", "answer_prefix")
_NO_TEXT = (None, 3, 1.5, True, ["x"], {"a": 1}, "\ud800 half", float("nan"))


_Draw = Callable[[st.SearchStrategy], Any]
_Row = dict[str, Any]


def check(data: st.DataObject, folder: pathlib.Path) -> Iterator[None]:
    """Write one table with kvpress's columns, and read it; of a right one, compare the keys of its prompts."""
    draw = data.draw
    form = draw(st.sampled_from(_FORMS))
    rows, want = _right(draw, form)
    fault, prefixes = "", []
    kind = draw(st.sampled_from(("right", "right", "row", "row", "bytes")))
    if kind == "row":
        form = "jsonl" if form == "parquet" else form
        fault = _spoil_row(draw, form, rows)
    written = _written(draw, form, rows, ascii_only=bool(fault) or draw(st.booleans()))
    if kind == "bytes":
        fault, written, prefixes = _spoil_bytes(draw, form, written, want)
    file = folder / f"rows.{'json' if form == 'columns' else form}"
    file.write_bytes(written)
    about = f"{form} of {len(rows)} rows {f'with {fault}' if fault else repr(rows)[:200]}"

    def cut(got: list[Example]) -> str | None:
        last = int(form == "csv")  # nobody can see that the last cell of a csv was cut
        faults = [_differs(got[: len(p) - last], p[: len(p) - last]) for p in prefixes if len(p) == len(got)]
        return faults[0] if faults else f"read {len(got)} examples of {len(want)}"

    right = None if fault and not prefixes else cut if fault else functools.partial(_differs, want=want)
    judge(about, lambda: read(f"kvpress:{file}"), right=right, named=(str(file),) if fault else ())
    yield
    if not fault and draw(st.integers(0, 3)) == 3:
        judge(f"keys of {about}", lambda: _keys(draw, file), right=lambda wrong: wrong)
        yield


def _keys(draw: _Draw, file: pathlib.Path) -> str | None:
    """Compare the keys of examples with the keys of a table in which one value differs; None if all is right."""
    examples = tuple(read(f"kvpress:{file}"))
    at = draw(st.integers(0, len(examples) - 1))
    names = (None, "answers", "max_new_tokens", "scorer", *_TEXTS)
    before, name = examples[at], draw(st.sampled_from(names))
    others = {"answers": (*before.answers, "9"), "max_new_tokens": before.max_new_tokens + 1, "scorer": "scbench_contains"}
    change = {name: others[name] if name in others else f"{vars(before)[name]}!"} if name else {}
    after = dataclasses.replace(before, **change)
    keys, other = (_encoded(x).keys for x in (examples, (*examples[:at], after, *examples[at + 1 :])))
    if len(set(keys)) != len(examples):
        return f"{len(examples)} examples have {len(set(keys))} keys"
    changed = keys[at].partition("#")[0] != other[at].partition("#")[0]
    return None if changed == (name is not None) else f"another {name}: key {keys[at]}, then {other[at]}"


def _encoded(examples: tuple[Example, ...]) -> Encoded:
    return encode_cell(Reading(builtin_directory() / "tokenizer.json"), Cell("a task", None, len(examples), given=examples))


# ---- right tables -------------------------------------------------------------------------------------------------


def _right(draw: _Draw, form: str) -> tuple[list[_Row], list[Example]]:
    rows, want = [], []
    for _ in range(draw(st.integers(1, 4))):
        again = draw(st.sampled_from(("no", "no", "no", "the prompt", "all"))) if rows else "no"
        row, example = _row(draw, form) if again == "no" else (dict(rows[-1]), want[-1])
        if again == "the prompt":  # with other references
            row["answer"], answers = draw(_references(example.scorer, form, example.classes))
            example = dataclasses.replace(example, answers=answers)
        rows.append(row)
        want.append(example)
    return rows, want


def _row(draw: _Draw, form: str) -> tuple[_Row, Example]:
    task = draw(st.sampled_from(list(_TASKS)))
    scorer, count = _TASKS[task], draw(st.integers(1, 98))
    cell, answers = draw(_references(scorer, form))
    row: _Row = {name: draw(texts()) for name in ("context", "question")}
    row |= {"answer_prefix": draw(st.just("") | texts(3)), "answer": cell, "task": task}
    row["max_new_tokens"] = draw(st.sampled_from((count, float(count)))) if form == "json" else count
    row["scorer"] = scorer if task in ("my own", "日本") else ""
    classes = (*answers, draw(_labels("label"))) if scorer == "longbench_class_line" else ()
    row["all_classes"] = json.dumps(list(classes)) if form == "csv" else list(classes)
    if not classes:
        row["all_classes"] = [] if form == "parquet" else ""
    same = {name: row[name] for name in ("task", *_TEXTS)}
    return row, Example(**same, answers=answers, max_new_tokens=count, scorer=scorer, classes=classes)


def _labels(word: str) -> st.SearchStrategy[str]:
    return st.integers(0, 10**6).map(lambda number: f"{word} {number}")


def _references(scorer: str, form: str, classes: tuple[str, ...] = ()) -> st.SearchStrategy[tuple[Any, tuple[str, ...]]]:
    """Draw a reference as the file has it, and as it must be read; one of ``classes`` if there are any."""
    as_json = form in _AS_JSON
    cells = lambda text: text if form == "csv" else [text]  # noqa: E731
    if scorer == "longbench_class_line":
        labels = st.just(classes[1]) if classes else _labels("class")
        return labels.map(lambda label: (cells(label), classes[1:] or (label,)))
    if scorer in _WHOLE:
        numbers = st.sampled_from((7, 71432, 2**53 + 1, 2**80 + 1, 10**30))
        if form == "parquet":
            return numbers.map(lambda x: ([str(x)], (str(x),)))
        ways = [str, "{}.0".format, (lambda x: float(x) if x < 2**53 else x) if as_json else " {}".format]
        ways += [int] * as_json
        return st.builds(lambda x, way: (way(x), (str(x),)), numbers, st.sampled_from(ways))
    if scorer == "infinitebench_math_find":
        pairs = ((7, "7"), (0.5, "0.5"), (1e-05, "0.00001"), (7.0, "7.0"), (2**60 + 1, str(2**60 + 1)))
        return st.sampled_from(pairs).map(lambda pair: (pair[0] if as_json else cells(pair[1]), (pair[1],)))
    lists = st.lists(visible_texts(), min_size=1, max_size=3)
    if form == "parquet":
        return lists.map(lambda x: (x, tuple(x)))
    ways = st.sampled_from((json.dumps, repr) if form == "csv" else (list,))
    several = st.builds(lambda x, way: (way(x), tuple(x)), lists, ways)
    several |= visible_texts().map(lambda text: (text, (text,)))
    if as_json and scorer in ("ruler_all", "ruler_part"):
        pairs = ((71432, "71432"), (71432.0, "71432"), (0.25, "0.25"), (2**70, str(2**70)), (-3, "-3"))
        several |= st.sampled_from([(way(x), (text,)) for x, text in pairs for way in (lambda x: x, lambda x: [x])])
    return several


def _differs(got: list[Example], want: list[Example]) -> str | None:
    """Say what is wrong with the examples that were read; None if nothing is."""
    if len(got) != len(want):
        return f"read {len(got)} examples, expected {len(want)}"
    for number, (mine, right) in enumerate(zip(got, want, strict=True)):
        if dataclasses.replace(mine, group="") != right:
            names = [name for name in vars(right) if name != "group" and vars(mine)[name] != vars(right)[name]]
            return f"row {number}: read {names[0]} {vars(mine)[names[0]]!r}, expected {vars(right)[names[0]]!r}"
        if score(mine, "") != 0:
            return f"row {number}: an empty answer scores {score(mine, '')} with the references {mine.answers}"
        if mine.scorer not in _MAY_BE_0 and not score(mine, "\n".join(mine.answers)) > 0:
            return f"row {number}: the references {mine.answers} score 0 as answer under {mine.scorer}"
    for i, mine in enumerate(got):
        for other in got[:i]:
            together = (mine.task, mine.context) == (other.task, other.context)
            if together != (mine.group == other.group != ""):
                return f"groups {mine.group!r} and {other.group!r} of contexts that are {'one' if together else 'two'}"
    return None


# ---- files --------------------------------------------------------------------------------------------------------


def _written(draw: _Draw, form: str, rows: list[_Row], ascii_only: bool) -> bytes:
    """Write a table in its form, with a byte-order mark or not, in one of the dialects of the form."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if form == "parquet":
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
        return sink.getvalue()
    mark = draw(st.sampled_from((b"", b"", _MARK)))
    if form == "csv":
        stream, names = io.StringIO(newline=""), draw(st.permutations(names))
        quoting, end = draw(st.sampled_from((csv.QUOTE_MINIMAL, csv.QUOTE_ALL))), draw(st.sampled_from(("\n", "\r\n")))
        writer = csv.writer(stream, quoting=quoting, lineterminator=end)
        writer.writerows([names, *([row[name] for name in names if name in row] for row in rows)])
        return mark + stream.getvalue().encode("utf-8", "surrogatepass")
    if form == "jsonl":
        end = draw(st.sampled_from(("\n", "\r\n", "\n\n", "\n \t\n")))
        return mark + end.join(json.dumps(row, ensure_ascii=ascii_only) for row in rows).encode()
    whole: Any = rows
    if form == "columns":
        whole = {name: {str(at): row[name] for at, row in enumerate(rows) if name in row} for name in names}
    return mark + json.dumps(whole, ensure_ascii=ascii_only, indent=draw(st.sampled_from((None, 1)))).encode()


def _spoil_row(draw: _Draw, form: str, rows: list[_Row]) -> str:
    """Change one row so that no reader may take it; return the change in words."""
    row = draw(st.sampled_from(rows))
    kinds = ("reference", "reference", "count", "task", "scorer", "column", *["text"] * (form != "csv"))
    kind = draw(st.sampled_from(kinds))
    if kind == "task":
        row |= {"task": "no such task", "scorer": ""}
        return "an unknown task"
    name = {"reference": "answer", "count": "max_new_tokens", "scorer": "scorer"}.get(kind)
    name = name or draw(st.sampled_from((*_TEXTS, *(("answer", "task", "max_new_tokens") if kind == "column" else ()))))
    if kind == "column":
        for other in rows if form == "csv" else [row]:
            other.pop(name, None)
        return f"no {name}"
    if kind == "reference" and form == "csv":
        row |= {"task": "niah_single_1", "scorer": ""}
    references = NO_CELL if form == "csv" else [json.loads(text) for text in NO_REFERENCE]
    options = {"answer": references, "max_new_tokens": _NO_COUNT, "scorer": ("f1", "ruler", " ruler_all ", "None")}
    row[name] = draw(st.sampled_from(options.get(name, _NO_TEXT)))
    return f"{name} {row[name]!r:.60}"


def _spoil_bytes(draw: _Draw, form: str, written: bytes, want: list[Example]) -> tuple[str, bytes, list[list[Example]]]:
    """Change the file's bytes; return the change, the bytes, and the examples that may be read from them, if any may."""
    kinds = ["cut", "empty", "other", "nested"] + ["encoding"] * (form != "parquet")
    kind = draw(st.sampled_from([*kinds, *["twice"] * (form in ("csv", "jsonl", "json"))]))
    if kind == "cut":
        size = draw(st.integers(1, len(written) - 1))
        # A text form may end early where a row ends.
        prefixes = [want[:n] for n in range(1, len(want) + 1)] if form in ("csv", "jsonl") else []
        return f"{size} bytes of {len(written)}", written[:size], prefixes
    if kind == "encoding":
        text = written.decode("utf-8-sig", "surrogatepass")
        name = draw(st.sampled_from(("utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "gb18030")))
        spoilt = text.replace("context", "conté") if name in ("latin-1", "gb18030") else text
        return f"the encoding {name}", spoilt.encode(name, "replace"), []
    if kind == "empty":
        return "nothing in it", draw(st.sampled_from((b"", b"\n \n", _MARK, b"[]", b"{}"))), []
    if kind == "other":
        contents = (b"PK\x03\x04", b"<html></html>", b"\x00" * 40, b"3", b'"x"', b"null")
        return "another content", draw(st.sampled_from(contents)), []
    if kind == "twice" and form == "csv":
        head, _, rest = written.partition(b"\n")
        return "two columns of one name", head.replace(b"question", b"context") + b"\n" + rest, []
    if kind == "twice":
        return "a key twice", written.replace(b'"question": ', b'"context": ', 1), []
    lists = [json.dumps(nested(3)).encode(), json.dumps(nested(900)).encode(), b"[" * 100_000]
    return "nested lists", draw(st.sampled_from(lists)), []
