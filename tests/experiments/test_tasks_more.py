"""Answers of the suites' tasks, by an independent reading of the text; questions from files; scorers."""

import collections
import itertools
import json
import math
import re
import statistics

import pytest

from experiments import tasks
from experiments.tasks import PROMPTS, lists, qa, ruler, words
from tests.experiments.test_tasks import count, document, documents, match, request, sample

# RULER: needles and variables


def test_values_come_in_the_order_of_the_text_or_of_the_query():
    for seed in range(5):
        one = sample("niah_multivalue", 1024, seed)
        places = [one.context.index(f"is: {value}.") for value in one.answers]
        assert len(places) == 4 and places == sorted(places)
        assert one.target == " {}, {}, {}, and {}.".format(*one.answers)
    one = sample("niah_multiquery", 1024)
    asked = re.search(r"for (.*) mentioned", one.question).group(1).replace("and ", "").split(", ")
    for key, value in zip(asked, one.answers, strict=True):
        assert f"One of the special magic numbers for {key} is: {value}." in one.context


def test_singular_form_rewrites_every_are():
    plural = "Some x are all y. You are a helpful assistant"
    assert ruler.singular_form(plural) == "A x is y. You is a helpful assistant"


def test_the_chain_of_vt_is_in_order_behind_an_example():
    one, header = sample("vt", 1024), PROMPTS["vt"].context.format(context="")
    assert one.context.count(header) == 2 and sample("vt", 512).context.count(header) == 1
    example = one.context[: one.context.rindex(header)]
    assert re.search(r"they are: (?:[A-Z]{3} ){4}[A-Z]{3}\n\n$", example)
    (value,) = re.findall(r"value (\d{5}) in", one.question)
    places = [one.context.index(f"VAR {one.answers[0]} = {value}")]
    places += [one.context.index(f"VAR {b} = VAR {a}") for a, b in itertools.pairwise(one.answers)]
    assert places == sorted(places) and len(places) == 5


# RULER: common and frequent words


@pytest.mark.parametrize(("length", "often", "seldom"), [(2048, 6, 1), (8192, 30, 3)])
def test_the_ten_commonest_words_of_cwe_are_the_answers(length, often, seldom):
    one = sample("cwe", length)
    _, example, body = one.context.split(PROMPTS["cwe"].context.format(context=""))
    numbered = re.findall(r"(\d+)\. (\S+)", body)
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    assert body == " ".join(f"{number}. {word}" for number, word in numbered)
    counts = collections.Counter(word for _, word in numbered)
    assert {word for word, _ in counts.most_common(10)} == set(one.answers)
    assert collections.Counter(counts.values()) == {often: 10, seldom: len(counts) - 10}
    # The one-shot example: 20 words 3 times or once, or 40 words 10 times or 3 times, then its answer.
    shown, answer = example.split(one.question + one.answer_prefix)
    counts = collections.Counter(re.findall(r"\d+\. (\S+)", shown))
    assert collections.Counter(counts.values()) == ({3: 10, 1: 10} if often == 6 else {10: 10, 3: 30})
    common = re.findall(r" \d+\. (\S+)", answer)
    assert answer == "".join(f" {i}. {word}" for i, word in enumerate(common, 1)) + "\n"
    assert {word for word, _ in counts.most_common(10)} == set(common)


def test_cwe_refuses_a_length_that_its_words_cannot_fill(monkeypatch):
    monkeypatch.setattr(ruler, "every_word", lambda: tuple(f"word{letter}" for letter in "abcdefghijklmnopqrst"))
    with pytest.raises(ValueError, match="length 2048 is more than the 20 words"):
        sample("cwe", 2048)


@pytest.mark.parametrize("length", [1024, 8192])
def test_the_words_of_fwe_follow_the_zeta_law(length):
    one = sample("fwe", length)
    body = one.context.removeprefix(PROMPTS["fwe"].context.format(context=""))
    ranked = collections.Counter(body.split(" ")).most_common()
    assert ranked[0][0] == "..."
    assert {word for word, _ in ranked[1:4]} == set(one.answers)
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])
    assert ranked[3][1] > ranked[4][1]
    for rank, (_, number) in enumerate(ranked[:6], start=1):
        assert number == pytest.approx(ranked[0][1] / rank**2, abs=1)
    # 1000 / 1.6449 = 607.9, then a quarter, a ninth and a sixteenth of it, rounded down
    assert ruler.zeta_counts(1000, 4) == [607, 151, 67, 37]
    with pytest.raises(ValueError, match="too short: the words of rank 4 and 5"):
        sample("fwe", 180)


# RULER: question answering


@pytest.fixture
def squad(tmp_path):
    """A file of 12 articles of four paragraphs, each with a question that can be answered and one that cannot."""

    def paragraph(article, number):
        answers = [{"text": f"{number} miles"}, {"text": f"{number} miles"}, {"text": f"{number} mi"}]
        asked = {"question": f"How long is the river of {article} {number}?", "answers": answers, "is_impossible": False}
        text = f"Paragraph {number} of {article}. " + f"The river of {article} {number} is {number} miles long. " * 3
        return {"context": text, "qas": [asked, {"answers": [], "is_impossible": True, "question": "What is its name?"}]}

    articles = [{"paragraphs": [paragraph(f"land{index}", 10 + number) for number in range(4)]} for index in range(12)]
    (tmp_path / "squad.json").write_text(json.dumps({"version": "v2.0", "data": articles}))
    return f"file:{tmp_path / 'squad.json'}"


@pytest.fixture
def hotpot(tmp_path):
    """A file of 20 questions with three documents each."""

    def text(index, part):
        return [f"Title {index}-{part}", [f"Picture {index} hangs in room {part}.", f" Painter {index} painted it."]]

    questions = [
        {"question": f"Who painted picture {i}?", "answer": f"Painter {i}", "context": [text(i, part) for part in range(3)]}
        for i in range(20)
    ]
    (tmp_path / "hotpot.json").write_text(json.dumps(questions))
    return f"file:{tmp_path / 'hotpot.json'}"


INSTRUCTION = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


def read_documents(context: str) -> list[str]:
    header = INSTRUCTION + "\n\nThe following are given documents.\n\n"
    assert context.startswith(header)
    parts = re.split(r"(?:^|\n\n)Document (\d+):\n", context.removeprefix(header))
    assert parts[0] == "" and [int(number) for number in parts[1::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[2::2]


def test_qa_1_asks_squads_questions_in_order(squad):
    drawn = documents("qa_1", 1500, 6, haystack=squad)
    for index, one in enumerate(drawn):
        article, number = f"land{index // 4}", 10 + index % 4
        (asked,) = one.questions
        query = f"How long is the river of {article} {number}?"
        assert asked.question == f"\n\n{INSTRUCTION}\n\nQuestion: {query}" and asked.answer_prefix == " Answer:"
        assert asked.answers == (f"{number} miles", f"{number} mi")
        shown = read_documents(one.context)
        assert len(shown) == len(set(shown)) > 5
        # all of the article come before any other is taken
        assert sum(text.startswith("Paragraph") and f" of {article}." in text for text in shown) == 4
        assert 1500 - 80 < count(one.samples()[0].prompt) + 32 <= 1500 and one.max_new_tokens == 32
    assert documents("qa_1", 1500, 3, haystack=squad) == drawn[:3]
    other = document("qa_1", 1500, 1, haystack=squad)
    assert other.questions == drawn[0].questions and other.context != drawn[0].context


def test_qa_1_takes_a_depth_and_many_questions(squad):
    for depth, place in ((0.0, 0), (1.0, -1)):
        one = sample("qa_1", 1500, haystack=squad, depth=depth)
        assert read_documents(one.context)[place].startswith("Paragraph 10 of land0.")
    one = document("qa_1", 1500, haystack=squad, num_questions=6)
    shown = read_documents(one.context)
    assert len({q.question for q in one.questions}) == 6
    for asked in one.questions:
        article, number = re.search(r"of (land\d+) (\d+)\?", asked.question).groups()
        assert sum(text.startswith(f"Paragraph {number} of {article}.") for text in shown) == 1
    drawn = {tasks.make_document(request("qa_1", 600, squad, seed)).questions for seed in range(8)}
    assert len(drawn) > 2  # without an index, any of the questions


def test_qa_2_reads_hotpotqa(hotpot):
    one = sample("qa_2", 1024, haystack=hotpot)
    shown = read_documents(one.context)
    assert one.question.endswith("\n\nQuestion: Who painted picture 0?") and one.answers == ("Painter 0",)
    for part in range(3):
        assert f"Title 0-{part}\nPicture 0 hangs in room {part}. Painter 0 painted it." in shown
    assert len(shown) == len(set(shown)) and 900 < count(one.prompt) + 32 <= 1024
    shown = read_documents(sample("qa_2", 4096, haystack=hotpot).context)  # others repeat, its own do not
    assert len(shown) > 60 and sum(text.startswith("Title 0-") for text in shown) == 3


def test_qa_says_what_file_it_wants(tmp_path, squad, hotpot):
    def refuses(kind, message, name, source, **options):
        with pytest.raises(kind, match=message):
            document(name, haystack=source, **options)

    refuses(ValueError, "SQuAD v2 JSON.*expected haystack 'file:PATH', got None", "qa_1", None)
    refuses(ValueError, "HotpotQA.*got 'prose'", "qa_2", "prose")
    refuses(FileNotFoundError, "question file not found", "qa_1", f"file:{tmp_path / 'none.json'}")
    refuses(ValueError, "not in the expected format, SQuAD", "qa_1", hotpot)
    refuses(ValueError, "not in the expected format, HotpotQA", "qa_2", squad)
    refuses(ValueError, "the file has 20 questions, got num_questions 21", "qa_2", hotpot, num_questions=21)
    file = tmp_path / "absent.json"
    for text, message in (("no JSON", "not in the expected format"), ("[]", "no question that can be answered")):
        file.write_text(text)
        refuses(ValueError, message, "qa_2", f"file:{file}")
    for answer in ("", " ", None, math.nan, "nan", [], True):
        file.write_text(json.dumps([{"question": "Who?", "answer": answer, "context": [["T", ["a."]]]}]))
        refuses(ValueError, "absent.json is not .*question 'Who.': expected a", "qa_2", f"file:{file}")
    assert set(qa.FORMATS) == {tasks.TASKS[name].haystack for name in ("qa_1", "qa_2")}


# InfiniteBench


def test_kv_retrieval_is_json():
    one = sample("kv_retrieval")
    pairs = json.loads(one.context.partition("JSON data:\n")[2])
    assert [pairs[key] for key in match('\n\nKey: "%"', one.question)] == list(one.answers)


def asked_number(kind: str, numbers: list[int]) -> float:
    if kind == "median number":
        return statistics.median(numbers)
    rank = kind.startswith("second") + 2 * kind.startswith("third")
    return sorted(set(numbers), reverse="largest" in kind)[rank]


def test_math_find_asks_for_every_rank_of_one_list_or_in_the_suites_form_for_one():
    kinds = set()
    for seed in range(30):
        one = sample("math_find", 600, seed)
        kind = re.search(r"The (.+) of the list is: $", one.answer_prefix).group(1)
        header, numbers = re.fullmatch(r"(.*)\n\n(\[.*\])", one.context).groups()
        assert header == f"What is the {kind} in the following list?"
        assert one.question == "\n\nYou should answer with only one number, no other words."
        numbers = json.loads(numbers)
        assert min(numbers) >= 0 and max(numbers) <= 99 and len(numbers) > 100
        assert float(one.answers[0]) == asked_number(kind, numbers)
        kinds.add(kind)
    assert kinds == set(lists.MATH_KINDS)
    shared = document("math_find", 1024, num_questions=7)
    for asked in shared.questions:
        kind = re.search(r"The (.+) of the list is: $", asked.answer_prefix).group(1)
        assert asked.question.startswith(f"\n\nWhat is the {kind} in the following list?\n\nYou should")
        assert float(asked.answers[0]) == asked_number(kind, json.loads(shared.context))
    assert len({asked.answer_prefix for asked in shared.questions}) == 7
    with pytest.raises(ValueError, match="has 2 different numbers, the third largest number needs 3"):
        lists.special_number("third largest number", [1, 2, 2])


# Shared contexts


def test_prefix_and_suffix_name_one_string():
    one = document("prefix_suffix", 4096, num_questions=6)
    lines = one.context.partition("\n\n")[2].split("\n")
    alone = 0
    for asked in one.questions:
        prefix, suffix = re.findall('"([a-z]{4})"', asked.question)
        assert [x for x in lines if x.startswith(prefix) and x.endswith(suffix)] == [*asked.answers]
        alone += sum(x.startswith(prefix) for x in lines) == 1 or sum(x.endswith(suffix) for x in lines) == 1
    assert alone <= 2  # nearly always neither part is enough
    assert len({(line[:4], line[-4:]) for line in lines}) == len(lines)


def test_labels_of_many_shot_follow_from_the_nearest_examples():
    one = document("many_shot", 2048, num_questions=8)
    shots = {int(n): label for n, label in re.findall(r"Number: (\d{5})\nLabel: (\w+)", one.context)}
    assert len(set(shots.values())) == 3
    assert len(list(itertools.groupby(shots[number] for number in sorted(shots)))) == 3  # two thresholds
    for asked in one.questions:
        number = int(re.fullmatch(r"\n\nNumber: (\d{5})", asked.question).group(1))
        assert number not in shots and words.held_out(str(number))
        below, above = max(x for x in shots if x < number), min(x for x in shots if x > number)
        assert asked.answers == (shots[below],) == (shots[above],)


# Long generation


@pytest.mark.parametrize("questions", [1, 3])
def test_listing_asks_for_values_in_the_order_of_the_text(questions):
    one = document("listing", 4096, num_questions=questions)
    records = re.findall(r"Record of (\S+): the value of (\S+) is (\S+)\.", one.context)
    assert len({key for _, key, _ in records}) == len({value for _, _, value in records}) == len(records)
    for asked in one.questions:
        name = re.search(r"the records of (\S+), in the order", asked.question).group(1)
        assert asked.answers == tuple(value for owner, _, value in records if owner == name)
        assert asked.answer_prefix == f" The values in the records of {name}, in order, are:"
        assert count(asked.target) < one.max_new_tokens
    assert sum(len(asked.answers) for asked in one.questions) == len(records)


def test_listing_fills_its_share_up_to_its_most():
    for length in (2048, 8192):
        one = document("listing", length)
        assert 0.2 * length < count(one.questions[0].target) < one.max_new_tokens <= 0.25 * length
