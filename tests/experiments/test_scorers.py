"""The suites' scorers, against values worked out by hand and against a second package."""

from __future__ import annotations

import sys

import pytest

from experiments.benchmarks import text_metrics
from experiments.benchmarks.scorers import SCORERS, score
from experiments.tasks import Example, code_similarity


def example(scorer, *answers, classes=()):
    return Example("a task", "", "", "", answers, 8, scorer, classes=classes)


VALUES = [
    # RULER: the share of references contained, or any; case and control characters do not matter.
    ("ruler_all", "It is a\tb.", ("a\tb",), 1.0),  # control characters are line breaks in both
    ("ruler_all", "It is ABC and def.", ("abc", "DEF", "ghi", "jkl"), 0.5),
    ("ruler_all", "\x00abc\x1f", ("ABC",), 1.0),
    ("ruler_all", "a\x07b", ("ab",), 0.0),  # a control character is a line break, not nothing
    ("ruler_part", "It is ABC.", ("xyz", "abc"), 1.0),
    # LongBench: words {cat, sat} against {cat, ran, far} share one: precision 1/2, recall 1/3, F1 2/5.
    ("longbench_f1", "The cat sat.", ("a cat, ran far",), 0.4),
    ("longbench_f1", "the the cat", ("cat cat",), 2 / 3),  # bags: precision 1/1, recall 1/2
    ("longbench_f1", "a dog", ("a cat", "the dog!"), 1.0),
    ("longbench_f1", "the", ("the",), 0.0),  # nothing is left once articles are dropped
    ("longbench_f1_line", "\n\ncat\nno no no", ("cat",), 1.0),
    ("longbench_f1_line", "wrong\ncat", ("cat",), 0.0),
    # jieba cuts 我来到北京清华大学 into 我, 来到, 北京, 清华大学; two of four are in the reference.
    ("longbench_f1_zh", "我来到北京清华大学", ("北京，清华大学。",), 2 * 0.5 * 1.0 / 1.5),
    # InfiniteBench counts characters instead: 北京 is two of 我来到北京 and both of the reference.
    ("infinitebench_f1_zh", "我 来到北京。", ("北京",), 2 * 0.4 * 1.0 / 1.4),
    ("infinitebench_f1_zh", "BERLIN", ("berlin", "北京"), 1.0),
    # ROUGE-L: "the cat" of three and of four words.
    ("longbench_rouge", "the cat sat", ("the cat ran fast",), 2 * (2 / 3) * (1 / 2) / (7 / 6)),
    ("longbench_rouge", "...", ("the cat",), 0.0),
    ("longbench_rouge_line", "\nthe cat sat\nDialogue: more", ("the cat sat",), 1.0),
    ("longbench_rouge_zh", "我来到北京", ("我来到上海",), 2 / 3),
    ("longbench_count", "There are 7, not 17; 7!", ("7",), 2 / 3),
    ("longbench_retrieval", "Paragraph 3 or 4", ("Paragraph 3",), 0.5),
    ("longbench_retrieval", "段落27", ("段落27",), 1.0),
    ("longbench_retrieval", "13", ("Paragraph 3",), 0.0),
    ("longbench_code", "\n# a comment\n```python\nx = 1\ny = 2", ("x = 1",), 1.0),
    ("longbench_code", "// x = 1", ("x = 1",), 0.0),
    ("longbench2_choice", "**The correct answer is (B)**", ("B",), 1.0),
    ("longbench2_choice", "The correct answer is B.", ("B",), 1.0),
    ("longbench2_choice", "The correct answer is C, no: The correct answer is (B)", ("B",), 1.0),
    ("longbench2_choice", "B", ("B",), 0.0),
    # InfiniteBench.
    ("infinitebench_first_integer", " is 71432. Remember 5", ("71432",), 1.0),
    ("infinitebench_first_integer", "071432", ("71432",), 0.0),
    ("infinitebench_f1", "Peyton or Seb", ("x", '"Peyton"'), 0.5),
    ("infinitebench_kv", '"00a-1"\n', ("00a-1",), 1.0),
    ("infinitebench_kv", "00a-12", ("00a-1",), 0.0),
    ("infinitebench_choice", " B. Snowfield", ("Snowfield", "B"), 1.0),
    ("infinitebench_choice", "Because", ("Snowfield", "C"), 0.0),  # its first letter is B
    ("infinitebench_choice", "Snowfield", ("Snowfield", "C"), 1.0),
    ("infinitebench_choice", "the answer is: Snowfield.", ("Snowfield", "C"), 1.0),
    ("infinitebench_choice", "the answer is: D, not C", ("Snowfield", "C"), 0.0),
    ("infinitebench_choice", "it must be C", ("Snowfield", "C"), 1.0),
    ("infinitebench_code_debug", "C. load", ("load", "C"), 1.0),
    ("infinitebench_code_debug", "The correct option is: `load`", ("load", "C"), 1.0),
    ("infinitebench_code_debug", "The correct option is: B", ("load", "C"), 0.0),
    ("infinitebench_code_debug", "C", ("load", "C"), 0.0),  # the suite wants "C." or an opening before it
    ("infinitebench_code_run", " the value is -36.", ("-36",), 1.0),
    ("infinitebench_code_run", "-36 it is", ("-36",), 0.0),
    ("infinitebench_math_find", "is 88, not 9", ("88",), 1.0),
    ("infinitebench_math_find", "88.7", ("88",), 1.0),  # InfiniteBench's program stops at this; SCBench takes 88
    ("infinitebench_math_find", "88.7", ("88.5",), 0.0),
    ("infinitebench_math_find", "88.5", ("88.5",), 1.0),
    ("infinitebench_math_find", "9" * 5000, ("88",), 0.0),
    ("infinitebench_math_calc", "[1, 04, 9, 8]", ("1", "4", "8", "8"), 0.5),
    ("infinitebench_dialogue", "Ace: hello", ("ACE", "ACE ROTHSTEIN"), 1.0),
    ("infinitebench_dialogue", "It is **Ace Rothstein**.", ("ACE ROTHSTEIN",), 1.0),
    ("infinitebench_dialogue", "mary\n jane", ("MARY JANE",), 1.0),
    ("infinitebench_dialogue", "Jane, not Mary", ("MARY JANE",), 0.0),
    ("infinitebench_dialogue", "likely O'Brien's", ("O'BRIEN",), 1.0),
    ("infinitebench_dialogue", "O\u2019Brien", ("O'BRIEN",), 1.0),
    ("infinitebench_dialogue", "Mr. Jean-Luc Picard", ("MR JEAN-LUC",), 1.0),
    ("infinitebench_dialogue", "Jose\u0301", ("JOS\u00c9",), 1.0),
    ("infinitebench_dialogue", "Joanna", ("ANN",), 0.0),  # the suite's program counts the part of a word
    ("infinitebench_dialogue", "It is ??? !", ("???",), 1.0),
    ("infinitebench_dialogue", "It is ACE?", ("???",), 0.0),
    # Lines are sentences; no stemming: {cat, sat} of "cats sat" and "cat sat" share one of two.
    ("infinitebench_summary", "cats sat", ("cat sat",), 0.5),
    ("infinitebench_summary", "b\na", ("a\nb", "z"), 1.0),
    # SCBench.
    ("scbench_contains", "xx00a-1yy", ("00a-1",), 1.0),
    ("scbench_any", "it was ace", ("Remo", "Ace"), 1.0),
    ("scbench_vt", "AAA", ("AAA", "BBB", "CCC"), 0.33),
    # Needles: stems, so "sandwiches" is "sandwich".
    ("niah_number", "It is 12345.", ("2345",), 1.0),
    ("niah_rouge1", "eat sandwiches", ("eat a sandwich",), 0.8),
    ("quest_passkey", "is 00321. ", ("321",), 1.0),
    ("quest_passkey", "9" * 5000, ("321",), 0.0),
]


@pytest.mark.parametrize("scorer", dict.fromkeys(scorer for scorer, *_ in VALUES))
def test_values_worked_out_by_hand(scorer):
    for name, prediction, answers, expected in VALUES:
        if name == scorer:
            assert score(example(scorer, *answers), prediction) == pytest.approx(expected, abs=1e-7), prediction
            assert score(example(scorer, *answers), "") == 0.0


def test_every_scorer_has_a_value_above():
    elsewhere = {"longbench_class_line", "scbench_repoqa"}
    elsewhere |= {"lm-eval", "helmet_substring", "helmet_ndcg10"}  # in test_long_files.py
    assert {scorer for scorer, *_ in VALUES} | elsewhere == set(SCORERS)


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


@pytest.mark.parametrize(
    "one, other, percent",
    [
        ("abcd", "bcde", 75),
        ("a", "abcdefghijklmno", 12),  # 12.5, halves go to the even number
        ("aaaa", "abaa", 50),  # the longest block is "aa"; edit distances would say 75
        ("", "", 100),
    ],
)
def test_code_similarity_is_a_whole_number_of_percent(one, other, percent):
    assert code_similarity(one, other) == percent / 100


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
