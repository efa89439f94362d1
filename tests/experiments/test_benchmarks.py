"""Readers of users' files, against tiny files in every official format; and truncation."""

from __future__ import annotations

import csv
import importlib
import importlib.resources
import json
import sys

import pytest

from experiments.benchmarks import infinitebench_file, longbench_file, ruler_file, scbench_file
from experiments.benchmarks.kvpress_file import listed
from experiments.benchmarks.readers import READERS, read
from experiments.benchmarks.scorers import SCORERS, score
from experiments.benchmarks.truncation import truncate


def write_lines(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


# RULER

RULER_BODIES = {
    "niah_single_1": (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
        "number afterwards.\nGrass.\nOne of the special magic numbers for tall-cat is: 123.\nSky.",
        "\nWhat is the special magic number for tall-cat mentioned in the provided text?",
        " The special magic number for tall-cat mentioned in the provided text is",
        128,
    ),
    "niah_multivalue": (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the numbers afterwards.\nGrass.",
        "\nWhat are all the special magic numbers for tall-cat mentioned in the provided text?",
        " The special magic numbers for tall-cat mentioned in the provided text are",
        128,
    ),
    "vt": (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\nVAR A = 1\nQuestion: Find "
        "all variables that are assigned the value 1 in the text above. Answer: According to the chain(s) of variable "
        "assignment in the text above, 1 variables are assgined the value 1, they are:  A\n\nMemorize and track the "
        "chain(s) of variable assignment hidden in the following text.\n\nVAR B = 2",
        "\nQuestion: Find all variables that are assigned the value 2 in the text above.",
        " Answer: According to the chain(s) of variable assignment in the text above, 1 variables are assgined the value "
        "2, they are: ",
        30,
    ),
    "cwe": (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often.\n1. cat 2. cat",
        "\nQuestion: What are the 10 most common words in the above list?",
        " Answer: The top 10 words that appear most often in the list are:",
        120,
    ),
    "fwe": (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
        "coded words. abc ... abc",
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
        50,
    ),
    "qa_1": (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
        "The following are given documents.\n\nDocument 1:\nAnswer: a heading of Normandy\u2028in France",
        "\n\nAnswer the question based on the given documents. Only give me the answer and do not output any other words."
        "\n\nQuestion: Where is Normandy?",
        " Answer:",
        32,
    ),
}
LLAMA = (
    "<|start_header_id|>user<|end_header_id|>\n\n",
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("new", [False, True], ids=["prefix in input", "prefix apart"])
@pytest.mark.parametrize("task", RULER_BODIES)
def test_ruler_lines_are_split_into_context_and_question(task, new, wrapped, tmp_path):
    context, question, prefix, tokens = RULER_BODIES[task]
    beginning = "<|begin_of_text|>" if wrapped else ""
    if wrapped:
        context, question = LLAMA[0] + context, question + LLAMA[1]
    record = {"index": 0, "input": beginning + context + question, "outputs": ["France", "Paris"], "length": 300}
    if new:
        record |= {"length_w_model_temp": 310, "answer_prefix": prefix, "token_position_answer": 12}
    else:
        record["input"] += prefix
    path = write_lines(tmp_path / "4096" / task / "validation.jsonl", record, record)
    first, second = read(f"ruler:{path}")
    assert first == second
    assert (first.context, first.question, first.answer_prefix) == (context, question, prefix)
    assert (first.task, first.max_new_tokens, first.answers) == (task, tokens, ("France", "Paris"))
    assert first.chat is not wrapped
    assert first.labels == {"length": 4096}
    assert first.group == "" and first.stop == () and first.classes == ()
    # qa counts any reference, the others the share.
    assert score(first, " France") == (1.0 if task == "qa_1" else 0.5)


def test_ruler_task_names_and_folders(tmp_path):
    context, question, prefix, _ = RULER_BODIES["cwe"]
    record = {"index": 0, "input": context + question, "outputs": ["cat"], "answer_prefix": prefix}
    write_lines(tmp_path / "cwe.jsonl", record)
    write_lines(tmp_path / "cwe" / "validation.jsonl", record, record)
    assert [example.task for example in read(f"ruler:{tmp_path}")] == ["cwe"] * 3
    assert len(read(f"ruler:{tmp_path}", limit=1)) == 2  # of each file
    assert all(example.labels == {} for example in read(f"ruler:{tmp_path / 'cwe.jsonl'}"))
    with pytest.raises(ValueError, match="got 'data' in 'niah_single', did you mean 'niah_single_[123]'"):
        read(f"ruler:{write_lines(tmp_path / 'niah_single' / 'data.jsonl', record)}")


def test_ruler_lines_that_are_not_rulers(tmp_path):
    context, question, prefix, _ = RULER_BODIES["fwe"]
    path = tmp_path / "fwe.jsonl"
    good = {"input": context + question, "outputs": ["a"], "answer_prefix": prefix}
    for bad, message in (
        ({"input": context + question, "outputs": ["a"]}, "line 2: expected the suite's answer prefix"),
        (good | {"input": context}, "line 2: expected a context and then the question"),
        (good | {"input": question}, "line 2: expected a context and then the question"),
        (good | {"outputs": []}, "line 2: expected at least one text in the field 'outputs', got an empty list"),
        (good | {"outputs": [{}]}, "line 2: field 'outputs': expected a text or a number as reference, got dict"),
        (good | {"input": 3}, "line 2: expected a text in the field 'input', got int 3"),
        ({"outputs": ["a"]}, r"line 2: expected a field 'input' \(a text\), got the fields \['outputs'\]"),
    ):
        write_lines(path, good, bad)
        with pytest.raises(ValueError, match=message) as caught:
            read(f"ruler:{path}")
        assert str(path) in str(caught.value)
        assert len(read(f"ruler:{path}", limit=1)) == 1  # lines beyond the limit are not looked at


# LongBench


LONGBENCH_ANSWERS = {"passage": ["7", "8"], "passage_retrieval": ["Paragraph 7", "段落8"]}


def longbench(dataset, **changes):
    record = {
        "input": "Who {x}?",
        "context": "A story {input} {context}.",
        "answers": LONGBENCH_ANSWERS.get(dataset.rsplit("_", 1)[0], ["Ann", "Bob"]),
        "length": 5000,
        "dataset": dataset,
        "language": "en",
        "all_classes": ["Ann", "Bob"] if dataset in ("trec", "lsht") else None,
        "_id": "1",
    }
    return record | changes


@pytest.mark.parametrize("dataset", longbench_file.SCORER_OF)
def test_longbench_prompts_follow_the_specification(dataset, tmp_path):
    text = (importlib.resources.files("experiments.benchmarks") / "longbench_v1.json").read_text(encoding="utf-8")
    specification = json.loads(text)
    record = longbench(dataset)
    (example,) = read(f"longbench:{write_lines(tmp_path / f'{dataset}.jsonl', record)}")
    assert example.prompt == specification["templates"][dataset].format(**record)
    assert example.context.endswith("A story {input} {context}.") and example.answer_prefix == ""
    assert example.max_new_tokens == specification["max_new_tokens"][dataset]
    assert (example.task, example.answers) == (dataset, tuple(record["answers"]))
    few_shot = dataset in ("trec", "triviaqa", "samsum", "lsht")
    assert example.chat is not (few_shot or dataset in ("lcc", "repobench-p"))
    assert example.stop == (("\n",) if dataset == "samsum" else ())
    assert example.classes == (("Ann", "Bob") if dataset in ("trec", "lsht") else ())
    assert example.scorer.endswith("_line") is few_shot


def test_longbench_specification_is_complete():
    text = (importlib.resources.files("experiments.benchmarks") / "longbench_v1.json").read_text(encoding="utf-8")
    specification = json.loads(text)
    assert set(specification) == {"source", "licence", "templates", "max_new_tokens"}
    assert "THUDM/LongBench" in specification["source"] and specification["licence"].startswith("MIT License")
    templates = specification["templates"]
    assert len(templates) == 21 and templates.keys() == longbench_file.SCORER_OF.keys()
    assert templates.keys() == specification["max_new_tokens"].keys()
    assert "asconcisely" in templates["narrativeqa"]  # the benchmark's own misprint
    lengths = specification["max_new_tokens"]
    assert [lengths[name] for name in ("hotpotqa", "trec", "samsum", "vcsum")] == [32, 64, 128, 512]


@pytest.mark.parametrize("length, bucket", [(3999, "0-4k"), (4000, "4-8k"), (7999, "4-8k"), (8000, "8k+")])
def test_longbench_e_lines_are_labelled_by_length(length, bucket, tmp_path):
    (example,) = read(f"longbench:{write_lines(tmp_path / 'qasper_e.jsonl', longbench('qasper', length=length))}")
    assert example.task == "qasper_e" and example.labels == {"length": bucket}
    record = longbench("qasper", length=length)
    del record["dataset"]
    assert read(f"longbench:{write_lines(tmp_path / 'qasper_e.jsonl', record)}") == [example]


def test_unknown_longbench_datasets_are_refused(tmp_path):
    with pytest.raises(ValueError, match="line 1: unknown LongBench dataset 'qaspar', did you mean 'qasper'"):
        read(f"longbench:{write_lines(tmp_path / 'a.jsonl', longbench('qaspar'))}")
    with pytest.raises(ValueError, match="line 1: expected a text or a list of texts in the field 'all_classes'"):
        read(f"longbench:{write_lines(tmp_path / 'a.jsonl', longbench('trec', all_classes=None))}")


LONGBENCH2 = {
    "_id": "1",
    "domain": "Code",
    "sub_domain": "Repository",
    "difficulty": "hard",
    "length": "long",
    "question": " Which? ",
    "choice_A": "one",
    "choice_B": "two ",
    "choice_C": "three",
    "choice_D": "{four}",
    "answer": "B",
    "context": " the {document}\n",
}


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_longbench2_questions_become_multiple_choice_prompts(suffix, tmp_path):
    path = tmp_path / f"data{suffix}"
    path.write_text(json.dumps([LONGBENCH2] if suffix == ".json" else LONGBENCH2))
    (example,) = read(f"longbench2:{path}")
    assert example.prompt == (
        "Please read the following text and answer the question below.\n\n<text>\nthe {document}\n</text>\n\nWhat is the "
        "correct answer to this question: Which?\nChoices:\n(A) one\n(B) two\n(C) three\n(D) {four}\n\nFormat your "
        'response as follows: "The correct answer is (insert answer here)".'
    )
    assert example.context.endswith("the {document}")
    assert example.labels == {"difficulty": "hard", "length": "long", "domain": "Code"}
    assert (example.answers, example.max_new_tokens) == (("B",), 128)
    assert score(example, "The correct answer is (B).") == 1.0
    path.write_text(json.dumps([LONGBENCH2 | {"answer": "E"}] if suffix == ".json" else LONGBENCH2 | {"answer": "E"}))
    with pytest.raises(ValueError, match="(entry|line) 1: expected A, B, C or D in the field 'answer', got 'E'"):
        read(f"longbench2:{path}")


# InfiniteBench

BOOK_CHOICES = {"options": ["Ann", "Bob", "Cat", "Dan"], "answer": ["Cat"]}
INFINITEBENCH = {
    "passkey": (
        {"input": "What is the pass key?", "answer": ["71432"]},
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you about "
        "the important information.\n\n{text}",
        "\n\nWhat is the pass key?",
        "\n\nThe pass key is",
        (" 71432", 0.0),
    ),
    "kv_retrieval": (
        {"input": 'Key: "a-1"\nThe value associated with the specified key is: ', "answer": "b-2"},
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{text}",
        '\n\nKey: "a-1"',
        "\nThe value associated with the specified key is: ",
        ('"b-2"', 0.0),
    ),
    "longbook_choice_eng": (
        {"input": "Who?", **BOOK_CHOICES},
        "Read the book and answer the question.\n\n{text}",
        "\n\nQuestion: Who?\nA. Ann\nB. Bob\nC. Cat\nD. Dan",
        "\n\nThe letter of the correct answer is",
        ("C", 0.0),
    ),
    "math_find": (
        {"input": "You should answer with only one number. The smallest number of the list is: ", "answer": 7},
        "What is the smallest number in the following list?\n\n{text}",
        "\n\nYou should answer with only one number. The smallest number of the list is: ",
        "",
        ("7", 0.0),
    ),
    "math_calc": (
        {"input": "", "answer": [[1, 4, 8]]},
        "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\nValues: [1, 4, 8]\n\n"
        "Expression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: {text}",
        "",
        "\nValues:",
        (" [1, 4, 8]", 0.0),
    ),
    "code_run": (
        {"input": "Please give me the exact number of the return value of func_5(-3).", "answer": [-2]},
        "There is a function called func_5 in the following Python code.\n\n{text}",
        "\n\nPlease compute the exact value of func_5(-3).",
        " The value of func_5(-3) is",
        (" -2", 0.0),
    ),
    "code_debug": (
        {"input": "Which?", **BOOK_CHOICES},
        "Following is a Python code where exactly one of the functions/methods has a deliberate error that makes it crash."
        "\n\n{text}",
        "\n\nOptions:\nA. Ann\nB. Bob\nC. Cat\nD. Dan",
        "\n\nThe correct option is:",
        (" C.", 0.0),
    ),
    "longbook_qa_chn": (
        {"input": "谁？", "answer": ["安"]},
        "阅读以下书籍然后回答问题。\n\n{text}",
        "\n\n问题：谁？",
        "\n答案：",
        ("安", 0.0),
    ),
}


@pytest.mark.parametrize("task", INFINITEBENCH)
def test_infinitebench_lines_become_prompts_with_answers(task, tmp_path):
    fields, context, question, prefix, (right, wrong) = INFINITEBENCH[task]
    record = {"id": 0, "context": "long {text}", "options": [], **fields}
    (example,) = read(f"infinitebench:{write_lines(tmp_path / f'{task}.jsonl', record)}")
    assert (example.context, example.question, example.answer_prefix) == (
        context.replace("{text}", "long {text}"),
        question,
        prefix,
    )
    assert example.max_new_tokens == infinitebench_file.TASKS[task].max_new_tokens
    assert score(example, right) == 1.0 and score(example, "other") == wrong


def test_infinitebench_generation_lengths_and_scorers():
    lengths = {name: form.max_new_tokens for name, form in infinitebench_file.TASKS.items()}
    assert lengths.pop("longbook_sum_eng") == 1200 and lengths.pop("math_calc") == 30000
    assert lengths == {
        **{"passkey": 6, "number_string": 12, "kv_retrieval": 50, "math_find": 3, "code_run": 5, "code_debug": 5},
        **{"longbook_choice_eng": 40, "longbook_qa_eng": 40, "longbook_qa_chn": 40, "longdialogue_qa_eng": 40},
    }
    assert {form.scorer for form in infinitebench_file.TASKS.values()} <= set(SCORERS)


def test_malformed_infinitebench_lines_are_refused(tmp_path):
    book = {"id": 0, "context": "x", "input": "Who?"}
    for task, record, message in (
        ("longbook_choice_eng", book | BOOK_CHOICES | {"answer": "Eve"}, "line 1: expected one of the options"),
        (
            "code_debug",
            book | BOOK_CHOICES | {"options": ["Cat"]},
            "line 1: expected 4 texts in the field 'options', got 1",
        ),
        ("code_run", book | {"answer": 3}, "line 1: expected a call like"),
        ("math_find", book | {"answer": 3}, "line 1: expected 'The ... of' in the field 'input', got 'Who"),
        ("math_calc", book | {"answer": 3}, "line 1: expected a list in the field 'answer', got int 3"),
        ("pass_key", book, "got 'pass_key', did you mean 'passkey'"),
    ):
        with pytest.raises(ValueError, match=message):
            read(f"infinitebench:{write_lines(tmp_path / f'{task}.jsonl', record)}")


# SCBench


def test_scbench_questions_share_their_context_in_order(tmp_path):
    records = [
        {
            "id": i,
            "context": f"{{JSON {i}}}",
            "multi_turns": [{"input": f"Key {i}{j}:", "answer": f"v{j}"} for j in range(3)],
        }
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


def scbench(tmp_path, task, *turns, **fields):
    record = {"id": 7, "context": "text", "multi_turns": list(turns), **fields}
    return read(f"scbench:{write_lines(tmp_path / f'{task}.jsonl', record)}")


def test_scbench_turns_become_prompts_with_answers(tmp_path):
    turn = {"input": "Who?", "answer": "Cat", "options": ["Ann", "Bob", "Cat", "Dan"]}
    (choice,) = scbench(tmp_path, "scbench_choice_eng", turn)
    assert choice.question == "\n\nQuestion: Who?\nA. Ann\nB. Bob\nC. Cat\nD. Dan\n\nThe the correct answer is"
    assert choice.answers == ("Cat", "C") and score(choice, "C") == 1.0

    (words,) = scbench(tmp_path, "scbench_vt", {"input": "Which?", "answer": ["AB", "CD", "EF"]})
    assert words.prompt == "text\n\nWhich?" and score(words, "ab cd") == 0.67

    numbers = [
        {"input": f"One number. The {kind} number is:", "answer": n} for kind, n in (("Largest", 9), ("median", 4.5))
    ]
    first, second = scbench(tmp_path, "scbench_mf", *numbers)
    assert first.context == second.context == "What is the largest number?\n\ntext"
    assert first.question == "\n\nOne number. The Largest number is:"
    assert second.question == "\n\nWhat is the median number?\n\nOne number. The median number is:"
    assert score(first, "9") == score(second, "4.5") == 1.0 and score(second, "4") == 0.0


def test_scbench_turns_of_mixed_files_keep_their_tasks(tmp_path):
    code = [f"def f{i}(a, b):\n    value = a + {i}\n    return value * b" for i in range(2)]
    turns = [
        {"task": "scbench_repoqa", "input": "Find f0", "answer": code[0], "name": "f0"},
        {"task": "scbench_kv", "input": "Key", "answer": "v1"},
        {"task": "scbench_repoqa", "input": "Find f1", "answer": code[1], "name": "f1"},
    ]
    examples = scbench(tmp_path, "scbench_repoqa_and_kv", *turns, repo="r", lang="python")
    names = ["scbench_repoqa", "scbench_kv", "scbench_repoqa"]
    assert [e.task for e in examples] == [f"scbench_repoqa_and_kv.{name}" for name in names]
    assert [e.max_new_tokens for e in examples] == [1024, 80, 1024]
    assert [e.classes for e in examples] == [tuple(code), (), tuple(code)]
    assert len({e.group for e in examples}) == 1 and examples[0].context == "text"
    assert [score(e, f"```\n{code[0]}\n```") for e in examples] == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="line 1, turn 1: expected one of .* in the field 'task', got 'scbench_vt'"):
        scbench(tmp_path, "scbench_repoqa_and_kv", turns[0] | {"task": "scbench_vt"}, repo="r")


def test_malformed_scbench_lines_are_refused(tmp_path):
    with pytest.raises(ValueError, match="line 1: expected at least one question in 'multi_turns', got none"):
        scbench(tmp_path, "scbench_kv")
    with pytest.raises(ValueError, match="line 1, turn 2: expected a field 'answer'"):
        scbench(tmp_path, "scbench_kv", {"input": "a", "answer": "b"}, {"input": "a"})
    with pytest.raises(ValueError, match="did you mean 'scbench_kv'"):
        scbench(tmp_path, "scbench_kvs", {"input": "a", "answer": "b"})
    with pytest.raises(ValueError, match="line 1: expected a field 'repo'"):
        scbench(tmp_path, "scbench_repoqa", {"input": "a", "answer": "b"})
    assert {form.scorer for form in scbench_file.TASKS.values()} <= set(SCORERS)


# kvpress

KVPRESS_ROWS = [
    {
        "context": 'a long, "quoted"\ncontext ' + "x" * 200_000,
        "question": f"Question {i}?\n",
        "answer_prefix": "Answer:",
        "answer": answer,
        "task": task,
        "max_new_tokens": 30,
    }
    for i, (task, answer) in enumerate([("vt", ["A", "B"]), ("vt", ["it's", "C"]), ("qa_1", ["D", "A"])])
]


def write_kvpress(path):
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, KVPRESS_ROWS[0])
            writer.writeheader()
            # As pandas writes lists, numpy arrays, and JSON users' tables.
            written = ["['A', 'B']", "[\"it's\" 'C']", '["D", "A"]']
            writer.writerows(row | {"answer": text} for row, text in zip(KVPRESS_ROWS, written))
    elif path.suffix == ".parquet":
        table = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        pyarrow.parquet.write_table(table.Table.from_pylist(KVPRESS_ROWS), path)
    elif path.suffix == ".jsonl":
        write_lines(path, *KVPRESS_ROWS)
    elif path.stem == "columns":
        columns = {name: {str(i): row[name] for i, row in enumerate(KVPRESS_ROWS)} for name in KVPRESS_ROWS[0]}
        path.write_text(json.dumps(columns))
    else:
        path.write_text(json.dumps(KVPRESS_ROWS))
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


def test_kvpress_columns_of_longbench_and_of_the_users_own(tmp_path):
    row = {key: value for key, value in KVPRESS_ROWS[0].items() if key != "answer"} | {"context": "c"}
    trec = row | {"task": "trec", "answers": ["City"], "all_classes": ["City", "Number"]}
    own = row | {"task": "my_task", "answer": "7", "scorer": "infinitebench_first_integer"}
    first, second = read(f"kvpress:{write_lines(tmp_path / 'a.jsonl', trec, own)}")
    assert first.classes == ("City", "Number") and score(first, "City or Number") == 0.5
    assert second.answers == ("7",) and score(second, "7") == 1.0
    for change, message in (
        ({"scorer": ""}, "line 1: no scorer is known for the task 'my_task'"),
        ({"scorer": "f1"}, "line 1: unknown scorer 'f1'"),
        ({"max_new_tokens": "many"}, "line 1: expected a whole number from 1 to 2147483647 in the field 'max_new_tokens'"),
        ({"max_new_tokens": 0}, "line 1: expected a whole number from 1"),
        ({"question": None}, "line 1: expected a text in the field 'question', got NoneType None"),
    ):
        with pytest.raises(ValueError, match=message):
            read(f"kvpress:{write_lines(tmp_path / 'a.jsonl', own | change)}")


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


def test_malformed_kvpress_files_are_refused(tmp_path, monkeypatch):
    for name, content, message in (
        ("a.csv", "task,context\nvt,c\n", "a.csv, line 2: expected a field 'question'"),
        ("a.csv", "task,context\n", "expected at least one row, got none"),
        ("a.csv", b"task,context\nvt,\xff\n", "expected a row of a csv in UTF-8"),
        ("a.json", '{"task": 3}', "expected a JSON list of rows, or columns"),
        ("a.json", "{", "expected a JSON list of rows, or columns"),
        ("a.json", "[]", "expected a JSON list of at least one object"),
        ("a.json", "[3]", "entry 1: expected a JSON object, got int 3"),
        ("a.txt", "", "expected one of the suffixes .csv, .json, .jsonl, .parquet, got '.txt'"),
    ):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ValueError, match=message):
            read(f"kvpress:{tmp_path / name}")
    (tmp_path / "a.parquet").write_bytes(b"nothing")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pyarrow"):
        read(f"kvpress:{tmp_path / 'a.parquet'}")


# References

ROW = {"context": "c", "question": "q", "answer_prefix": "", "max_new_tokens": 4, "task": "niah_single_1"}
NONE = {  # as JSON, or as the cell of a csv
    '""', '" "', '"\\u00a0\\u200b\\n"', "NaN", "Infinity", "null", "true", "{}", "[]", '[""]', '["a", " "]', "[NaN]",
    "[null]", "[[1]]", '"nan"', '"<NA>"', "9007199254740994.0", "1e22", '"\\ud800"',
}  # fmt: skip


@pytest.mark.parametrize("written", sorted(NONE))
def test_what_is_no_reference_is_refused_with_its_line(written, tmp_path):
    """Else every answer would score 100, or none, or the error would come after the cell was answered."""
    lines = [json.dumps(ROW | {"answer": "a"}), json.dumps(ROW | {"answer": "X"}).replace('"X"', written)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match="rows.jsonl, line 2: .*answer"):
        read(f"kvpress:{path}")
    for name, stem, field, fields in (
        ("infinitebench", "kv_retrieval", "answer", {"input": "i", "context": "c"}),
        ("longbench", "qasper", "answers", {"input": "i", "context": "c", "length": 3}),
        ("ruler", "vt", "outputs", {"input": "c" + RULER_QUESTION, "answer_prefix": ""}),
    ):
        path = tmp_path / f"{stem}.jsonl"
        path.write_text(json.dumps(fields | {field: "X"}).replace('"X"', written))
        with pytest.raises(ValueError, match=f"{stem}.jsonl, line 1: .*{field}"):
            read(f"{name}:{path}")


RULER_QUESTION = "Question: Find all variables that are assigned the value 1 in the text above."


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
    (made,) = read(f"kvpress:{path}")
    assert made.answers == (text,) and score(made, f"It is {text}.") == 1
    (tmp_path / "rows.json").write_text(f"[{path.read_text()}]")
    assert read(f"kvpress:{tmp_path / 'rows.json'}")[0].answers == (text,)


@pytest.mark.parametrize(
    ("scorer", "written", "right", "wrong"),
    [
        ("infinitebench_math_find", "1e-05", "0.00001", "0.1"),
        ("infinitebench_math_find", '"1e-05"', "0.00001", "0.1"),
        ("infinitebench_math_find", "9007199254740993", "9007199254740993", "9007199254740992"),
        ("infinitebench_math_find", "7.0", "7", "7.5"),
        ("infinitebench_first_integer", '"71432.0"', "71432", "7143"),
        ("infinitebench_first_integer", "9007199254740993", "9007199254740993", "9007199254740992"),
        ("infinitebench_code_run", "-3.0", "It is -3.", "3"),
        ("infinitebench_math_calc", "[1.0, 4.0]", "1 4", "2"),
        ("longbench_count", "7.0", "7", "17"),
        ("quest_passkey", '" 00321 "', "321", "32"),
    ],
)
def test_scorers_of_numbers_take_every_form_of_a_number(scorer, written, right, wrong, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW | {"scorer": scorer, "answer": "X"}).replace('"X"', written))
    (made,) = read(f"kvpress:{path}")
    assert (score(made, right), score(made, wrong)) == (1, 0)


def test_references_that_a_scorer_cannot_use_are_refused_with_their_line(tmp_path):
    for scorer, answer, told in (
        ("infinitebench_first_integer", "71,432", "expects whole numbers as references, got '71,432'"),
        ("infinitebench_code_run", 2.5, "expects whole numbers as references, got '2.5'"),
        ("quest_passkey", "none", "expects whole numbers as references, got 'none'"),
        ("infinitebench_math_find", "seven", "expects a number as reference, got 'seven'"),
        ("infinitebench_math_find", "1e999999999", "expects a number as reference, got '1e999999999'"),
        ("longbench_retrieval", "3", "expects references like 'Paragraph 3'"),
        ("infinitebench_code_debug", "load", "a function's name and a letter as references"),
        ("longbench2_choice", "E", "expects A, B, C or D as reference"),
        ("longbench_class_line", "City", "got no classes"),
    ):
        path = write_lines(tmp_path / "a.jsonl", ROW | {"scorer": scorer, "answer": answer})
        with pytest.raises(ValueError, match=f"a.jsonl, line 1: .*{told}"):
            read(f"kvpress:{path}")


def test_cells_of_a_csv_say_what_they_are(tmp_path):
    def answers(cell, scorer="niah_number"):
        path = tmp_path / "a.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([[*ROW, "scorer", "answer"], [*ROW.values(), scorer, "1"], [*ROW.values(), scorer, cell]])
        return read(f"kvpress:{path}")[1].answers

    for cell in ("", " ", "nan", "<NA>", "[]", "['']", "['a', None]", "[nan]", "71432.0", "7.14E+09", "[true]"):
        with pytest.raises(ValueError, match="a.csv, line 3: .*answer"):
            answers(cell)
    assert answers("2.0", "infinitebench_math_find") == ("2.0",) and answers("71432.0", "quest_passkey") == ("71432",)
    assert answers('["71432.0"]') == ("71432.0",) and answers("[71432.0]") == answers("71432") == ("71432",)
    assert answers("9007199254740993") == ("9007199254740993",) and answers("[1. 2.]") == ("1", "2")
    for row, told in (("c,q,,4,t,s,a, b", "got 1 more; quote cells"), ("c,q,,4,t,s", "got 1 fewer")):
        (tmp_path / "b.csv").write_text(",".join([*ROW, "scorer", "answer"]) + f"\n{row}\n")
        with pytest.raises(ValueError, match=f"b.csv, line 2: expected a cell for each column, {told}"):
            read(f"kvpress:{tmp_path / 'b.csv'}")


def test_absent_values_of_a_parquet_are_refused(tmp_path):
    table = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    def answers(*given):
        rows = [{**ROW, "answer": value} for value in given]
        pyarrow.parquet.write_table(table.Table.from_pylist(rows), tmp_path / "a.parquet")
        return [made.answers for made in read(f"kvpress:{tmp_path / 'a.parquet'}")]

    for absent in (None, float("nan"), 2.0**60):
        with pytest.raises(ValueError, match="a.parquet, row 2: .*answer"):
            answers(71432.0, absent)
    assert answers(71432.0, 0.5) == [("71432",), ("0.5",)] and answers(2**60 + 1) == [(str(2**60 + 1),)]


# A user's own questions


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
    (made,) = read(f"questions:{write_lines(tmp_path / 'a.jsonl', row)}")
    assert made.prompt == "c q" and score(made, "B") == 1
    for change, message in (
        ({"context": None, "question": ""}, "line 1: expected fields 'context' or 'context_file', 'question', got"),
        ({"context": None, "context_file": "none.txt"}, "line 1: expected a text in the field 'context_file', got"),
    ):
        with pytest.raises(ValueError, match=message):
            read(f"questions:{write_lines(tmp_path / 'a.jsonl', row | change)}")


# All formats


CELLS = {"task": "vt", "context": "c", "question": "q", "answer_prefix": "", "answer": "a", "max_new_tokens": "4"}


@pytest.mark.parametrize(
    "name, text, told",
    [
        ("a.csv", ",".join(CELLS) + '\n"vt,c,q,,a,4\nvt,c,q,,a,4\n', "line 3: expected a row of a csv .*unexpected end"),
        ("a.csv", ",".join(CELLS) + '\nvt,"c"d",q,,a,4\n', "line 2: expected a row of a csv .*, got ',' expected"),
        ("a.csv", ",".join([*CELLS, "answer"]) + "\nvt,c,q,,a,4,b\n", "columns of different names, got 'answer' twice"),
        ("a.jsonl", json.dumps(CELLS)[:-1] + ', "answer": "b"}', "line 1: .*expected keys once, got 'answer' twice"),
        ("a.json", "[" + json.dumps(CELLS)[:-1] + ', "answer": "b"}]', "expected keys once, got 'answer' twice"),
        ("a.json", json.dumps({"task": {"0": "vt"}, "context": {"0": "c", "1": "d"}}), "columns that map row numbers"),
        ("a.jsonl", json.dumps(CELLS | {"scorer": "f1"}), "line 1: unknown scorer 'f1'"),
    ],
    ids=["open quote", "quote in a cell", "column twice", "key twice", "key of a list twice", "columns", "scorer"],
)
def test_no_row_or_cell_is_lost_without_a_word(name, text, told, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=told) as raised:
        read(f"kvpress:{tmp_path / name}")
    assert str(raised.value).startswith(str(tmp_path / name))


@pytest.mark.parametrize("written, count", [("4", 4), (" 4 ", 4), (4.0, 4), ("007", 7), (2**31 - 1, 2**31 - 1)])
def test_max_new_tokens_is_a_whole_number(written, count, tmp_path):
    (made,) = read(f"kvpress:{write_lines(tmp_path / 'a.jsonl', CELLS | {'max_new_tokens': written})}")
    assert made.max_new_tokens == count


@pytest.mark.parametrize("written", [0, 2**31, 10**400, "9" * 400, "\u0664", "1e3", -1, 1.5, True])
def test_max_new_tokens_of_no_answer_is_refused(written, tmp_path):
    with pytest.raises(ValueError, match="line 1: expected a whole number"):
        read(f"kvpress:{write_lines(tmp_path / 'a.jsonl', CELLS | {'max_new_tokens': written})}")


def test_a_label_that_no_answer_can_name_is_refused(tmp_path):
    trec = CELLS | {"task": "trec", "all_classes": ["City", "Date"]}
    assert read(f"kvpress:{write_lines(tmp_path / 'a.jsonl', trec | {'answer': 'City'})}")[0].answers == ("City",)
    for answer in ("city", "City ", "Number"):
        with pytest.raises(ValueError, match=f"line 1: .* expects a label of one line as reference, got '{answer}'"):
            read(f"kvpress:{write_lines(tmp_path / 'a.jsonl', trec | {'answer': answer})}")


@pytest.mark.parametrize(
    ("scorer", "answer"),
    [
        ("infinitebench_first_integer", "-7"), ("quest_passkey", "-7"), ("longbench_count", "-1"),
        ("infinitebench_math_find", "-7.5"), ("infinitebench_kv", "1.5"), ("infinitebench_kv", "two words"),
    ],
)  # fmt: skip
def test_a_reference_that_its_scorer_never_reads_is_refused(scorer, answer, tmp_path):
    with pytest.raises(ValueError, match=f"line 1: the scorer '{scorer}' expects references that it finds in an answer"):
        read(f"kvpress:{write_lines(tmp_path / 'a.jsonl', CELLS | {'scorer': scorer, 'answer': answer})}")


@pytest.mark.parametrize("scorer", ["ruler_all", "ruler_part", "infinitebench_kv", "scbench_contains", "niah_number"])
def test_white_space_around_a_reference_costs_no_right_answer(scorer, tmp_path):
    (made,) = read(f"kvpress:{write_lines(tmp_path / 'a.jsonl', CELLS | {'scorer': scorer, 'answer': ' 7142\n'})}")
    assert made.answers == ("7142",) and score(made, "It is 7142.") == 1.0 and score(made, "It is 7143.") == 0.0


def test_a_damaged_page_of_a_parquet_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    importlib.import_module("pyarrow.parquet").write_table(pyarrow.Table.from_pylist([CELLS]), tmp_path / "a.parquet")
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[4:40] = bytes(36)
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(ValueError, match="expected a parquet file, got"):
        read(f"kvpress:{tmp_path / 'a.parquet'}")


def test_malformed_specs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown format 'longbech', did you mean 'longbench'"):
        read("longbech:a.jsonl")
    with pytest.raises(ValueError, match="expected FORMAT:PATH with a format of questions, ruler, .* got 'a.jsonl'"):
        read("a.jsonl")
    with pytest.raises(ValueError, match="the limit must be at least 1 record, got 0"):
        read("ruler:a.jsonl", limit=0)
    with pytest.raises(ValueError, match="expected files that end in .jsonl in this folder, got none"):
        read(f"ruler:{tmp_path}")


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
    with pytest.raises(ValueError, match=f"{stem}.jsonl: expected a file, got nothing at this path"):
        read(f"{name}:{path}")
    for content, message in (
        (b"", "expected at least one line with a JSON object, got an empty file"),
        (b"\n  \n", "expected at least one line with a JSON object, got an empty file"),
        (b'\n{"a": \n', "line 2: expected a JSON object, got a damaged line .*: '{\"a\":'..."),
        (b"\xff\xfe\n", "line 1: expected a JSON object, got a damaged line .*utf-8"),
        (b"[1]\n", r"line 1: expected a JSON object, got list \[1\]"),
        (b"{}\n", "line 1: expected (a field|fields) '"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            read(f"{name}:{path}")
        assert str(path) in str(caught.value)


def test_every_family_names_a_scorer():
    assert {family.scorer for family in ruler_file.FAMILIES.values()} <= set(SCORERS)
    assert {task.split("_")[0] for task in ruler_file.TASKS} == set(ruler_file.FAMILIES)


# Truncation


@pytest.mark.parametrize(
    "limit, mode, expected",
    [
        (4, "middle", [0, 1, 8, 9]),
        (5, "middle", [0, 1, 8, 9]),
        (1, "middle", []),
        (4, "head", [0, 1, 2, 3]),
        (4, "tail", [6, 7, 8, 9]),
        (10, "error", list(range(10))),
        (10, "middle", list(range(10))),
        (99, "tail", list(range(10))),
    ],
)
def test_every_truncation_stays_within_the_limit(limit, mode, expected):
    ids = list(range(10))
    made = truncate(ids, limit, mode)
    assert made == expected and made is not ids


def test_impossible_truncations_are_refused():
    with pytest.raises(ValueError, match="the prompt has 3 tokens, expected at most 2"):
        truncate([1, 2, 3], 2, "error")
    with pytest.raises(ValueError, match="unknown truncation mode 'mid', expected one of"):
        truncate([1], 2, "mid")
    with pytest.raises(ValueError, match="the limit must be at least 1 token, got 0"):
        truncate([1], 0, "head")
