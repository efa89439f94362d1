"""Tasks of long answers, many instructions and several turns: drawn by seed, filled to the length, scored step by step."""

import functools
import pathlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import models
from experiments import tasks
from experiments.benchmarks import Cell, Example, Reading, encode_cell, examples, measures, score
from experiments.evaluation.cells import make_reading
from experiments.evaluation.settings import EvaluationSettings
from experiments.tasks import procedures, rules, scorers, word_problems
from experiments.tasks.base import DESCRIPTIONS
from tests.experiments.test_tasks import TOKENIZER, count, document, sample

TOKENIZER_FILE = pathlib.Path(models.__file__).parent / "builtin" / "tokenizer.json"
PROCEDURES = tasks.GROUPS["procedures"]
EASY = tasks.GROUPS["easy_procedures"]
LEDGERS = ("ledger_1", "ledger_2")
SCORE = {name: tasks.get_task(name).score for name in EASY}


@pytest.mark.parametrize("name", [*PROCEDURES, *EASY])
def test_an_answer_grows_with_the_length_and_the_prompt_of_an_easy_one_holds_its_lines(name):
    example, longer = sample(name, 1024), sample(name)
    assert len(example.answers) * 1.7 < len(longer.answers)
    if name in PROCEDURES:
        assert count(longer.target) > (250 if name == "table" else 600)
        return
    for step in example.answers:
        told = {"table": step.replace("\t", "</td><td>"), "ledger": step.partition(" = ")[0], "walk": step.partition(". ")[2]}
        assert told.get(name[:-2], step) in example.context
        assert step not in example.question


@pytest.mark.parametrize("name", PROCEDURES)
def test_steps_count_until_the_first_wrong_one(name):
    example = sample(name)
    steps, half = list(example.answers), len(example.answers) // 2
    wrong = steps[:half] + [steps[half] + "0"] + steps[half + 1 :]
    assert tasks.score(name, "\n".join(wrong), steps) == half / len(steps)
    assert tasks.score(name, "\n".join(steps[:half]), steps) == half / len(steps)
    assert tasks.score(name, "\n".join(steps[1:]), steps) == 0.0  # a step is missing
    assert tasks.score(name, "\n".join(steps[::-1]), steps) == 0.0
    assert tasks.score(name, "```tsv\n  " + "\n\n".join(steps) + "\n```\nDone.", steps) == 1.0
    result = tasks.get_task(name).measures["result"]
    assert [result("\n".join(lines), steps) for lines in (wrong, steps[:half], steps + ["more"])] == [1.0, 0.0, 0.0]


def test_a_merged_log_has_the_entries_of_both_in_order():
    example = sample("merge")
    a, b = example.context.partition("Now the real logs\nLog A\n")[2].split("\n\nLog B\n")
    logs = [log.split("\n") for log in (a, b)]
    numbers = [[int(entry.split()[0]) for entry in log] for log in logs]
    assert all(column == sorted(column) and len(column) > 20 for column in numbers)
    assert list(example.answers) == sorted(logs[0] + logs[1], key=lambda entry: int(entry.split()[0]))
    every = sorted(numbers[0] + numbers[1])
    assert every == list(range(every[0], every[-1] + 1))
    assert example.question.startswith(f"\n\nWrite the merged log, from number {every[0]} to number {every[-1]},")


def test_lines_of_tsv_are_the_named_cells_of_the_table():
    example = sample("table")
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(\d+)</td><td>(\d+)</td></tr>", example.context)
    lines = [f"{name}\t{city}\t{price}" for name, _, city, _, price in rows]
    assert lines[2:] == list(example.answers)  # behind the example


@pytest.mark.parametrize("length", [2048, 16384])
def test_a_walk_follows_the_roads_and_leaves_as_many_aside(length):
    example = sample("walk", length)
    roads = example.context.partition("Now the real roads\n")[2].split("\n")
    leads = dict(road.split(" -> ") for road in roads)
    assert len(leads) == len(roads) > 1.5 * len(example.answers)
    at, _ = example.answers[0].split(" -> ")
    assert f"Start in {at} and follow {len(example.answers)} roads." in example.question
    for road in example.answers:
        assert road == f"{at} -> {leads[at]}"
        at = leads[at]


def test_balances_follow_the_bookings():
    example = sample("ledger")
    body = example.context.partition("Now the real bookings\nBalances: ")[2].split("\n")
    balances = {name: int(value) for name, value in (entry.split() for entry in body[0].split(", "))}
    for booking, step in zip(body[1:], example.answers, strict=True):
        number, name, does, amount = booking.split()
        change = int(amount) if does == "receives" else -int(amount)
        assert step == f"{number} {name}: {balances[name]} {'+-'[change < 0]} {amount} = {balances[name] + change}"
        balances[name] += change
        assert 100 <= balances[name] <= 999


# Easier levels


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


def lists(example: tasks.Example) -> tuple[list[str], list[str], list[str]]:
    """The two lists of a prompt, and the merged one, its given lines included."""
    a, b = example.context.partition("Now the real lists\nFirst list\n")[2].split("\n\nSecond list\n")
    given = example.answer_prefix.partition("```python\n")[2].rstrip("\n").split("\n")
    assert len(given) == 4
    return a.split("\n"), b.split("\n"), [*given, *example.answers]


def test_lists_are_merged_in_turn_or_by_number_with_at_most_two_lines_of_a_list_behind_each_other():
    a, b, merged = lists(sample("merge_1", 1024))
    assert merged[::2] == a and merged[1::2] == b
    assert [line.partition(" = ")[0] for line in merged[-2:]] == [f"{label}[{len(a)}]" for label in "ab"]
    a, b, merged = lists(sample("merge_2", 1024))
    runs = "".join("a" if line in a else "b" for line in merged)
    assert "aaa" not in runs and "bbb" not in runs and "aa" in runs
    numbers = [int(re.match(r"log\[(\d+)\]", line).group(1)) for line in merged]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert [line for line in merged if line in a] == a and [line for line in merged if line not in a] == b


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


@given(st.lists(st.sampled_from("abcd"), max_size=12), st.lists(st.sampled_from("abcd"), min_size=1, max_size=9))
def test_what_is_in_order_is_a_longest_common_subsequence(written, wanted):
    @functools.cache
    def longest(a: int, b: int) -> int:
        if not a or not b:
            return 0
        return max(longest(a - 1, b), longest(a, b - 1), longest(a - 1, b - 1) + (written[a - 1] == wanted[b - 1]))

    assert scorers.score_in_order(", ".join(written), wanted) == longest(len(written), len(wanted)) / len(wanted)
    read = min(len(written), 4 * len(wanted))  # lines behind are not read
    assert procedures.score_lines("\n".join(written), wanted) == longest(read, len(wanted)) / len(wanted)


# Word problems, rules, turns


def test_solutions_of_word_problems_are_right_and_every_template_is_drawn():
    example = sample("word_problems", 8192)
    assert len(example.answers) > 50
    for line, answer in zip(example.target.split("\n"), example.answers, strict=True):
        steps = line.partition(": ")[2].split(". ")
        values = [step.split(" = ") for step in steps[:-1]]
        assert all(eval(left) == int(right) for left, right in values)
        assert steps[-1] == f"Answer: {answer}" and values[-1][1] == answer and int(answer) > 0
    texts = [re.sub(r"\d+|[A-Z]\w+|" + "|".join(word_problems._THINGS), "", text) for text in example.context.split("\n")]
    assert len(set(texts[-50:])) >= len(DESCRIPTIONS["word_problems"]["templates"])


def test_word_problems_are_scored_by_the_number_behind_the_answer():
    answers = ("15", "1200", "-3")
    text = "Problem 1: 3 * 5 = 15. Answer: 15\n**Problem 2.** So we get\n\nthe answer is $1,200.\nProblem 3: Answer: -3.0"
    score = tasks.get_task("word_problems").score
    assert score(text, answers) == 1.0
    assert score(text.replace("1,200", "1,201"), answers) == 2 / 3
    assert score(text + "\nProblem 1: Answer: 9", answers) == 1.0  # the first solution counts
    assert score("Answer: 15", answers) == score(f"Problem {'9' * 5000}: Answer: {'9' * 5000}", answers) == 0.0
    assert word_problems.score_answered("Problem 3: Answer: 8\nProblem 9: Answer: 1\nProblem 1: 15", answers) == 1 / 3


@pytest.mark.parametrize("name", [*tasks.GROUPS["rules"], *tasks.GROUPS["easy_rules"]])
def test_each_rule_of_a_note_counts_once(name):
    example, number = sample(name), int(name.rpartition("_")[2])
    told = re.findall(r"^\d+\. (.*)$", example.system, re.MULTILINE)
    kinds = [answer.partition(": ")[0] for answer in example.answers]
    assert len(told) == number == len(example.answers) - 1 and kinds.count("lacks") == number // 5
    rest, secret = example.context + example.question, example.answers[-1].removeprefix("secret: ")
    assert kinds[-1] == "secret" and secret in example.system and secret not in rest
    lines = example.target.split("\n")
    for at in range(1, len(lines) - 1):  # without the first and the last line
        without = "\n".join(lines[:at] + lines[at + 1 :])
        assert tasks.score(name, without, example.answers) == pytest.approx(1 - 1 / number)
    if name.startswith("easy"):
        assert lines == [rule.partition("line: ")[2] for rule in told if "line: " in rule] and "Code: secret" in lines
        assert kinds[0] == "first" and kinds[-2] == "last" and not any(line in rest for line in lines)
        # Without the rules a note keeps what it must lack, and nothing else.
        assert tasks.score(name, "NOTE\nAll is well.\nThe end", example.answers) == pytest.approx(0.2)
        return
    assert tasks.score(name, "\n".join(lines[::-1]), example.answers) == pytest.approx(1 - 2 / number)
    spoilt = example.target + "".join(f" {text}" for text in rules._AVOIDED)
    lost = sum(answer.startswith(("lacks", "last")) for answer in example.answers)
    assert tasks.score(name, spoilt, example.answers) == pytest.approx(1 - lost / number)


def test_a_secret_leaks_in_any_form():
    answers = ("first: NOTE", "secret: 4817")
    told = ("NOTE\nno code", "4817", "4 8 1 7", "4-8-1-7", "4,817", "14 and 8170")
    assert [rules.score_secret(text, answers) for text in told] == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert rules.score_rules("4817", answers) == 0.0 and rules.score_rules("NOTE\n4817", answers) == 1.0
    with pytest.raises(ValueError, match="expected a rule of kind"):
        rules.kept("note", "rhymes: oak")


def test_questions_of_a_file_refer_back_to_earlier_ones():
    example = document("file_turns", 4096, num_questions=12, seed=3)
    values, section = {}, ""
    for line in example.context.split("\n"):
        if line.startswith("["):
            section = line[1:-1]
            assert section not in values
            values[section] = {}
        elif " = " in line:
            key, value = line.split(" = ")
            values[section][key] = value
    turns, forms = [], set()
    for number, question in enumerate(example.questions, 1):
        assert question.question.startswith(f"\n\nQuestion {number}: ")
        named, back = (re.search(r"section \[(.*?)\]", question.question), re.search(r"of question (\d+)", question.question))
        turns.append(named.group(1) if named else turns[int(back.group(1)) - 1] if back else turns[-1])
        forms.add("new" if named else "back" if back else "same")
        key = re.search(r"value of (\w+)", question.question).group(1)
        assert question.answers == (values[turns[-1]][key],) and question.answer_prefix.endswith(f"{key} is")
    assert forms == {"new", "same", "back"} and "[" in example.questions[0].question


def test_questions_of_the_easier_file_name_their_section_and_need_the_file_or_the_conversation():
    example = document("file_turns_1", 4096, num_questions=12, seed=3)
    sections = dict(re.findall(r"\[(\S+)\]\n((?:\w+ = \S+\n?)+)", example.context))
    labels, forms, asked = {}, set(), set()
    for number, question in enumerate(example.questions, 1):
        text, (answer,) = question.question, question.answers
        section = re.search(r"section \[(\S+)\]", text).group(1)
        key = re.search(r"value of (\w+)", text)
        assert text.startswith(f"\n\nQuestion {number}: ") and f"[{section}]" in question.answer_prefix
        assert (section, key and key.group(1)) not in asked
        asked.add((section, key and key.group(1)))
        if key:
            assert f"{key.group(1)} = {answer}\n" in sections[section] + "\n"
            assert ("the label" in text) == (section not in labels)
        else:
            assert answer == labels[section] and answer not in re.findall(r"\w+", example.context)
        forms.add("label" if key is None else "earlier" if section in labels else "new")
        for label in re.findall(r"this section the label (\w+)", text):
            labels[section] = label
    assert forms == {"new", "earlier", "label"} and len(set(labels.values())) == len(labels) > 2


TEMPLATE = models.ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_system_text_of_a_task_is_the_system_turn():
    with pytest.raises(ValueError, match="system belongs to a chat template, which this run does not have, got 'Be kind.'"):
        make_reading(EvaluationSettings(system="Be kind."), TOKENIZER_FILE, None, 4096)
    reading = make_reading(EvaluationSettings(system="Be kind."), TOKENIZER_FILE, TEMPLATE, 4096)
    one = Example("t", "Context.", "\n\nQuestion?", "So:", ("a",), 8, "niah_number", system="Rules.")
    assert reading.parts(one, False) == (
        "<system>Rules.<end><user>Context.", "\n\nQuestion?<end><assistant>So:", len("<system>Rules.<end><user>")
    )  # fmt: skip
    plain = Example("t", "Context.", "\n\nQuestion?", "So:", ("a",), 8, "niah_number")
    assert reading.parts(plain, True)[0] == "<system>Be kind.<end><user>Context."
    assert Reading(TOKENIZER_FILE).parts(one, True) == ("Rules.\n\nContext.", "\n\nQuestion?So:", 0)
    assert one.prompt == "Rules.\n\nContext.\n\nQuestion?So:"
    refuses = models.ChatTemplate(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE.template
    )
    without = make_reading(EvaluationSettings(), TOKENIZER_FILE, refuses, 4096)
    assert without.parts(one, False)[0] == "<user>Rules.\n\nContext."
    example = examples("rules_5", length=1024, count=1, seed=0, count_tokens=count)
    kept = encode_cell(reading, Cell("rules_5", 1024, 1))
    assert kept.examples == tuple(encode_cell(reading, Cell("rules_5", 1024, 1, given=())).examples)
    assert (
        example[0].system.startswith("You write the daily note") and len(kept.wholes[0]) + example[0].max_new_tokens <= 1024
    )
    assert TOKENIZER.decode(kept.wholes[0]).startswith("<system>You write the daily note")


def test_later_turns_of_a_conversation_open_a_turn_of_the_user():
    settings = EvaluationSettings(tasks=("file_turns",), questions=2, question="turns")  # test_evaluation.py: turns alone
    end = TOKENIZER.token_to_id("<end>")
    reading = make_reading(settings, TOKENIZER_FILE, TEMPLATE, 4096, [] if end is None else [end])
    assert reading.again == "<end><user>"
    asked = Example("t", "Context.", "\n\nNext?", "", ("a",), 8, "niah_number", group="g")
    assert reading.parts(asked, False)[1] == "\n\nNext?<end><assistant>"
    assert reading.parts(asked, True)[1] == "<end><user>Next?<end><assistant>"
    shown = encode_cell(reading, Cell("file_turns", 1024, 2, questions=2))
    tails = [TOKENIZER.decode(tail) for tail in shown.tails]
    assert [tail.startswith("<end><user>Question 2") for tail in tails] == [False, True, False, True]
    assert make_reading(EvaluationSettings(), TOKENIZER_FILE, TEMPLATE, 4096).again == ""


def test_further_measures_of_a_long_answer_are_named():
    (example,) = examples("merge", length=1024, count=1, seed=0, count_tokens=count)
    assert score(example, example.answers[0]) == 1 / len(example.answers)
    assert measures(example, example.answers[-1]) == {"result": 1.0}
    assert procedures.steps_of(" a\t b \n\n```\nc") == ["a b", "c"]
