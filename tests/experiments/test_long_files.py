"""Readers of HELMET and of the tasks of lm-evaluation-harness, and their scores."""

import json
import pathlib
import re

import pytest

from experiments.benchmarks import harness, measures, read, score
from experiments.benchmarks.text_metrics import ndcg10, ranked_ids


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, records)))
    return path


# ---- tasks of the harness -----------------------------------------------------------------------------------------

SOLUTION = "<Solution>\n16 * 9 = 144\n18 - 6 = 12\n144 / 12 = 12\n</Solution>"
ROUTE = "From A, take a bus to B.\nFrom B, take a train to C.\nFrom C, take a ferry to D."
TRACE = "Oak's belief:\n- Step 0: (initial) {Oak location: room; belief: None}\n- Step 1: (moved) {Oak location: hall}\nFinal"
TABLE = "name\tprice\nThe Oak\t$5\nElm\t7"


def longproc(reference, **metadata):
    return {"id": "1", "input_prompt": "Read.\n\n[ANSWER]", "reference_output": reference, "metadata": json.dumps(metadata)}


# By task: a record, the end of its prompt, and for each recorded answer the score that it deserves.
TASKS = {
    "gsm8k": (
        {"question": "How many eggs?", "answer": "She has <<2*9=18>>18 eggs.\n#### 1,018"}, "How many eggs?\nAnswer:",
        {"It is \\boxed{1018}.": 1, "She makes $1,018.": 1, "#### 1018": 1, "18": 0, "": 0, "-1018": 0, "1018 and 3": 0},
    ),
    "aime24": (
        {"ID": "1", "Problem": "P?", "Solution": "s", "Answer": 25}, "P?\nAnswer:",
        {"so \\boxed{025}": 1, "\\boxed{25}": 1, "25": 1, "$25$": 1, "\\boxed{24} 25": 0, "\\boxed{250}": 0},
    ),
    "minerva_math500": (
        {"problem": "Half?", "solution": "\\boxed{\\frac{1}{2}}", "answer": "", "subject": "Algebra", "level": 3},
        "Half?\n\nSolution:",
        {"\\boxed{\\dfrac12}": 1, "\\boxed{0.5}": 1, "$1/2$": 1, "so $\\boxed{\\frac{1}{2}}$.": 1, "\\boxed{2}": 0, "": 0},
    ),
    "ifeval": (
        {"key": 1, "prompt": "Write, please.", "instruction_id_list": ["punctuation:no_comma", "language:response_language"],
         "kwargs": [{}, {"language": "de", "relation": None}]}, "Write, please.",
        {"Das ist ein alter Baum im Wald.": 1, "Ja, das ist ein alter Baum im Wald.": 0.5, "This is an old tree.": 0.5,
         "": 0},
    ),
    "longproc_countdown_0.5k": (
        longproc("# Search Procedure\nx\nNow we have found the target", nums=[9, 16, 6, 18], target=12), "[ANSWER]",
        {SOLUTION: 1, SOLUTION.replace("16", "17"): 0, "": 0, "<Solution>\n9 / 0 = 1\n1 + 1 = 2\n3 + 3 = 6\n</Solution>": 0,
         SOLUTION.replace("144 / 12", "exit()"): 0},
    ),
    "longproc_path_traversal_2k": (
        longproc(ROUTE), "[ANSWER]",
        {f"<Route>\n{ROUTE}\n</Route>": 1, ROUTE: 0, "": 0, f"<Route>\n{ROUTE[:40]}\n</Route>": 0},
    ),
    "longproc_tom_tracking_2k": (
        longproc(TRACE), "[ANSWER]",
        {TRACE: 1, "thinking\n" + TRACE.lower().replace("- step", "- Step"): 1, TRACE.replace("hall", "room"): 0, "": 0},
    ),
    "longproc_html_to_tsv_2k": (
        longproc(TABLE), "[ANSWER]",
        {"```tsv\nname\tprice\nElm\t7\noak\t5\n```": 1, "```tsv\nname\tprice\nElm\t7\n```": 2 / 3, "": 0,
         "```tsv\nname\tprice\nElm\t8\n```": 0},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def few_tasks():
    """Of the harness's tasks those that are read here: an index of all takes 15 seconds."""
    tasks = pytest.importorskip("lm_eval.tasks")
    folder = pathlib.Path(tasks.__file__).parent
    named = [str(folder / name) for name in ("gsm8k", "aime", "minerva_math", "ifeval", "longproc", "arc")]
    with pytest.MonkeyPatch.context() as patch:
        manager = tasks.TaskManager(include_path=named, include_defaults=False)
        patch.setattr(harness, "_manager", lambda: manager)
        yield


@pytest.mark.slow  # reading the harness takes 20 seconds
@pytest.mark.usefixtures("few_tasks")
@pytest.mark.parametrize("name", TASKS)
def test_recorded_answers_to_tasks_of_the_harness_get_what_they_deserve(name, tmp_path):
    record, prompt, answers = TASKS[name]
    (made,) = read(f"lm-eval:{name}={write(tmp_path / 'own.jsonl', record)}")
    assert made.task == name and made.prompt.endswith(prompt)
    assert {text: score(made, text) for text in answers} == pytest.approx(answers)
    assert all(0 <= value <= 1 for text in answers for value in measures(made, text).values())


@pytest.mark.slow  # reading the harness takes 20 seconds
@pytest.mark.usefixtures("few_tasks")
def test_a_task_has_further_measures(tmp_path):
    (made,) = read(f"lm-eval:gsm8k={write(tmp_path / 'own.jsonl', TASKS['gsm8k'][0])}")
    assert measures(made, "1018") == {"exact_match,strict-match": 0, "exact_match,flexible-extract": 1}


@pytest.mark.slow  # reading the harness takes 20 seconds
@pytest.mark.usefixtures("few_tasks")
@pytest.mark.parametrize(
    "task, record, told",
    [
        ("gsm", {}, "expected a task of the harness"),
        ("longproc_pseudo_to_code_2k", longproc("x"), "does not run what a model writes"),
        ("arc_easy", {"question": "q"}, "arc_easy"),
        ("gsm8k", {"question": "q"}, "expected record"),
        ("ifeval", TASKS["ifeval"][0] | {"instruction_id_list": ["punctuation:no_dot"], "kwargs": [{}]}, "expected a record"),
    ],
)
def test_what_no_task_of_the_harness_can_read_is_refused(task, record, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        read(f"lm-eval:{task}={write(tmp_path / 'own.jsonl', record)}")


# ---- HELMET -------------------------------------------------------------------------------------------------------


def test_values_of_json_are_asked_behind_two_examples(tmp_path):
    record = {
        "num_kvs": 3, "context": '{"a": "1"}', "question": "a", "answer": "1", "depth": 0.5,
        "demos": [["b", "2"], ["c", "3"], ["d", "4"]],
    }  # fmt: skip
    (made,) = read(f"helmet:{write(tmp_path / 'json_kv' / 'test_k3_dep6.jsonl', record)}")
    assert made.prompt == (
        '{"a": "1"}\n\nExtract the value corresponding to the specified key in the JSON object below.\n\n'
        "Key: b\nCorresponding value: 2\n\nKey: c\nCorresponding value: 3\n\nKey: a\nCorresponding value:"
    )
    assert not made.chat and [score(made, text) for text in (" 1", "It is 'the 1'.", "2", "")] == [1, 1, 0, 0]


def test_questions_about_passages_have_two_examples_of_the_folder(tmp_path):
    def asked(question, **more):
        ctxs = [{"title": f"T {question}", "text": f"text of {question}"}]
        return {"question": question, "answers": [f"answer {question}", "x"], "ctxs": ctxs, **more}

    path = write(tmp_path / "nq-dev-multikilt_1000_k50_dep6.jsonl", asked("one"), asked("two"))
    (alone, _) = read(f"helmet:{path}")
    assert alone.labels == {"shots": 0} and alone.task == "nq" and alone.stop == ("\n",) and alone.answers[0] == "answer one"
    assert alone.prompt.endswith("Answer: [answer]\n\nDocument (Title: T one): text of one\n\nQuestion: one\nAnswer:")
    demos = [asked(name) for name in "abcdefgh"]
    write(tmp_path / "nq-train-multikilt_1000_k3_dep6.jsonl", *demos, demos[0])
    made, other = read(f"helmet:{path}")
    shown = re.findall(r"Question: (\w)\nAnswer: answer (\w)\n", made.prompt)
    assert len(shown) == 2 and all(a == b for a, b in shown) and len({a for a, _ in shown}) == 2
    assert made == read(f"helmet:{path}")[0] and shown != re.findall(r"Question: (\w)\nAnswer: answer (\w)\n", other.prompt)
    path = write(tmp_path / "popqa_test_1000_k50_dep6.jsonl", asked("rare", s_pop=10), asked("known", s_pop=2000))
    assert [one.answers[0] for one in read(f"helmet:{path}")] == ["answer rare"]
    with pytest.raises(ValueError, match="expected HELMET's fields"):
        read(f"helmet:{write(tmp_path / 'other.jsonl', {'a': 1})}")


def test_rankings_are_scored_by_ndcg(tmp_path):
    ctxs = [{"id": str(number), "text": f"text {number}", "label": label} for number, label in ((11, 0), (12, 3), (13, 1))]
    record = {"qid": "q", "query": "Which?", "ctxs": ctxs}
    (made,) = read(f"helmet:{write(tmp_path / 'test_reranking_data_k50_dep3.jsonl', record)}")
    assert made.prompt.endswith("[ID: 13] Document: text 13\n\nQuery: Which?\nRanking:") and made.answers[0] == "12 > 13 > 11"
    # DCG 3 + 1 / log2(3) = 3.631 is the best; 12 in the second place gives 3 / log2(3) + 1 / log2(4) = 2.393
    rows = ((" ID12 > ID13 > ID11", 1.0), ("[11] > [12] > [13]", 0.659), ("", 0.0), ("none", 0.0), ("12", 0.826))
    for text, expected in rows:
        assert score(made, text) == pytest.approx(expected, abs=1e-3)
    assert ranked_ids("First 1 > 2. Then ID: 3 > ID: 4 > ID: 3") == ["3", "4"]
    assert ndcg10("1", ("1", json.dumps({"1": 0}))) == 0.0


KV = {"num_kvs": 2, "question": "k", "context": "{}", "answer": "v", "demos": [["a", "b"], ["c", "d"]]}
RANK = {"qid": "1", "query": "q", "ctxs": [{"id": "5", "text": "x", "label": 1}, {"id": "6", "text": "y", "label": 0}]}


def test_damaged_records_are_refused_with_their_place(tmp_path):
    for record, message in (
        (KV | {"demos": [["a"], ["c", "d"]]}, "a key and a value in the field 'demos', got list"),
        (KV | {"demos": [3]}, "pairs of a key and a value in the field 'demos', got int 3"),
        (RANK | {"ctxs": [{"id": "5", "text": "x"}]}, "a whole number as 'label', got dict"),
        (RANK | {"ctxs": [{"text": "x", "label": 1}]}, "passages with an 'id' and a whole number"),
        (RANK | {"ctxs": [{"id": 5, "text": None, "label": 1}]}, "passage with a 'text'"),
    ):
        path = write(tmp_path / "damaged.jsonl", record)
        with pytest.raises(ValueError, match=re.escape(f"{path}, line 1: ") + ".*" + re.escape(message)):
            read(f"helmet:{path}")


def test_a_mark_and_other_ends_of_lines_do_not_matter(tmp_path):
    for record in (KV, RANK):
        path = write(tmp_path / "whole.jsonl", record)
        (made,) = read(f"helmet:{path}")
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\r\n\r\n")
        assert read(f"helmet:{path}") == [made]
