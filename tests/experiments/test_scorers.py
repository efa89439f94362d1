"""The suites' scorers, against values worked out by hand and against a second package."""

import pathlib
import sys
import tomllib

import pytest

from experiments.benchmarks import text_metrics
from experiments.benchmarks.scorers import SCORERS, score
from experiments.benchmarks.understanding import NOLIMA_METRICS
from experiments.tasks import Example, code_recall, rules, scorers


def example(scorer, *answers, classes=()):
    return Example("a task", "", "", "", answers, 8, scorer, classes=classes)


SCORES = tomllib.loads(pathlib.Path(__file__).with_name("scores.toml").read_text(encoding="utf-8"))["scores"]
SCORES += [
    ["infinitebench_math_find", "9" * 5000, ["88"], 0.0],
    ["quest_passkey", "9" * 5000, ["321"], 0.0],
    ["score_code_answer", "(" * 5000, ["ValueError"], 0.0],
]
OF_TASKS = {**vars(scorers), **vars(rules), **vars(code_recall)}


@pytest.mark.parametrize("scorer", dict.fromkeys(scorer for scorer, *_ in SCORES))
def test_scores_worked_out_by_hand(scorer):
    for name, prediction, answers, expected in SCORES:
        if name == scorer in SCORERS:
            assert score(example(scorer, *answers), prediction) == pytest.approx(expected, abs=1e-7), prediction
            assert score(example(scorer, *answers), "") == 0.0
        elif name == scorer:
            assert OF_TASKS[scorer](prediction, answers) == pytest.approx(expected, abs=0.005), prediction


def test_every_scorer_has_scores_worked_out_by_hand():
    elsewhere = {"longbench_class_line", "scbench_repoqa"}
    elsewhere |= {"lm-eval", "helmet_substring", "helmet_ndcg10"}  # in test_long_files.py
    elsewhere |= {f"nolima_{metric}" for metric in NOLIMA_METRICS} | {
        "babilong",
        "oolong",
        "mrcr",
    }  # test_understanding_files.py
    assert {scorer for scorer, *_ in SCORES if not scorer.startswith("score_")} | elsewhere == set(SCORERS)


@pytest.mark.parametrize(
    "prediction, answer, expected",
    [
        ("Type: Number\nQuestion: ...", "Number", 1.0),
        ("Number", "Other number", 0.0),  # the right label is not named
        ("Other number, I think", "Other number", 1.0),  # "number" is named too, but is part of the right label
        ("City or Number", "City", 0.5),
        ("Date\nCity", "City", 0.0),
        ("", "City", 0.0),
    ],
)
def test_classification_counts_the_labels_named_in_the_first_line(prediction, answer, expected):
    classes = ("City", "Number", "number", "Other number", "Date")
    assert score(example("longbench_class_line", answer, classes=classes), prediction) == expected


def test_classification_keeps_the_official_loop():
    """The official program drops labels from the list that it walks over, and so passes over the one behind."""
    answer = "abc"
    assert score(example("longbench_class_line", answer, classes=("a", "abc", "b")), "abc") == 1.0
    assert score(example("longbench_class_line", answer, classes=("a", "b", "abc")), "abc") == 0.5


def test_rouge_agrees_with_the_other_package_where_both_measure_the_same():
    """Without repeated words, stems and full stops the packages `rouge` and `rouge-score` define one ROUGE-L."""
    pairs = [("one two three four", "two four six"), ("a b c d e", "e d c b a"), ("x y", "x y z")]
    for prediction, answer in pairs:
        other = text_metrics.google_rouge(prediction, [answer], "rougeL", stem=False)
        assert 0 < other < 1
        assert text_metrics.rouge_l(prediction, answer) == pytest.approx(other, abs=1e-7)


def test_repoqa_wants_the_function_and_no_other():
    asked = "def add(first, second):\n    total = first + second\n    return total\n"
    other = "def sub(first, second):\n    total = first - second\n    return total\n"
    far = "def main():\n    parser = build()\n    parser.run(everything, twice)\n"
    wanted = example("scbench_repoqa", asked, classes=(asked, other, far))
    assert score(wanted, f"Here it is:\n```python\n{asked}```\nDone.") == 1.0
    assert score(wanted, asked) == 1.0
    assert score(wanted, f"```\n{other}```") == 0.0
    assert score(wanted, asked[:40]) == 0.0
    assert score(wanted, "") == 0.0


@pytest.mark.slow
def test_a_very_long_sentence_scores_zero_as_in_longbench():
    words = " ".join(str(number) for number in range(1200))
    assert text_metrics.rouge_l(words, words) == 0.0


def test_errors_name_what_was_got_and_expected():
    with pytest.raises(ValueError, match="unknown scorer 'longbench_f2', did you mean 'longbench_f1'"):
        score(example("longbench_f2", "a"), "a")
    with pytest.raises(ValueError, match="at least one reference, got none"):
        score(example("ruler_all"), "a")
    with pytest.raises(ValueError, match="got no classes"):
        score(example("longbench_class_line", "a"), "a")
    with pytest.raises(ValueError, match="references like 'Paragraph 3'"):
        score(example("longbench_retrieval", "3"), "3")
    with pytest.raises(ValueError, match="a function's name and a letter"):
        score(example("infinitebench_code_debug", "load"), "load")


@pytest.mark.parametrize(
    "package, scorer", [("jieba", "longbench_f1_zh"), ("rouge", "longbench_rouge"), ("rouge_score", "niah_rouge1")]
)
def test_a_missing_package_names_the_extra(package, scorer, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    text_metrics._package.cache_clear()
    text_metrics._google_rouge.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"kvjax\[eval\]"):
        score(example(scorer, "a"), "a")
