"""The easier procedures: what is asked follows from the prompt, and a line counts by itself."""

from __future__ import annotations

import functools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import tasks
from experiments.tasks import easy_procedures, procedures
from tests.experiments.test_tasks import sample

EASY = tasks.GROUPS["easy_procedures"]
LEDGERS = ("ledger_1", "ledger_2")
SCORE = {name: tasks.get_task(name).score for name in EASY}


@pytest.mark.parametrize("name", EASY)
def test_a_wrong_line_costs_itself_alone(name):
    example = sample(name, 1024)
    steps, half = list(example.answers), len(example.answers) // 2
    without = steps[:half] + steps[half + 1 :]
    wrong = steps[:half] + [steps[half] + "x"] + steps[half + 1 :]
    one_less = 1 - 1 / len(steps)
    if name.startswith("walk"):  # nor does the next line follow
        assert tasks.score(name, "\n".join(without), steps) == pytest.approx(1 - 2 / len(steps))
    elif name not in LEDGERS:  # there the next sum needs the line
        assert tasks.score(name, "\n".join(without), steps) == pytest.approx(one_less)
        assert tasks.score(name, "\n".join(wrong), steps) == pytest.approx(one_less)
    assert tasks.score(name, "\n".join(steps[:half]), steps) == pytest.approx(half / len(steps))
    loop = "\n".join([steps[0]] * len(steps))
    assert tasks.score(name, loop, steps) == pytest.approx(1 / len(steps))
    prefix = tasks.get_task(name).measures["prefix"]
    assert [prefix("\n".join(lines), steps) for lines in (steps, wrong)] == [1.0, half / len(steps)]


@pytest.mark.parametrize("name", EASY)
def test_an_easy_procedure_grows_with_the_length_and_the_prompt_holds_its_lines(name):
    example = sample(name, 1024)
    assert len(example.answers) * 1.7 < len(sample(name).answers)
    for step in example.answers:
        told = {"table": step.replace("\t", "</td><td>"), "ledger": step.partition(" = ")[0], "walk": step.partition(". ")[2]}
        assert told.get(name[:-2], step) in example.context
        assert step not in example.question


def lists(example: tasks.Sample) -> tuple[list[str], list[str], list[str]]:
    """The two lists of a prompt, and the merged one, its given lines included."""
    a, b = example.context.partition("Now the real lists\nFirst list\n")[2].split("\n\nSecond list\n")
    given = example.answer_prefix.partition("```python\n")[2].rstrip("\n").split("\n")
    assert len(given) == 4
    return a.split("\n"), b.split("\n"), [*given, *example.answers]


def test_lists_are_merged_in_turn():
    a, b, merged = lists(sample("merge_1", 1024))
    assert merged[::2] == a and merged[1::2] == b
    assert [line.partition(" = ")[0] for line in merged[-2:]] == [f"{label}[{len(a)}]" for label in "ab"]


def test_at_most_two_lines_of_a_list_follow_each_other_at_level_2():
    a, b, merged = lists(sample("merge_2", 1024))
    runs = "".join("a" if line in a else "b" for line in merged)
    assert "aaa" not in runs and "bbb" not in runs and "aa" in runs
    numbers = [int(re.match(r"log\[(\d+)\]", line).group(1)) for line in merged]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert set(a) | set(b) == set(merged) and not set(a) & set(b)
    assert [line for line in merged if line in a] == a and [line for line in merged if line in b] == b


@pytest.mark.parametrize("level", [1, 2])
def test_a_walk_around_a_circle_follows_its_lines_once(level):
    example = sample(f"walk_{level}", 1024)
    lines = example.context.partition("Now the real lines\n")[2].split("\n")
    after = dict(re.fullmatch(r'after\["(\w+)"\] = "(\w+)"', line).groups() for line in lines)
    walked = [*example.answer_prefix.rstrip("\n").split("\n")[1:], *example.answers]
    assert len(after) == len(lines) == level * len(walked)
    start, count = re.search(r'circle from "(\w+)".* Write (\d+) lines', example.question).groups()
    at = start
    for number, step in enumerate(walked, 1):
        assert step == f'{number}. after["{at}"] = "{after[at]}"'
        at = after[at]
    assert at == start and int(count) == len(walked)


def test_a_wrong_step_of_a_walk_costs_itself_and_repeats_cost_their_places():
    answers = [f'after["{one}"] = "{other}"' for one, other in ("ab", "bc", "cd", "de", "ef")]

    def score(*steps: str) -> float:
        return SCORE["walk_1"]("\n".join(f'after["{one}"] = "{other}"' for one, other in steps), answers)

    assert score("ab", "bc", "cd", "de", "ef", "xy") == 1.0
    assert score("ab", "bd", "de", "ef") == 0.6  # a jump ahead, from where the walk goes on
    assert score("ab", "bd", "de", "ef", "fb", "bc", "cd") == 1.0  # the places jumped over, in the next round
    assert score("ab", "ba", "ab", "ba") == 0.2
    assert score("ab", "cd", "ef") == 0.2  # right lines that do not follow
    assert SCORE["walk_1"]("\n".join(f"{at}. {answer}" for at, answer in enumerate(answers, 7)), answers) == 1.0
    assert score("bc", "cd") == 0.2  # the first line does not follow, the second does


@pytest.mark.parametrize("name", LEDGERS)
def test_sums_are_right_and_a_wrong_sum_costs_one_booking(name):
    example = sample(name, 1024)
    steps = list(example.answers)
    balances = dict(re.findall(r"(cash|bank) (\d+)", example.context.rpartition("Balance: ")[2]))
    assert len(balances) == int(name[-1])
    for step in steps:
        account, change, after = re.fullmatch(r"\d+\. \w+: (\w+) ([+-]\d) = (\d+)", step).groups()
        balances[account] = str(int(balances[account]) + int(change))
        assert balances[account] == after and 100 <= int(after) <= 999
    score, half = SCORE[name], len(steps) // 2

    def more(step: str, by: int) -> str:
        return re.sub(r"\d+$", lambda found: str(int(found.group()) + by), step)

    account = steps[half].split()[2]
    carried = [more(step, 7) if at >= half and step.split()[2] == account else step for at, step in enumerate(steps)]
    assert score("\n".join(carried), steps) == pytest.approx(1 - 1 / len(steps))  # the wrong balance was carried on rightly
    once = [more(step, 7) if at == half else step for at, step in enumerate(steps)]
    later = any(step.split()[2] == account for step in steps[half + 1 :])
    assert score("\n".join(once), steps) == pytest.approx(1 - (1 + later) / len(steps))  # nor does the next sum follow
    assert score("\n".join(step.replace(": ", ": x", 1) for step in steps), steps) == 0.0
    assert score(f"1. oak: loan +{'9' * 5000} = {'9' * 5000}", steps) == 0.0


def test_words_are_looked_up_in_the_order_asked():
    example = sample("lookup", 1024)
    value = dict(re.findall(r'value\["(\w+)"\] = (\d+)', example.context))
    asked = example.question.rpartition(": ")[2].rstrip(".").split(", ")
    assert list(example.answers) == [f'value["{word}"] = {value[word]}' for word in asked]
    assert len(value) == 2 * len(asked)


def test_problems_of_one_operation_have_one():
    example = sample("word_problems_1", 1024)
    for line, answer in zip(example.target.split("\n"), example.answers, strict=True):
        left, right = line.partition(": ")[2].partition(". Answer: ")[0].split(" = ")
        assert eval(left) == int(right) == int(answer)


def test_lines_in_order_are_the_longest_common_subsequence():
    score = SCORE["lookup"]
    assert [score("\n".join(text), "abcd") for text in ("abcd", "xaxbxcxdx", "acbd", "dcba", "bd", "aaaa", "")] == [
        1.0, 1.0, 0.75, 0.25, 0.5, 0.25, 0.0,
    ]  # fmt: skip
    assert score("a\tb\n```\nc", ["a b", "c"]) == 1.0
    assert procedures.score_steps("x\na\nb", ["a", "b"]) == 0.0 and score("x\na\nb", ["a", "b"]) == 1.0


@pytest.mark.parametrize("name", [*EASY, "word_problems_1", "word_problems"])
def test_a_lost_half_is_lost_in_its_quarters_and_their_mean_is_the_score(name):
    example, task = sample(name, 1024), tasks.get_task(name)
    lines = example.target.split("\n")
    assert len(lines) == len(example.answers)
    for written in (lines, lines[: len(lines) // 2], [*lines[:3], *lines[5:-2]], [lines[0]] * 9, lines[::-1], ["x"], []):
        text = "\n".join(written)
        shares = tasks.quarter_shares(task.right_steps(text, example.answers))
        assert len(shares) == 4 and all(0 <= share <= 1 for share in shares)
        assert sum(shares) / 4 == pytest.approx(task.score(text, example.answers))
    begun = tasks.quarter_shares(task.right_steps("\n".join(lines[: len(lines) // 2]), example.answers))
    assert begun[0] == pytest.approx(1.0) and begun[1] > 0.7 and begun[2] == begun[3] == 0.0


@given(st.lists(st.sampled_from("abcd"), max_size=12), st.lists(st.sampled_from("abcd"), min_size=1, max_size=9))
def test_right_lines_are_a_common_subsequence_and_none_is_longer(written, steps):
    written = written[: 4 * len(steps)]  # what stands behind is not read
    right = easy_procedures.right_lines("\n".join(written), steps)
    rest = iter(written)
    assert all(step in rest for step, kept in zip(steps, right, strict=True) if kept)  # each behind the one before

    @functools.cache
    def longest(a: int, b: int) -> int:
        if not a or not b:
            return 0
        return max(longest(a - 1, b), longest(a, b - 1), longest(a - 1, b - 1) + (written[a - 1] == steps[b - 1]))

    assert sum(right) == longest(len(written), len(steps))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 47])
def test_a_step_in_two_quarters_counts_by_its_part(count):
    for at in range(count):
        shares = tasks.quarter_shares([step == at for step in range(count)])
        low, high = at / count, (at + 1) / count
        inside = [max(0.0, min(high, (k + 1) / 4) - max(low, k / 4)) for k in range(4)]
        assert shares == pytest.approx([4 * part for part in inside])
