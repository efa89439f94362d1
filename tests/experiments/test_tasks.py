"""Laws of all tasks: the seed decides, the length is filled, the right answer scores 1, places, prompts word for word."""

import hashlib
import json
import pathlib
import random
import re

import pytest
from tokenizers import Tokenizer

import models
from experiments import tasks
from experiments.tasks import haystack, ruler, words

TOKENIZER = Tokenizer.from_file(str(pathlib.Path(models.__file__).parent / "builtin" / "tokenizer.json"))
GENERATED, CODE, LONG, UNDERSTANDING = (tasks.GROUPS[name] for name in ("generated", "code", "long", "understanding"))
EVERY = (*GENERATED, *CODE, *LONG, *UNDERSTANDING)
SHARED = [name for name in EVERY if tasks.TASKS[name].max_questions != 1]
TRAINED = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "passkey", "number_string", "kv_retrieval",
)  # fmt: skip
DIGESTS = pathlib.Path(__file__).with_name("task_digests.json")


def count(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False).ids)


def coarse(text: str) -> int:
    return len(text) // 3 + 1


def documents(name: str, length: int = 2048, number: int = 1, seed: int = 0, **options) -> list[tasks.Document]:
    return tasks.make_documents(name, **{"length": length, "count": number, "seed": seed, "count_tokens": count, **options})


def document(name: str, length: int = 2048, seed: int = 0, **options) -> tasks.Document:
    return documents(name, length, seed=seed, **options)[0]


def sample(name: str, length: int = 2048, seed: int = 0, **options) -> tasks.Example:
    return document(name, length, seed, **options).samples()[0]


def request(name: str, length: int = 1024, kind: str | None = None, seed: int = 0, size=count, **more):
    stack = tasks.haystack_for(name, kind, size)
    return tasks.Request(name, random.Random(seed), length, size, stack, words.Words(), **more)


# Groups


def test_groups_name_their_tasks_and_the_trained_ones_keep_their_order():
    groups = tasks.GROUPS
    assert groups["trained"] == TRAINED
    assert groups["ruler"] == (*TRAINED[:9], "cwe", "fwe", "qa_1", "qa_2")
    assert groups["infinitebench"] == ("passkey", "number_string", "kv_retrieval", "math_find")
    assert groups["all"] == tuple(tasks.TASKS)
    assert set(groups["all"]) - set(EVERY) == {"qa_1", "qa_2"}
    assert {*groups["procedures"], *groups["rules"], *groups["easy_rules"]} < set(LONG)
    assert {*groups["shared"]} <= {*SHARED}
    assert not set(groups) & set(tasks.TASKS)  # a name means one thing


def test_groups_expand_to_tasks_without_repeats():
    assert tasks.expand(["trained"]) == TRAINED
    assert tasks.expand(["listing", "infinitebench", "passkey", "vt"]) == (
        "listing", "passkey", "number_string", "kv_retrieval", "math_find", "vt",
    )  # fmt: skip
    assert tasks.expand([]) == ()
    for name, near in (("rulr", "ruler"), ("maths_find", "math_find")):
        with pytest.raises(ValueError, match=f"unknown task '{name}', did you mean '{near}'"):
            tasks.expand(["vt", name])


# Every task


@pytest.mark.parametrize("name", EVERY)
def test_a_sample_fills_its_length_and_is_scored_by_its_answer(name):
    task, one = tasks.get_task(name), sample(name, 1500, seed=3)
    assert 1250 < count(one.prompt) + one.max_new_tokens <= 1500
    most = one.max_new_tokens * (2 if name in CODE else 1)  # this tokenizer was trained on prose
    assert count(one.target) <= most and one.max_new_tokens <= task.max_new_tokens
    assert task.score(one.target, one.answers) == 1.0
    assert all(measure(one.target, one.answers) == 1.0 for measure in task.measures.values())
    for nothing in ("", "\n\n", "```\n```"):
        assert task.score(nothing, one.answers) == 0.0
    # A note without forbidden words keeps some rules, and any line is a little like a line of code.
    most = 0.2 if "rules" in name else 0.6 if "completion" in name else 0.0
    assert task.score("I do not know 123456.", one.answers) <= most
    if name in GENERATED:
        assert all(answer in one.context for answer in one.answers if not answer.endswith(".5"))  # a median may not be


@pytest.mark.parametrize("name", EVERY)
def test_a_sample_follows_from_its_seed_and_fits_with_a_coarse_tokenizer_too(name):
    options = {"length": 4096, "count_tokens": coarse}
    one, two = documents(name, number=2, seed=3, **options)
    assert documents(name, seed=3, **options) == [one] and one != two
    assert document(name, seed=4, **options) not in (one, two)
    assert coarse(one.samples()[0].prompt) + one.max_new_tokens <= 4096
    if name not in CODE:  # they try many files first
        with pytest.raises(ValueError, match=f"^{name}: length 50 is too short"):
            sample(name, 50)


@pytest.mark.parametrize("name", SHARED)
def test_many_questions_share_one_context(name):
    # A kilobyte of code may define one function, and takes the tokenizer seconds.
    length, size = (8192, coarse) if name in CODE else (2048, count)
    one = document(name, length, num_questions=5, count_tokens=size)
    assert len(one.questions) == 5 and len({q.question + q.answer_prefix for q in one.questions}) == 5
    for asked in one.samples():
        assert asked.context == one.context
        assert tasks.score(name, asked.target, asked.answers) == 1.0
        assert size(asked.prompt) + asked.max_new_tokens <= length


def test_prompts_are_drawn_as_they_were_when_scores_were_recorded(monkeypatch):
    """With words of our own and without prose, which change with their packages; code is the running Python's."""
    adjectives, nouns = (tuple(f"{kind}{a}{b}" for a in "abcdefgh" for b in "abcdefghijklmnopqrst") for kind in ("x", "y"))
    monkeypatch.setattr(words, "_words_of", words._words_of.__wrapped__)
    monkeypatch.setattr(words, "_word_list", lambda kind: nouns if kind == "noun" else adjectives)
    monkeypatch.setattr(words, "held_out", lambda text: text[-1].lower() in "acegikmoqs02468")
    monkeypatch.setattr(words, "every_word", lambda: tuple(f"{a}{b}{c}" for a in "abcdefgh" for b in nouns for c in "kl"))
    monkeypatch.setattr(ruler, "every_word", words.every_word)
    digests = {}
    for name in (*GENERATED, *LONG, *UNDERSTANDING):
        kind = "noise" if tasks.get_task(name).haystack == "prose" else None
        options = {"count_tokens": coarse, "haystack": kind}
        drawn = documents(name, 1500, 2, **options)
        drawn += documents(name, 3000, num_questions=3 if name in SHARED else 1, **options)
        digests[name] = hashlib.sha256(repr(drawn).encode()).hexdigest()[:12]
    assert digests == json.loads(DIGESTS.read_text()), json.dumps(digests, indent=0)


# Places


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", [*TRAINED[:3], *TRAINED[-3:], "prefix_suffix"])
def test_the_needle_is_there_once_at_the_depth(name, depth):
    one = sample(name, 2048, depth=depth)
    if name in ("kv_retrieval", "prefix_suffix"):
        place, size = one.context.index(one.answers[0]), len(one.context)
    else:
        needle = re.search(r"(One of the special magic|The pass key is|The sequence of digits is)[^.]*\.", one.context)
        assert one.context.count(needle.group()) == 1 and one.answers[0] in needle.group()
        body = one.context.index("\n") + 1
        place, size = needle.start() - body, len(one.context) - body
    assert abs(place / size - depth) < 0.1  # whole sentences


def test_keys_values_and_prose_were_held_out_of_training():
    held, rng = words.Words(), random.Random(0)
    assert len(held.nouns) > 500 and len(held.adjectives) > 50 and all(map(words.held_out, (*held.nouns, *held.adjectives)))
    for draw in ("number", "uuid", "variable", "repeated_digit_string"):
        assert all(words.held_out(getattr(held, draw)(rng)) for _ in range(50))
    sentences = haystack.split_sentences(haystack.prose_text())
    assert hashlib.sha256(haystack.prose_text().encode()).hexdigest()[:12] == "c55bf6659eb3"  # as scores were recorded
    span = haystack.held_out_span(sentences)
    assert span == sentences[-len(span) :] and 0.05 < len(span) / len(sentences) < 0.4
    assert sum(map(len, span)) > 16384 * 3  # characters: enough for 16K tokens without repeating


def test_prose_is_split_into_sentences_and_a_span_holds_what_was_asked():
    text = 'He said "Stop." Then Mr. Smith left, e.g. at once! Why?\nNo one (not he) knew.'
    assert haystack.split_sentences(text) == [
        'He said "Stop."', "Then Mr. Smith left, e.g. at once!", "Why?", "No one (not he) knew.",
    ]  # fmt: skip
    assert all(len(s) <= haystack.LONGEST_SENTENCE for s in haystack.split_sentences("word " * 1000))
    stack = haystack.Haystack("prose", [f"Sentence {i}." for i in range(10)], lambda text: 5)
    rng = random.Random(0)
    assert [len(stack.span(rng, tokens)) for tokens in (24, 203, 3)] == [4, 40, 0]  # 203 tokens repeat it


@pytest.mark.parametrize("name", ["niah_single_2", "vt", "passkey"])
def test_a_haystack_can_be_a_file(name, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(f"Chapter {i} tells of the whale.\nIt swam on." for i in range(400)))
    assert "whale. It swam on." in sample(name, haystack=f"file:{path}").context


# What is refused


def test_wrong_tasks_lengths_and_haystacks_are_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown task 'niah_singel_1', did you mean 'niah_single_1'"):
        tasks.get_task("niah_singel_1")
    with pytest.raises(ValueError, match="depth must lie in"):
        sample("niah_single_1", depth=1.5)
    with pytest.raises(ValueError, match="unknown haystack 'essay'"):
        sample("niah_single_1", haystack="essay")
    with pytest.raises(FileNotFoundError, match="haystack file not found"):
        sample("niah_single_1", haystack=f"file:{tmp_path / 'none.txt'}")
    with pytest.raises(ValueError, match="holds no sentence"):
        haystack.Haystack("noise", [], len)
    with pytest.raises(ValueError, match="num_questions must be at least 1"):
        tasks.make_document(request("passkey", num_questions=0))


def test_tasks_without_a_place_take_no_depth_and_tasks_of_one_question_no_second():
    asked = request("vt")
    for name, task in tasks.TASKS.items():
        if not task.takes_depth:
            with pytest.raises(ValueError, match=f"{name} takes no depth"):
                tasks.make_document(tasks.Request(**vars(asked) | {"task": name, "depth": 0.5}))
        if task.max_questions is not None:
            with pytest.raises(ValueError, match=f"{name} takes .* question"):
                tasks.make_document(tasks.Request(**vars(asked) | {"task": name, "num_questions": task.max_questions + 1}))


def match(pattern: str, text: str) -> tuple[str, ...]:
    """The groups of a text that must have a form, in which only spaces and `%` are special: `%` is one word."""
    found = re.fullmatch(re.escape(pattern).replace("%", r"(\S+)"), text)
    assert found, (pattern, text)
    return found.groups()
