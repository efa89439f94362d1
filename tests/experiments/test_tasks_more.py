"""The tasks beyond retrieval: answers by an independent reading of the text, prompts word for word, groups, files."""

from __future__ import annotations

import collections
import itertools
import json
import math
import pathlib
import random
import re
import statistics

import pytest
from tokenizers import Tokenizer

import models
from experiments import tasks
from experiments.tasks import base, listing, math_find, qa_data, ruler_words, scorers, splits, words

TOKENIZER = Tokenizer.from_file(str(pathlib.Path(models.__file__).parent / "builtin" / "tokenizer.json"))
TRAINED = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "passkey", "number_string", "kv_retrieval",
)  # fmt: skip
SHARED = [name for name in tasks.TASKS if tasks.TASKS[name].max_questions != 1 and not tasks.TASKS[name].needs_file]


def count(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False).ids)


def document(name: str, length: int = 1024, seed: int = 0, **options) -> tasks.Document:
    return tasks.make_documents(name, length=length, count=1, seed=seed, count_tokens=count, **options)[0]


def sample(name: str, length: int = 1024, seed: int = 0, **options) -> tasks.Sample:
    return document(name, length, seed, **options).samples()[0]


# Groups


def test_the_trained_tasks_and_their_indices_stay():
    assert tasks.GROUPS["trained"] == TRAINED


def test_groups_name_their_tasks():
    groups = tasks.GROUPS
    assert groups["ruler"] == (*TRAINED[:9], "cwe", "fwe", "qa_1", "qa_2")
    assert groups["infinitebench"] == ("passkey", "number_string", "kv_retrieval", "math_find")
    assert groups["all"] == tuple(tasks.TASKS) and len(groups["all"]) == 47
    assert set(groups["all"]) - set(groups["generated"]) == {"qa_1", "qa_2", *groups["code"], *groups["long"]}
    assert {*groups["procedures"], *groups["rules"], *groups["easy_rules"]} < set(groups["long"])
    assert all(tasks.TASKS[name].max_questions != 1 for name in groups["shared"])
    assert not set(groups) & set(tasks.TASKS)  # a name means one thing


def test_groups_expand_to_tasks_without_repeats():
    assert tasks.expand(["trained"]) == TRAINED
    assert tasks.expand(["listing", "infinitebench", "passkey", "vt"]) == (
        "listing", "passkey", "number_string", "kv_retrieval", "math_find", "vt",
    )  # fmt: skip
    assert tasks.expand([]) == ()
    with pytest.raises(ValueError, match="unknown task 'rulr', did you mean 'ruler'"):
        tasks.expand(["vt", "rulr"])
    with pytest.raises(ValueError, match="did you mean 'math_find'"):
        tasks.expand(["maths_find"])


# Every task


@pytest.mark.parametrize("name", SHARED)
def test_many_questions_share_one_context(name):
    length = 8192 if name in tasks.GROUPS["code"] else 2048  # a kilobyte of code may define one function
    made = document(name, length, num_questions=5)
    assert len(made.questions) == 5 and len({q.question + q.answer_prefix for q in made.questions}) == 5
    for one in made.samples():
        assert one.context == made.context
        assert tasks.score(name, one.target, one.answers) == 1.0
        assert count(one.prompt) + one.max_new_tokens <= length
    assert made == document(name, length, num_questions=5)
    stack = tasks.haystack_for(name, None, count, "train")
    trained = tasks.make_document(
        name, random.Random(0), length, count, stack, words.Words("train"), num_questions=5, training=True
    )
    total = count(trained.context) + sum(
        count(q.question + q.answer_prefix) + count(q.target) + 1 for q in trained.questions
    )
    assert length - 250 < total <= length


@pytest.mark.parametrize("name", ["cwe", "fwe", "passkey", "number_string"])
def test_tasks_of_one_question_say_so(name):
    with pytest.raises(ValueError, match=f"{name} takes one question about a context, got num_questions 2"):
        document(name, num_questions=2)


@pytest.mark.parametrize("name", [name for name in tasks.TASKS if not tasks.TASKS[name].takes_depth])
def test_tasks_without_a_place_take_no_depth(name):
    stack = tasks.haystack_for("vt", None, count, "eval")
    with pytest.raises(ValueError, match=f"{name} takes no depth"):
        tasks.make_document(name, random.Random(0), 1024, count, stack, words.Words("eval"), depth=0.5)


@pytest.mark.parametrize("name", ["kv_retrieval", "prefix_suffix"])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_answer_lies_at_the_depth_of_a_list(name, depth):
    made = sample(name, 4096, depth=depth)
    parts = made.context.split(", " if name == "kv_retrieval" else "\n")
    place = next(i for i, part in enumerate(parts) if made.answers[0] in part)
    assert abs(place / len(parts) - depth) < 0.1


# RULER: common and frequent words


@pytest.mark.parametrize(("length", "often", "seldom"), [(2048, 6, 1), (8192, 30, 3)])
def test_the_ten_commonest_words_of_cwe_are_the_answers(length, often, seldom):
    made = sample("cwe", length)
    header = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )
    question = "\nQuestion: What are the 10 most common words in the above list?"
    prefix = " Answer: The top 10 words that appear most often in the list are:"
    assert (made.question, made.answer_prefix) == (question, prefix)
    _, example, body = made.context.split(header)
    numbered = re.findall(r"(\d+)\. (\S+)", body)
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    assert body == " ".join(f"{number}. {word}" for number, word in numbered)
    counts = collections.Counter(word for _, word in numbered)
    assert {word for word, _ in counts.most_common(10)} == set(made.answers)
    assert collections.Counter(counts.values()) == {often: 10, seldom: len(counts) - 10}
    assert made.max_new_tokens == 120
    # The one-shot example: 20 words 3 times or once, or 40 words 10 times or 3 times, then its answer.
    shown, answer = example.split(question + prefix)
    counts = collections.Counter(re.findall(r"\d+\. (\S+)", shown))
    assert collections.Counter(counts.values()) == ({3: 10, 1: 10} if often == 6 else {10: 10, 3: 30})
    common = [word for word in re.findall(r" \d+\. (\S+)", answer)]
    assert answer == "".join(f" {i}. {word}" for i, word in enumerate(common, 1)) + "\n"
    assert {word for word, _ in counts.most_common(10)} == set(common)


def test_cwe_refuses_a_length_that_its_words_cannot_fill(monkeypatch):
    monkeypatch.setattr(ruler_words, "every_word", lambda: tuple(f"word{letter}" for letter in "abcdefghijklmnopqrst"))
    with pytest.raises(ValueError, match="length 2048 is more than the 20 words"):
        sample("cwe", 2048)
    with pytest.raises(ValueError, match="too short"):
        sample("cwe", 300)


@pytest.mark.parametrize("length", [1024, 8192])
def test_the_words_of_fwe_follow_the_zeta_law(length):
    made = sample("fwe", length)
    header = (
        "Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words. "
    )
    assert made.question == (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?"
    )
    assert made.answer_prefix == (
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )
    ranked = collections.Counter(made.context.removeprefix(header).split(" ")).most_common()
    assert ranked[0][0] == "..."
    assert {word for word, _ in ranked[1:4]} == set(made.answers)
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])
    assert ranked[3][1] > ranked[4][1]
    counts = [number for _, number in ranked]
    total = counts[0] * math.pi**2 / 6  # a little below the words asked for: rounded down
    for rank, number in enumerate(counts[:6], start=1):
        assert number == pytest.approx(total / (math.pi**2 / 6) / rank**2, abs=1)


def test_zeta_counts_are_rounded_down():
    # 1000 / 1.6449 = 607.9, then a quarter, a ninth and a sixteenth of it, rounded down
    assert ruler_words.zeta_counts(1000, 4) == [607, 151, 67, 37]
    with pytest.raises(ValueError, match="too short"):
        sample("fwe", 180)


# RULER: question answering


def squad(tmp_path: pathlib.Path) -> str:
    def paragraph(article, number):
        text = f"Paragraph {number} of {article}. " + f"The river of {article} {number} is {number} miles long. " * 3
        answers = [{"text": f"{number} miles", "answer_start": 0}, {"text": f"{number} miles", "answer_start": 0}]
        asked = {"question": f"How long is the river of {article} {number}?", "id": f"{article}{number}"}
        return {
            "context": text,
            "qas": [
                asked | {"answers": [*answers, {"text": f"{number} mi", "answer_start": 3}], "is_impossible": False},
                asked | {"answers": [], "is_impossible": True, "question": "What is its name?"},
            ],
        }

    articles = [
        {"title": name, "paragraphs": [paragraph(name, 10 + number) for number in range(4)]}
        for name in (f"land{index}" for index in range(12))
    ]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"version": "v2.0", "data": articles}))
    return f"file:{path}"


def hotpot(tmp_path: pathlib.Path) -> str:
    questions = [
        {
            "_id": str(index),
            "question": f"Who painted picture {index}?",
            "answer": f"Painter {index}",
            "supporting_facts": [[f"Title {index}-0", 0]],
            "context": [
                [f"Title {index}-{part}", [f"Picture {index} hangs in room {part}.", f" Painter {index} painted it."]]
                for part in range(3)
            ],
            "type": "bridge",
            "level": "hard",
        }
        for index in range(20)
    ]
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps(questions))
    return f"file:{path}"


INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)


def read_documents(context: str) -> list[str]:
    header = INSTRUCTION + "\n\nThe following are given documents.\n\n"
    assert context.startswith(header)
    parts = re.split(r"(?:^|\n\n)Document (\d+):\n", context.removeprefix(header))
    assert parts[0] == "" and [int(number) for number in parts[1::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[2::2]


def test_qa_1_asks_squads_questions_in_order(tmp_path):
    source = squad(tmp_path)
    made = tasks.make_documents("qa_1", length=1500, count=6, seed=0, count_tokens=count, haystack=source)
    for index, one in enumerate(made):
        article, number = f"land{index // 4}", 10 + index % 4
        (asked,) = one.questions
        query = f"How long is the river of {article} {number}?"
        assert asked.question == f"\n\n{INSTRUCTION}\n\nQuestion: {query}" and asked.answer_prefix == " Answer:"
        assert asked.answers == (f"{number} miles", f"{number} mi")
        shown = read_documents(one.context)
        assert len(shown) == len(set(shown)) > 5
        # all of the article come before any other is taken
        assert sum(text.startswith("Paragraph") and f" of {article}." in text for text in shown) == 4
        assert 1500 - 80 < count(one.samples()[0].prompt) + 32 <= 1500
    assert one.max_new_tokens == 32
    again = tasks.make_documents("qa_1", length=1500, count=3, seed=0, count_tokens=count, haystack=source)
    assert again == made[:3]
    other = tasks.make_documents("qa_1", length=1500, count=1, seed=1, count_tokens=count, haystack=source)[0]
    assert other.questions == made[0].questions and other.context != made[0].context


def test_qa_1_takes_a_depth_and_many_questions(tmp_path):
    source = squad(tmp_path)
    for depth, place in ((0.0, 0), (1.0, -1)):
        made = sample("qa_1", 1500, haystack=source, depth=depth)
        assert read_documents(made.context)[place].startswith("Paragraph 10 of land0.")
    made = document("qa_1", 1500, haystack=source, num_questions=6)
    shown = read_documents(made.context)
    assert len({q.question for q in made.questions}) == 6
    for asked in made.questions:
        article, number = re.search(r"of (land\d+) (\d+)\?", asked.question).groups()
        assert sum(text.startswith(f"Paragraph {number} of {article}.") for text in shown) == 1
    stack = tasks.haystack_for("qa_1", source, count, "eval")
    drawn = {
        tasks.make_document("qa_1", random.Random(seed), 600, count, stack, words.Words("eval")).questions
        for seed in range(8)
    }
    assert len(drawn) > 2  # without an index, any of the questions


def test_qa_2_reads_hotpotqa(tmp_path):
    made = sample("qa_2", 1024, haystack=hotpot(tmp_path))
    shown = read_documents(made.context)
    assert made.question.endswith("\n\nQuestion: Who painted picture 0?") and made.answers == ("Painter 0",)
    for part in range(3):
        assert f"Title 0-{part}\nPicture 0 hangs in room {part}. Painter 0 painted it." in shown
    assert len(shown) == len(set(shown)) and 900 < count(made.prompt) + 32 <= 1024
    long = sample("qa_2", 4096, haystack=hotpot(tmp_path))  # more than the file holds: others repeat, its own do not
    shown = read_documents(long.context)
    assert len(shown) > 60 and sum(text.startswith("Title 0-") for text in shown) == 3


def test_qa_says_what_file_it_wants(tmp_path):
    with pytest.raises(ValueError, match="SQuAD v2 JSON.*expected haystack 'file:PATH', got None"):
        document("qa_1")
    with pytest.raises(ValueError, match="HotpotQA.*got 'prose'"):
        document("qa_2", haystack="prose")
    with pytest.raises(FileNotFoundError, match="question file not found"):
        document("qa_1", haystack=f"file:{tmp_path / 'none.json'}")
    for name, source, kind in (("qa_1", hotpot(tmp_path), "SQuAD"), ("qa_2", squad(tmp_path), "HotpotQA")):
        with pytest.raises(ValueError, match=f"not in the expected format, {kind}"):
            document(name, haystack=source)
    (tmp_path / "text.txt").write_text("no JSON")
    with pytest.raises(ValueError, match="not in the expected format"):
        document("qa_1", haystack=f"file:{tmp_path / 'text.txt'}")
    (tmp_path / "empty.json").write_text("[]")
    with pytest.raises(ValueError, match="no question that can be answered"):
        document("qa_2", haystack=f"file:{tmp_path / 'empty.json'}")
    for answer in ("", " ", None, math.nan, "nan", [], True):
        item = {"question": "Who?", "answer": answer, "context": [["T", ["a."]]]}
        (tmp_path / "absent.json").write_text(json.dumps([item]))
        with pytest.raises(ValueError, match="absent.json is not in the expected format.*question 'Who.': expected a"):
            document("qa_2", haystack=f"file:{tmp_path / 'absent.json'}")
    with pytest.raises(ValueError, match="the file has 20 questions, got num_questions 21"):
        document("qa_2", haystack=hotpot(tmp_path), num_questions=21)
    assert set(qa_data.FORMATS) == {tasks.TASKS[name].haystack for name in ("qa_1", "qa_2")}


# InfiniteBench: math_find


def asked_number(kind: str, numbers: list[int]) -> float:
    if kind == "median number":
        return statistics.median(numbers)
    ordered = sorted(set(numbers))
    return ordered[
        {
            "largest number": -1, "second largest number": -2, "third largest number": -3,
            "smallest number": 0, "second smallest number": 1, "third smallest number": 2,
        }[kind]
    ]  # fmt: skip


def test_math_find_prompt_and_answer():
    kinds = set()
    for seed in range(30):
        made = sample("math_find", 600, seed)
        kind = re.search(r"The (.+) of the list is: $", made.answer_prefix).group(1)
        header, numbers = re.fullmatch(r"(.*)\n\n(\[.*\])", made.context).groups()
        assert header == f"What is the {kind} in the following list?"
        assert made.prompt.endswith(
            f"]\n\nYou should answer with only one number, no other words. The {kind} of the list is: "
        )
        numbers = json.loads(numbers)
        assert min(numbers) >= 0 and max(numbers) <= 99 and len(numbers) > 100
        assert float(made.answers[0]) == asked_number(kind, numbers)
        kinds.add(kind)
    assert kinds == set(math_find.MATH_KINDS)


def test_math_find_asks_all_of_one_list():
    made = document("math_find", 1024, num_questions=7)
    numbers = json.loads(made.context)
    for asked in made.questions:
        kind = re.search(r"The (.+) of the list is: $", asked.answer_prefix).group(1)
        assert asked.question.startswith(f"\n\nWhat is the {kind} in the following list?\n\nYou should")
        assert float(asked.answers[0]) == asked_number(kind, numbers)
    assert len({asked.answer_prefix for asked in made.questions}) == 7
    with pytest.raises(ValueError, match="at most 7 questions"):
        document("math_find", num_questions=8)


def test_special_numbers_are_largest_smallest_and_median():
    numbers = [5, 9, 9, 1, 1, 7]
    found = {kind: math_find.special_number(kind, numbers) for kind in math_find.MATH_KINDS}
    assert found == {
        "largest number": "9", "second largest number": "7", "third largest number": "5",
        "smallest number": "1", "second smallest number": "5", "third smallest number": "7", "median number": "6",
    }  # fmt: skip
    assert math_find.special_number("median number", [1, 2]) == "1.5"
    with pytest.raises(ValueError, match="has 2 different numbers, the third largest number needs 3"):
        math_find.special_number("third largest number", [1, 2, 2])


# Shared contexts


def test_prefix_and_suffix_name_one_string():
    made = document("prefix_suffix", 4096, num_questions=6)
    header = (
        "Below is a list of strings, one in each line. Memorize all of them. "
        "I will give you the prefix and the suffix of one of them and ask for the whole string.\n\n"
    )
    assert made.context.startswith(header)
    lines = made.context.removeprefix(header).split("\n")
    alone = 0
    for asked in made.questions:
        pattern = r'\n\nWhich string of the list has the prefix "([a-z]{4})" and the suffix "([a-z]{4})"\?'
        prefix, suffix = re.fullmatch(pattern, asked.question).groups()
        assert [x for x in lines if x.startswith(prefix) and x.endswith(suffix)] == [*asked.answers]
        alone += sum(x.startswith(prefix) for x in lines) == 1 or sum(x.endswith(suffix) for x in lines) == 1
        assert asked.answer_prefix == "\nThe string is:"
    assert alone <= 2  # nearly always neither part is enough
    pairs = {(line[:4], line[-4:]) for line in lines}
    assert len(pairs) == len(lines)


def test_labels_of_many_shot_follow_from_the_nearest_examples():
    made = document("many_shot", 2048, num_questions=8)
    shots = {int(n): label for n, label in re.findall(r"Number: (\d{5})\nLabel: (\w+)", made.context)}
    assert len(set(shots.values())) == 3
    ordered = [shots[number] for number in sorted(shots)]
    assert len(list(itertools.groupby(ordered))) == 3  # two thresholds
    for asked in made.questions:
        number = int(re.fullmatch(r"\n\nNumber: (\d{5})", asked.question).group(1))
        assert number not in shots and splits.held_out(str(number))
        below, above = max(x for x in shots if x < number), min(x for x in shots if x > number)
        assert asked.answers == (shots[below],) == (shots[above],)


# Long generation


@pytest.mark.parametrize("questions", [1, 3])
def test_listing_asks_for_values_in_the_order_of_the_text(questions):
    made = document("listing", 4096, num_questions=questions)
    records = re.findall(r"Record of (\S+): the value of (\S+) is (\S+)\.", made.context)
    assert len({key for _, key, _ in records}) == len({value for _, _, value in records}) == len(records)
    for asked in made.questions:
        name = re.search(r"the records of (\S+), in the order", asked.question).group(1)
        assert asked.answers == tuple(value for owner, _, value in records if owner == name)
        assert asked.answer_prefix == f" The values in the records of {name}, in order, are:"
        assert count(asked.target) < made.max_new_tokens
    assert sum(len(asked.answers) for asked in made.questions) == len(records)


def test_listing_fills_its_share_up_to_its_most():
    for length in (2048, 8192):
        made = document("listing", length)
        assert 0.2 * length < count(made.questions[0].target) < made.max_new_tokens <= 0.25 * length
    stack = tasks.haystack_for("listing", "noise", count, "eval")
    request = base.Request(random.Random(0), 4096, count, stack, words.Words("eval"), None, 1, False)
    made = listing.listing(listing.ListingSpec("listing", values="numbers", most=300), request)
    assert 250 < made.max_new_tokens <= 301 and all(re.fullmatch(r"\d{7}", a) for a in made.questions[0].answers)
    with pytest.raises(ValueError, match="0 records fit, 1 questions need one each"):
        document("listing", 100)


# Scorers


def test_scorers_find_answers_numbers_and_words():
    assert scorers.score_any("It is the Nile.", ("Amazon", "nile")) == 1.0
    assert scorers.score_any("It is the Rhine.", ("Amazon", "nile")) == 0.0
    number = scorers.score_first_number
    assert number(" 45.5 is it", ("45.5",)) == number("45.0", ("45",)) == number("The answer: 45, not 46", ("45",)) == 1
    assert number("45", ("45.5",)) == number("4 5", ("45",)) == number("none", ("45",)) == 0
    word = scorers.score_first_word
    assert word(" Walnut, surely", ("walnut",)) == 1.0
    assert word("not walnut", ("walnut",)) == word("walnuts", ("walnut",)) == word("", ("walnut",)) == 0.0


def test_order_of_a_list_counts():
    score = listing.score_in_order
    four = ("a-1", "b-2", "c-3", "d-4")
    assert score("1. a-1\n2. b-2\n3. c-3, d-4.", four) == 1.0
    assert score("A-1, c-3, x-9, d-4", four) == 0.75  # one left out
    assert score("d-4, a-1, b-2, c-3", four) == 0.75  # one out of place
    assert score("d-4, c-3, b-2, a-1", four) == 0.25  # backwards
    assert score("a-1 a-1 a-1", four) == 0.25 and score("", four) == 0.0 and score("a-12, ba-1", four) == 0.0
    assert score("7, 7, 8", ("7", "8", "7")) == pytest.approx(2 / 3)  # equal values
    rng = random.Random(0)
    for _ in range(50):  # against the table that defines it
        x, y = ([rng.choice("pqrs") for _ in range(rng.randint(1, 9))] for _ in range(2))
        table = [[0] * (len(y) + 1) for _ in range(len(x) + 1)]
        for i, j in itertools.product(range(len(x)), range(len(y))):
            table[i + 1][j + 1] = table[i][j] + 1 if x[i] == y[j] else max(table[i][j + 1], table[i + 1][j])
        assert score(", ".join(x), y) == table[-1][-1] / len(y)
