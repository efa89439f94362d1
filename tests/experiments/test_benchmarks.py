"""Readers of users' files, against tiny files in every official format (`suites.json`); and truncation."""

import csv
import importlib
import json
import pathlib
import sys

import pytest

from experiments.benchmarks.cells import truncate
from experiments.benchmarks.readers import READERS, read
from experiments.benchmarks.scorers import SCORERS, score
from experiments.benchmarks.suites import FAMILIES, FORMS
from experiments.benchmarks.tables import listed
from experiments.tasks import GROUPS

SUITES = json.loads(pathlib.Path(__file__).with_name("suites.json").read_text(encoding="utf-8"))


def write_lines(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def check_refused(name, path, told):
    """Assert that a file is refused with a message that begins with its path."""
    with pytest.raises(ValueError, match=told) as caught:
        read(f"{name}:{path}")
    assert str(caught.value).startswith(str(path))


# ---- the suites' files --------------------------------------------------------------------------------------------

LLAMA = ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")


def ruler(task, **changes):
    parts = SUITES["ruler"][task]
    text = parts["context"] + parts["question"]
    return {"index": 0, "input": text, "outputs": ["France", "Paris"], "answer_prefix": parts["answer_prefix"]} | changes


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("new", [False, True], ids=["prefix in input", "prefix apart"])
@pytest.mark.parametrize("task", SUITES["ruler"])
def test_ruler_lines_are_split_into_context_and_question(task, new, wrapped, tmp_path):
    parts, beginning = dict(SUITES["ruler"][task]), ""
    if wrapped:
        beginning = "<|begin_of_text|>"
        parts |= {"context": LLAMA[0] + parts["context"], "question": parts["question"] + LLAMA[1]}
    record = {"index": 0, "input": beginning + parts["context"] + parts["question"], "outputs": ["France", "Paris"]}
    if new:
        record |= {"length_w_model_temp": 310, "answer_prefix": parts["answer_prefix"], "token_position_answer": 12}
    else:
        record["input"] += parts["answer_prefix"]
    first, second = read(f"ruler:{write_lines(tmp_path / '4096' / task / 'validation.jsonl', record, record)}")
    assert first == second
    assert {name: vars(first)[name] for name in parts} == parts
    assert (first.task, first.answers, first.chat) == (task, ("France", "Paris"), not wrapped)
    assert first.labels == {"length": 4096}
    assert first.group == "" and first.stop == () and first.classes == ()
    # qa counts any reference, the others the share.
    assert score(first, " France") == (1.0 if task == "qa_1" else 0.5)


def test_ruler_task_names_and_folders(tmp_path):
    write_lines(tmp_path / "cwe.jsonl", ruler("cwe"))
    write_lines(tmp_path / "cwe" / "validation.jsonl", ruler("cwe"), ruler("cwe"))
    assert [example.task for example in read(f"ruler:{tmp_path}")] == ["cwe"] * 3
    assert len(read(f"ruler:{tmp_path}", limit=1)) == 2  # of each file
    assert all(example.labels == {} for example in read(f"ruler:{tmp_path / 'cwe.jsonl'}"))
    check_refused("ruler", write_lines(tmp_path / "niah_single" / "data.jsonl", ruler("cwe")), "'niah_single_[123]'")


def longbench(dataset, **changes):
    answers = {"passage": ["7", "8"], "passage_retrieval": ["Paragraph 7", "段落8"]}
    record = {
        "input": "Who {x}?",
        "context": "A story {input} {context}.",
        "answers": answers.get(dataset.rsplit("_", 1)[0], ["Ann", "Bob"]),
        "length": 5000,
        "dataset": dataset,
        "all_classes": ["Ann", "Bob"] if dataset in ("trec", "lsht") else None,
    }
    return record | changes


@pytest.mark.parametrize("dataset", FORMS["longbench"])
def test_longbench_prompts_follow_the_specification(dataset, tmp_path):
    record = longbench(dataset)
    (example,) = read(f"longbench:{write_lines(tmp_path / f'{dataset}.jsonl', record)}")
    form = FORMS["longbench"][dataset]
    assert example.prompt == (form.context + form.question).format(**record)
    assert example.context.endswith("A story {input} {context}.") and example.answer_prefix == ""
    assert (example.task, example.answers) == (dataset, tuple(record["answers"]))
    few_shot = dataset in ("trec", "triviaqa", "samsum", "lsht")
    assert example.chat is not (few_shot or dataset in ("lcc", "repobench-p"))
    assert example.stop == (("\n",) if dataset == "samsum" else ())
    assert example.classes == (("Ann", "Bob") if dataset in ("trec", "lsht") else ())
    assert example.scorer.endswith("_line") is few_shot


@pytest.mark.parametrize("length, bucket", [(3999, "0-4k"), (4000, "4-8k"), (7999, "4-8k"), (8000, "8k+")])
def test_longbench_e_lines_are_labelled_by_length(length, bucket, tmp_path):
    record = longbench("qasper", length=length)
    (example,) = read(f"longbench:{write_lines(tmp_path / 'qasper_e.jsonl', record)}")
    assert example.task == "qasper_e" and example.labels == {"length": bucket}
    del record["dataset"]
    assert read(f"longbench:{write_lines(tmp_path / 'qasper_e.jsonl', record)}") == [example]


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_longbench2_questions_become_multiple_choice_prompts(suffix, tmp_path):
    path, record = tmp_path / f"data{suffix}", SUITES["longbench2"]["record"]
    path.write_text(json.dumps([record] if suffix == ".json" else record))
    (example,) = read(f"longbench2:{path}")
    assert example.prompt == SUITES["longbench2"]["prompt"] and example.context.endswith("the {document}")
    assert example.labels == {"difficulty": "hard", "length": "long", "domain": "Code"}
    assert (example.answers, example.max_new_tokens) == (("B",), 128)
    assert score(example, "The correct answer is (B).") == 1.0
    path.write_text(json.dumps([record | {"answer": "E"}] if suffix == ".json" else record | {"answer": "E"}))
    check_refused("longbench2", path, "(entry|line) 1: .*'answer', got 'E'")


@pytest.mark.parametrize("task", SUITES["infinitebench"])
def test_infinitebench_lines_become_prompts_with_answers(task, tmp_path):
    parts = SUITES["infinitebench"][task]
    record = {"id": 0, "context": "long {text}", "options": [], **parts["record"]}
    (example,) = read(f"infinitebench:{write_lines(tmp_path / f'{task}.jsonl', record)}")
    assert example.context == parts["context"].replace("{text}", "long {text}")
    assert (example.question, example.answer_prefix) == (parts["question"], parts["answer_prefix"])
    assert example.max_new_tokens == FORMS["infinitebench"][task].max_new_tokens
    assert score(example, parts["right"]) == 1.0 and score(example, "other") == 0.0


def test_scbench_questions_share_their_context_in_order(tmp_path):
    records = [
        {"id": i, "context": f"{{JSON {i}}}", "multi_turns": [{"input": f"Key {i}{j}:", "answer": f"v{j}"} for j in range(3)]}
        for i in range(2)
    ]
    path = write_lines(tmp_path / "scbench_kv.jsonl", *records)
    examples = read(f"scbench:{path}")
    assert [e.group for e in examples] == ["scbench_kv/0"] * 3 + ["scbench_kv/1"] * 3
    assert [e.labels for e in examples] == [{"turn": 0}, {"turn": 1}, {"turn": 2}] * 2
    assert examples[1].context == (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{JSON 0}"
    )
    assert [e.question for e in examples[:3]] == ["\n\nKey 00:", "\n\nKey 01:", "\n\nKey 02:"]
    assert [score(e, "the value is v1") for e in examples[:3]] == [0.0, 1.0, 0.0]
    assert examples[0].max_new_tokens == 150
    assert len(read(f"scbench:{path}", limit=1)) == 3


def scbench(*turns, **fields):
    return {"id": 7, "context": "text", "multi_turns": list(turns), **fields}


def test_scbench_turns_become_prompts_with_answers(tmp_path):
    def examples(task, *turns):
        return read(f"scbench:{write_lines(tmp_path / f'{task}.jsonl', scbench(*turns))}")

    turn = {"input": "Who?", "answer": "Cat", "options": ["Ann", "Bob", "Cat", "Dan"]}
    (choice,) = examples("scbench_choice_eng", turn)
    assert choice.question == "\n\nQuestion: Who?\nA. Ann\nB. Bob\nC. Cat\nD. Dan\n\nThe the correct answer is"
    assert choice.answers == ("Cat", "C") and score(choice, "C") == 1.0

    (words,) = examples("scbench_vt", {"input": "Which?", "answer": ["AB", "CD", "EF"]})
    assert words.prompt == "text\n\nWhich?" and score(words, "ab cd") == 0.67

    numbers = [{"input": f"One number. The {kind} number is:", "answer": n} for kind, n in (("Largest", 9), ("median", 4.5))]
    first, second = examples("scbench_mf", *numbers)
    assert first.context == second.context == "What is the largest number?\n\ntext"
    assert first.question == "\n\nOne number. The Largest number is:"
    assert second.question == "\n\nWhat is the median number?\n\nOne number. The median number is:"
    assert score(first, "9") == score(second, "4.5") == 1.0 and score(second, "4") == 0.0


def test_scbench_turns_of_mixed_files_keep_their_tasks(tmp_path):
    code = [f"def f{i}(a, b):\n    value = a + {i}\n    return value * b" for i in range(2)]
    names = ["scbench_repoqa", "scbench_kv", "scbench_repoqa"]
    turns = [
        {"task": name, "input": text, "answer": answer}
        for name, text, answer in zip(names, ("Find f0", "Key", "Find f1"), (code[0], "v1", code[1]))
    ]
    path = write_lines(tmp_path / "scbench_repoqa_and_kv.jsonl", scbench(*turns, repo="r", lang="python"))
    examples = read(f"scbench:{path}")
    assert [e.task for e in examples] == [f"scbench_repoqa_and_kv.{name}" for name in names]
    assert [e.max_new_tokens for e in examples] == [1024, 80, 1024]
    assert [e.classes for e in examples] == [tuple(code), (), tuple(code)]
    assert len({e.group for e in examples}) == 1 and examples[0].context == "text"
    assert [score(e, f"```\n{code[0]}\n```") for e in examples] == [1.0, 0.0, 0.0]


FWE, BOOK = SUITES["ruler"]["fwe"], {"id": 0, "context": "x", "input": "Who?"}
CHOICES = BOOK | {"options": ["Ann", "Bob", "Cat", "Dan"], "answer": ["Cat"]}
TURN = {"input": "a", "answer": "b"}


@pytest.mark.parametrize(
    ("name", "stem", "record", "told"),
    [
        ("ruler", "fwe", {"input": FWE["context"] + FWE["question"], "outputs": ["a"]}, "answer prefix"),
        ("ruler", "fwe", ruler("fwe", input=FWE["context"]), "a context and then the question"),
        ("ruler", "fwe", ruler("fwe", outputs=[]), "'outputs', got an empty list"),
        ("ruler", "fwe", ruler("fwe", input=3), "'input', got int 3"),
        ("ruler", "fwe", {"outputs": ["a"]}, r"'input' \(a text\), got the fields \['outputs'\]"),
        ("longbench", "a", longbench("qaspar"), "'qaspar', did you mean 'qasper'"),
        ("longbench", "a", longbench("trec", all_classes=None), "'all_classes'"),
        ("infinitebench", "longbook_choice_eng", CHOICES | {"answer": "Eve"}, "one of the options"),
        ("infinitebench", "code_debug", CHOICES | {"options": ["Cat"]}, "'options', got 1"),
        ("infinitebench", "code_run", BOOK | {"answer": 3}, "a call like"),
        ("infinitebench", "math_find", BOOK | {"answer": 3}, "'input', got 'Who"),
        ("infinitebench", "math_calc", BOOK | {"answer": 3}, "'answer', got int 3"),
        ("scbench", "scbench_kv", scbench(), "'multi_turns', got none"),
        ("scbench", "scbench_kv", scbench(TURN, {"input": "a"}), "turn 2: .*'answer'"),
        ("scbench", "scbench_repoqa", scbench(TURN), "'repo'"),
        ("scbench", "scbench_repoqa_and_kv", scbench(TURN | {"task": "scbench_vt"}, repo="r"), "turn 1: .*'scbench_vt'"),
    ],
)  # fmt: skip
def test_lines_that_are_not_a_suites_are_refused(name, stem, record, told, tmp_path):
    check_refused(name, write_lines(tmp_path / f"{stem}.jsonl", record), f"line 1.*{told}")


def test_files_named_after_no_task_are_refused_and_lines_beyond_the_limit_not_looked_at(tmp_path):
    for name, stem, near in (("infinitebench", "pass_key", "'passkey'"), ("scbench", "scbench_kvs", "'scbench_kv'")):
        check_refused(name, write_lines(tmp_path / f"{stem}.jsonl", BOOK), f"did you mean {near}")
    path = write_lines(tmp_path / "fwe.jsonl", ruler("fwe"), ruler("fwe", outputs=[]))
    check_refused("ruler", path, "line 2")
    assert len(read(f"ruler:{path}", limit=1)) == 1


def test_every_task_names_a_scorer():
    scorers = {form.scorer for forms in FORMS.values() for form in forms.values()}
    assert scorers | {family["scorer"] for family in FAMILIES.values()} <= set(SCORERS)
    assert {task.split("_")[0] for task in GROUPS["ruler"]} == set(FAMILIES)


# ---- tables of kvpress --------------------------------------------------------------------------------------------

SAME = {"context": 'a long, "quoted"\ncontext ' + "x" * 200_000, "answer_prefix": "Answer:", "max_new_tokens": 30}
KVPRESS_ROWS = [
    {**SAME, "question": f"Question {i}?\n", "task": task, "answer": answer}
    for i, (task, answer) in enumerate([("vt", ["A", "B"]), ("vt", ["it's", "C"]), ("qa_1", ["D", "A"])])
]


def write_kvpress(path):
    if path.suffix == ".csv":
        # As pandas writes lists, numpy arrays, and JSON users' tables.
        written = ["['A', 'B']", "[\"it's\" 'C']", '["D", "A"]']
        lines = [list((row | {"answer": text}).values()) for row, text in zip(KVPRESS_ROWS, written)]
        write_csv(path, list(KVPRESS_ROWS[0]), *lines)
    elif path.suffix == ".parquet":
        write_parquet(path, *KVPRESS_ROWS)
    elif path.suffix == ".jsonl":
        write_lines(path, *KVPRESS_ROWS)
    elif path.stem == "columns":
        columns = {name: {str(i): row[name] for i, row in enumerate(KVPRESS_ROWS)} for name in KVPRESS_ROWS[0]}
        path.write_text(json.dumps(columns))
    else:
        path.write_text(json.dumps(KVPRESS_ROWS))
    return path


def write_csv(path, *lines):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines)
    return path


def write_parquet(path, *rows):
    table = pytest.importorskip("pyarrow").Table.from_pylist(list(rows))
    importlib.import_module("pyarrow.parquet").write_table(table, path)
    return path


@pytest.mark.parametrize("name", ["rows.csv", "rows.json", "columns.json", "rows.jsonl", "rows.parquet"])
def test_kvpress_rows_become_prompts_with_answers(name, tmp_path):
    limit_before = csv.field_size_limit()
    path = write_kvpress(tmp_path / name)
    examples = read(f"kvpress:{path}")
    for example, row in zip(examples, KVPRESS_ROWS, strict=True):
        assert example.prompt == row["context"] + row["question"] + row["answer_prefix"]
        assert example.answers == tuple(row["answer"])
        assert (example.task, example.max_new_tokens) == (row["task"], 30)
    assert [e.group for e in examples] == [f"{name}/0", f"{name}/0", ""]
    assert [score(e, "a") for e in examples] == [0.5, 0.0, 1.0]
    assert len(read(f"kvpress:{path}", limit=2)) == 2
    assert csv.field_size_limit() == limit_before


ROW = {"context": "c", "question": "q", "answer_prefix": "", "max_new_tokens": 4, "task": "niah_single_1"}
VT = ROW | {"task": "vt", "answer": "a", "max_new_tokens": "4"}


def rows(tmp_path, *changes, **more):
    """The examples of a file of `ROW` with changes."""
    lines = write_lines(tmp_path / "a.jsonl", *(ROW | change for change in [*changes, *[more] * bool(more)]))
    return read(f"kvpress:{lines}")


def test_kvpress_columns_of_longbench_and_of_the_users_own(tmp_path):
    trec = {"task": "trec", "answers": ["City"], "all_classes": ["City", "Number"]}
    first, second = rows(tmp_path, trec, {"task": "my_task", "answer": "7", "scorer": "infinitebench_first_integer"})
    assert first.classes == ("City", "Number") and score(first, "City or Number") == 0.5
    assert second.answers == ("7",) and score(second, "7") == 1.0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"task": "my_task", "scorer": ""}, "'my_task'"),
        ({"task": "my_task", "scorer": "f1"}, "scorer 'f1'"),
        ({"question": None}, "'question', got NoneType None"),
        ({"scorer": "infinitebench_first_integer", "answer": "71,432"}, "whole numbers as references, got '71,432'"),
        ({"scorer": "infinitebench_code_run", "answer": 2.5}, "whole numbers as references, got '2.5'"),
        ({"scorer": "quest_passkey", "answer": "none"}, "whole numbers as references, got 'none'"),
        ({"scorer": "infinitebench_math_find", "answer": "seven"}, "a number as reference, got 'seven'"),
        ({"scorer": "infinitebench_math_find", "answer": "1e999999999"}, "a number as reference, got '1e999999999'"),
        ({"scorer": "longbench_retrieval", "answer": "3"}, "'Paragraph 3'"),
        ({"scorer": "infinitebench_code_debug", "answer": "load"}, "a function's name and a letter"),
        ({"scorer": "longbench2_choice", "answer": "E"}, "A, B, C or D"),
        ({"scorer": "longbench_class_line", "answer": "City"}, "got no classes"),
        # A label that no answer can name.
        *(
            ({"task": "trec", "all_classes": ["City"], "answer": answer}, f"a label of one line, got '{answer}'")
            for answer in ("city", "City ", "Number")
        ),
        # A reference that its scorer never reads.
        *(
            ({"scorer": scorer, "answer": answer}, f"'{scorer}' expects references that it finds in an answer")
            for scorer, answer in (
                ("infinitebench_first_integer", "-7"), ("quest_passkey", "-7"), ("longbench_count", "-1"),
                ("infinitebench_math_find", "-7.5"), ("infinitebench_kv", "1.5"), ("infinitebench_kv", "two words"),
            )
        ),
        *(
            ({"max_new_tokens": number}, "a whole number")
            for number in (0, 2**31, 10**400, "9" * 400, "\u0664", "1e3", -1, 1.5, True, "many")
        ),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_scored_are_refused(change, told, tmp_path):
    check_refused("kvpress", write_lines(tmp_path / "a.jsonl", ROW | {"answer": "a"} | change), f"line 1: .*{told}")


def test_max_new_tokens_is_a_whole_number(tmp_path):
    for written, count in (("4", 4), (" 4 ", 4), (4.0, 4), ("007", 7), (2**31 - 1, 2**31 - 1)):
        assert rows(tmp_path, answer="a", max_new_tokens=written)[0].max_new_tokens == count


@pytest.mark.parametrize(
    "text, expected",
    [
        ("plain", ["plain"]),
        ("[1, 2]", [1, 2]),
        ("[1 -2 30]", [1, -2, 30]),
        ("[71432. 0.5 1.e+10]", [71432.0, 0.5, 1e10]),
        ("['a', None]", ["a", None]),
        ("[007 1]", ["[007 1]"]),
        ("['a' 'b'\n 'c']", ["a", "b", "c"]),
        ("['it\\'s', \"x, y\"]", ["it's", "x, y"]),
        ("[not a list]", ["[not a list]"]),
        ("['a' or 'b']", ["['a' or 'b']"]),
        ("[]", []),
    ],
)
def test_lists_in_kvpress_csv_are_parsed(text, expected):
    assert listed(text) == expected


HEAD = ",".join(VT)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.csv", b"task,context\nvt,c\n", "line 2: .*'question'"),
        ("a.csv", b"task,context\n", "at least one record"),
        ("a.csv", b"task,context\nvt,\xff\n", "a csv in UTF-8"),
        ("a.csv", (HEAD + '\n"c,q,,4,vt,a\nc,q,,4,vt,a\n').encode(), "line 3: .*unexpected end"),
        ("a.csv", (HEAD + '\n"c"d",q,,4,vt,a\n').encode(), "line 2: .* expected"),
        ("a.csv", (HEAD + ",answer\nc,q,,4,vt,a,b\n").encode(), "got 'answer' twice"),
        ("a.csv", (HEAD + "\nc,q,,4,vt,a, b\n").encode(), "line 2: .* 1 more; quote cells"),
        ("a.csv", (HEAD + "\nc,q,,4,vt\n").encode(), "line 2: .* 1 fewer"),
        ("a.json", b'{"task": 3}', "a JSON list of rows, or columns"),
        ("a.json", b'{"task": {"0": "vt"}, "context": {"0": "c", "1": "d"}}', "columns that map row numbers"),
        ("a.json", b"{", "a JSON list of rows, or columns"),
        ("a.json", b"[]", "at least one record"),
        ("a.json", b"[3]", "entry 1: .* int 3"),
        ("a.json", f'[{json.dumps(VT)[:-1]}, "answer": "b"}}]'.encode(), "got 'answer' twice"),
        ("a.jsonl", f'{json.dumps(VT)[:-1]}, "answer": "b"}}'.encode(), "line 1: .*got 'answer' twice"),
        ("a.parquet", b"nothing", "a parquet file"),
        ("a.txt", b"", "one of the suffixes .csv, .json, .jsonl, .parquet"),
    ],
)  # fmt: skip
def test_no_row_or_cell_is_lost_without_a_word(name, content, told, tmp_path):
    if name == "a.parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    check_refused("kvpress", tmp_path / name, told)


def test_a_parquet_needs_its_package_and_whole_pages(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", VT)
    data = bytearray(path.read_bytes())
    data[4:40] = bytes(36)
    path.write_bytes(data)
    check_refused("kvpress", path, "a parquet file")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pyarrow"):
        read(f"kvpress:{path}")


# ---- references ---------------------------------------------------------------------------------------------------

NONE = {  # as JSON, or as the cell of a csv
    '""', '" "', '"\\u00a0\\u200b\\n"', "NaN", "Infinity", "null", "true", "{}", "[]", '[""]', '["a", " "]', "[NaN]",
    "[null]", "[[1]]", '"nan"', '"<NA>"', "9007199254740994.0", "1e22", '"\\ud800"',
}  # fmt: skip
RULER_QUESTION = "Question: Find all variables that are assigned the value 1 in the text above."


@pytest.mark.parametrize("written", sorted(NONE))
def test_what_is_no_reference_is_refused_with_its_line(written, tmp_path):
    """Else every answer would score 100, or none, or the error would come after the cell was answered."""
    for name, stem, field, fields in (
        ("kvpress", "rows", "answer", ROW),
        ("infinitebench", "kv_retrieval", "answer", {"input": "i", "context": "c"}),
        ("longbench", "qasper", "answers", {"input": "i", "context": "c", "length": 3}),
        ("ruler", "vt", "outputs", {"input": "c" + RULER_QUESTION, "answer_prefix": ""}),
    ):
        path = tmp_path / f"{stem}.jsonl"
        lines = [json.dumps(fields | {field: "a"}), json.dumps(fields | {field: "X"}).replace('"X"', written)]
        path.write_text("\n".join(lines))
        check_refused(name, path, f"line 2: .*{field}")


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("71432.0", "71432"), ("71432", "71432"), ("9007199254740993", "9007199254740993"), ("1e-05", "0.00001"),
        ("0.1", "0.1"), ("-0.0", "0"), ("7.0e4", "70000"), ('"2.0"', "2.0"), ('"Nan"', "Nan"), ('" a "', "a"),
    ],
)  # fmt: skip
def test_numbers_are_read_as_what_they_are(written, text, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW | {"answer": "X"}).replace('"X"', written))
    (example,) = read(f"kvpress:{path}")
    assert example.answers == (text,) and score(example, f"It is {text}.") == 1
    (tmp_path / "rows.json").write_text(f"[{path.read_text()}]")
    assert read(f"kvpress:{tmp_path / 'rows.json'}")[0].answers == (text,)


@pytest.mark.parametrize(
    ("scorer", "written", "right", "wrong"),
    [
        ("infinitebench_math_find", 1e-05, "0.00001", "0.1"),
        ("infinitebench_math_find", "1e-05", "0.00001", "0.1"),
        ("infinitebench_math_find", 9007199254740993, "9007199254740993", "9007199254740992"),
        ("infinitebench_math_find", 7.0, "7", "7.5"),
        ("infinitebench_first_integer", "71432.0", "71432", "7143"),
        ("infinitebench_first_integer", 9007199254740993, "9007199254740993", "9007199254740992"),
        ("infinitebench_code_run", -3.0, "It is -3.", "3"),
        ("infinitebench_math_calc", [1.0, 4.0], "1 4", "2"),
        ("longbench_count", 7.0, "7", "17"),
        ("quest_passkey", " 00321 ", "321", "32"),
        # White space around a reference costs no right answer.
        *(
            (scorer, " 7142\n", "It is 7142.", "It is 7143.")
            for scorer in ("ruler_all", "ruler_part", "infinitebench_kv", "scbench_contains", "niah_number")
        ),
    ],
)  # fmt: skip
def test_scorers_take_every_form_of_a_reference(scorer, written, right, wrong, tmp_path):
    (example,) = rows(tmp_path, scorer=scorer, answer=written)
    assert (score(example, right), score(example, wrong)) == (1, 0)


def test_cells_of_a_csv_say_what_they_are(tmp_path):
    def write(cell, scorer="niah_number"):
        rows = ([*ROW.values(), scorer, answer] for answer in ("1", cell))
        return write_csv(tmp_path / "a.csv", [*ROW, "scorer", "answer"], *rows)

    def answers(*cell):
        return read(f"kvpress:{write(*cell)}")[1].answers

    for cell in ("", " ", "nan", "<NA>", "[]", "['']", "['a', None]", "[nan]", "71432.0", "7.14E+09", "[true]"):
        check_refused("kvpress", write(cell), "line 3: .*answer")
    assert answers("2.0", "infinitebench_math_find") == ("2.0",) and answers("71432.0", "quest_passkey") == ("71432",)
    assert answers('["71432.0"]') == ("71432.0",) and answers("[71432.0]") == answers("71432") == ("71432",)
    assert answers("9007199254740993") == ("9007199254740993",) and answers("[1. 2.]") == ("1", "2")


def test_absent_values_of_a_parquet_are_refused(tmp_path):
    def write(*values):
        return write_parquet(tmp_path / "a.parquet", *({**ROW, "answer": value} for value in values))

    def answers(*values):
        return [example.answers for example in read(f"kvpress:{write(*values)}")]

    for absent in (None, float("nan"), 2.0**60):
        check_refused("kvpress", write(71432.0, absent), "row 2: .*answer")
    assert answers(71432.0, 0.5) == [("71432",), ("0.5",)] and answers(2**60 + 1) == [(str(2**60 + 1),)]


# ---- a user's own questions, and all formats ----------------------------------------------------------------------


def test_a_table_of_own_questions_needs_three_columns(tmp_path):
    (tmp_path / "notes.txt").write_text("The order is PO-88213.")
    (tmp_path / "mine.csv").write_text(
        "context_file,question,answer,scorer,max_new_tokens\nnotes.txt,Which order?,PO-88213,,\n"
        'notes.txt,Who?,"[""Ann"", ""Bo""]",ruler_all,8\n'
    )
    first, second = read(f"questions:{tmp_path / 'mine.csv'}")
    assert first.prompt == "The order is PO-88213.\n\nWhich order?" and first.group == second.group == "mine.csv/0"
    assert (first.task, first.max_new_tokens, second.max_new_tokens) == ("mine", 64, 8)
    assert score(first, "It is po-88213.") == 1 and score(first, "None") == 0 and score(second, "bo") == 0.5
    row = {"context": "c", "question": " q", "answers": ["a", "b"]}
    (example,) = read(f"questions:{write_lines(tmp_path / 'a.jsonl', row)}")
    assert example.prompt == "c q" and score(example, "B") == 1
    for change, told in (
        ({"context": None, "question": ""}, "'context' or 'context_file', 'question'"),
        ({"context": None, "context_file": "none.txt"}, "'context_file'"),
    ):
        check_refused("questions", write_lines(tmp_path / "a.jsonl", row | change), f"line 1: .*{told}")


def test_malformed_specs_are_refused(tmp_path):
    for spec, told in (
        ("longbech:a.jsonl", "'longbech', did you mean 'longbench'"),
        ("a.jsonl", "FORMAT:PATH .* got 'a.jsonl'"),
        (f"ruler:{tmp_path}", "end in .jsonl in this folder, got none"),
    ):
        with pytest.raises(ValueError, match=told):
            read(spec)
    with pytest.raises(ValueError, match="limit"):
        read("ruler:a.jsonl", limit=0)


@pytest.mark.parametrize(
    "name, stem",
    {
        "questions": "rows",
        "ruler": "vt",
        "kvpress": "rows",
        "longbench": "qasper",
        "longbench2": "data",
        "infinitebench": "passkey",
        "scbench": "scbench_kv",
    }.items(),
)
def test_damaged_empty_and_missing_files(name, stem, tmp_path):
    assert name in READERS
    path = tmp_path / f"{stem}.jsonl"
    check_refused(name, path, "expected a file, got nothing")
    for content, told in (
        (b"", "at least one record"),
        (b"\n  \n", "at least one record"),
        (b'\n{"a": \n', "line 2: .* damaged .*: '{\"a\":'..."),
        (b"\xff\xfe\n", "line 1: .* damaged .*utf-8"),
        (b"[1]\n", r"line 1: .* got list \[1\]"),
        (b"{}\n", "line 1: expected (a field|fields) '"),
    ):
        path.write_bytes(content)
        check_refused(name, path, told)


# ---- truncation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limit, mode, expected",
    [
        (4, "middle", [0, 1, 8, 9]),
        (5, "middle", [0, 1, 8, 9]),
        (4, "head", [0, 1, 2, 3]),
        (4, "tail", [6, 7, 8, 9]),
        (10, "error", list(range(10))),
    ],
)
def test_every_truncation_stays_within_the_limit(limit, mode, expected):
    ids = list(range(10))
    kept = truncate(ids, limit, mode)
    assert kept == expected and kept is not ids


@pytest.mark.parametrize(
    "limit, mode, told", [(2, "error", "3 tokens, expected at most 2"), (2, "mid", "'mid'"), (0, "head", "limit")]
)
def test_impossible_truncations_are_refused(limit, mode, told):
    with pytest.raises(ValueError, match=told):
        truncate([1, 2, 3], limit, mode)
