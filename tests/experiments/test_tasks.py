"""The tasks: prompts word for word, fitting, determinism, the held-out split, needles, scorers."""

from __future__ import annotations

import itertools
import json
import pathlib
import random
import re

import pytest
from tokenizers import Tokenizer

import models
from experiments import tasks
from experiments.tasks import haystack, ruler, scorers, splits, words

TOKENIZER = Tokenizer.from_file(str(pathlib.Path(models.__file__).parent / "builtin" / "tokenizer.json"))
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def count(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False).ids)


def sample(name: str, length: int = 1024, seed: int = 0, **options) -> tasks.Sample:
    return tasks.make_samples(name, length=length, count=1, seed=seed, count_tokens=count, **options)[0]


@pytest.mark.parametrize("name", tasks.GROUPS["generated"])
@pytest.mark.parametrize("length", [1024, 3000])
def test_fits_and_nearly_fills_the_length(name, length):
    made = sample(name, length)
    total = count(made.prompt) + made.max_new_tokens
    assert length - 250 < total <= length
    assert count(made.target) <= made.max_new_tokens


@pytest.mark.parametrize("name", tasks.GROUPS["generated"])
def test_fits_with_a_coarse_tokenizer(name):
    made = tasks.make_samples(name, length=4096, count=1, seed=1, count_tokens=lambda text: len(text) // 3 + 1)[0]
    assert len(made.prompt) // 3 + 1 + made.max_new_tokens <= 4096


@pytest.mark.parametrize("name", tasks.GROUPS["generated"])
def test_the_seed_decides_a_sample(name):
    assert sample(name, seed=3) == sample(name, seed=3)
    assert sample(name, seed=3).prompt != sample(name, seed=4).prompt


def test_longer_set_extends_shorter_one():
    def make(count_samples):
        return tasks.make_samples("vt", length=1024, count=count_samples, seed=0, count_tokens=count)

    assert make(3)[:2] == make(2)


def test_training_and_evaluation_share_no_key_value_or_prose():
    train, held = words.Words("train"), words.Words("eval")
    assert not set(train.nouns) & set(held.nouns) and not set(train.adjectives) & set(held.adjectives)
    assert len(held.nouns) > 500 and len(held.adjectives) > 50
    rng = random.Random(0)
    for draw in ("number", "uuid", "variable", "repeated_digit_string"):
        assert not any(splits.held_out(getattr(train, draw)(rng)) for _ in range(50))
        assert all(splits.held_out(getattr(held, draw)(rng)) for _ in range(50))
    sentences = haystack.split_sentences(haystack.prose_text())
    first, second = haystack.split_span(sentences, "train"), haystack.split_span(sentences, "eval")
    assert first + second == sentences
    assert sum(map(len, second)) > 16384 * 3  # characters: enough for 16K tokens without repeating


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_single_3", "passkey", "number_string"])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_needle_is_there_once_at_the_depth(name, depth):
    made = sample(name, 2048, depth=depth)
    needle = re.search(r"(One of the special magic|The pass key is|The sequence of digits is)[^.]*\.", made.context)
    assert made.context.count(needle.group()) == 1
    assert made.answers[0] in needle.group()
    body = made.context.index("\n") + 1
    place = (needle.start() - body) / (len(made.context) - body)
    assert abs(place - depth) < 0.1  # whole sentences


@pytest.mark.parametrize("name", tasks.GROUPS["generated"])
def test_every_answer_is_in_the_context_and_the_target_is_right(name):
    made = sample(name)
    assert all(answer in made.context for answer in made.answers if not answer.endswith(".5"))  # a median may not be
    assert tasks.score(name, made.target, made.answers) == 1.0
    assert tasks.score(name, "I do not know 123456.", made.answers) == 0.0


def test_multivalue_answers_come_in_text_order():
    for seed in range(5):
        made = sample("niah_multivalue", seed=seed)
        places = [made.context.index(f"is: {value}.") for value in made.answers]
        assert len(places) == 4 and places == sorted(places)
        assert made.target == " {}, {}, {}, and {}.".format(*made.answers)


def test_multiquery_answers_come_in_query_order():
    made = sample("niah_multiquery")
    asked = re.search(r"for (.*) mentioned", made.question).group(1).replace("and ", "").split(", ")
    for key, value in zip(asked, made.answers, strict=True):
        assert f"One of the special magic numbers for {key} is: {value}." in made.context


def test_niah_prompt_is_the_suites_single_form():
    made = sample("niah_single_1", 400)
    key = re.search(r"numbers for (\S+) is: (\d{7})\.", made.context).group(1)
    assert made.context.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the number afterwards.\n{NOISE}\n"
    )
    assert made.question == f"\nWhat is the special magic number for {key} mentioned in the provided text?"
    assert made.answer_prefix == f" The special magic number for {key} mentioned in the provided text is"
    assert made.prompt == made.context + made.question + made.answer_prefix


def test_niah_prompt_is_the_suites_plural_form():
    made = sample("niah_multivalue")
    assert made.context.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the numbers afterwards.\n"
    )
    assert made.question.startswith("\nWhat are all the special magic numbers for ")
    assert made.answer_prefix.endswith(" mentioned in the provided text are")


def test_singular_form_rewrites_every_are():
    plural = "Some x are all y. You are a helpful assistant"
    assert ruler.singular_form(plural) == "A x is y. You is a helpful assistant"


def test_vt_prompts_have_the_words_of_ruler():
    made = sample("vt", 1024)
    value = re.search(r"assigned the value (\d{5}) in the text above\.$", made.question).group(1)
    assert made.question == f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
    assert made.answer_prefix == (
        " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned the "
        f"value {value}, they are: "
    )
    header = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    assert made.context.startswith(header) and made.context.count(header) == 2  # the one-shot example comes first
    example = made.context[: made.context.rindex(header)]
    assert re.search(r"they are: (?:[A-Z]{3} ){4}[A-Z]{3}\n\n$", example)
    assert sample("vt", 512).context.count(header) == 1
    places = [made.context.index(f"VAR {made.answers[0]} = {value}")]
    places += [made.context.index(f"VAR {b} = VAR {a}") for a, b in itertools.pairwise(made.answers)]
    assert places == sorted(places) and len(places) == 5


def test_passkey_and_number_string_prompts():
    made = sample("passkey", 400)
    key = made.answers[0]
    assert made.context.startswith(
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
        "I will quiz you about the important information there.\n\n"
    )
    assert f"The pass key is {key}. Remember it. {key} is the pass key.\n" in made.context + "\n"
    assert made.prompt.endswith("\n\n\nWhat is the pass key?\n\nThe pass key is")
    made = sample("number_string", 400)
    key = made.answers[0]
    assert re.fullmatch(r"\d{10}", key)
    assert f"The sequence of digits is {key}. Remember it. {key} is the sequence of digits." in made.context
    assert made.prompt.endswith("\n\n\nWhat is the sequence of digits?\n\nThe sequence of digits is")


def test_kv_prompt_is_json():
    made = sample("kv_retrieval")
    header = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
    assert made.context.startswith(header)
    pairs = json.loads(made.context.removeprefix(header))
    key = re.fullmatch(r'\n\nKey: "(.*)"', made.question).group(1)
    assert pairs[key] == made.answers[0]
    assert made.answer_prefix == "\nThe value associated with the specified key is: "


def test_many_questions_share_one_context():
    stack = tasks.haystack_for("niah_multikey_2", None, count, "train")
    document = tasks.make_document(
        "niah_multikey_2", random.Random(0), 2048, count, stack, words.Words("train"), num_questions=8, training=True
    )
    assert len(document.questions) == 8
    assert len({s.context for s in document.samples()}) == 1
    assert len({q.question for q in document.questions}) == 8
    total = count(document.context) + sum(
        count(q.question + q.answer_prefix) + count(q.target) + 1 for q in document.questions
    )
    assert 2048 - 60 < total <= 2048


@pytest.mark.parametrize("name", ["niah_single_2", "vt", "passkey"])
def test_haystack_can_be_a_file(name, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(f"Chapter {i} tells of the whale.\nIt swam on." for i in range(400)))
    assert "whale. It swam on." in sample(name, haystack=f"file:{path}").context


def test_scorers_count_what_the_suites_count():
    all_of = scorers.score_all
    assert all_of(" 1, 2, and 4.", ("1", "2", "3", "4")) == 0.75
    assert all_of("ABC\x00def", ("abc", "DEF")) == 1.0
    assert scorers.score_first_integer(" is 123, not 45", ("123",)) == 1.0
    assert scorers.score_first_integer(" is 1234", ("123",)) == 0.0
    assert scorers.score_first_integer("nothing", ("123",)) == 0.0
    assert scorers.score_value_among_words('"ab-1".', ("ab-1",)) == 1.0
    assert scorers.score_value_among_words("ab-12", ("ab-1",)) == 0.0


def test_prose_is_split_into_sentences():
    text = 'He said "Stop." Then Mr. Smith left, e.g. at once! Why?\nNo one (not he) knew.'
    assert haystack.split_sentences(text) == [
        'He said "Stop."',
        "Then Mr. Smith left, e.g. at once!",
        "Why?",
        "No one (not he) knew.",
    ]
    assert all(len(s) <= haystack.LONGEST_SENTENCE for s in haystack.split_sentences("word " * 1000))


def test_span_holds_what_was_asked():
    stack = haystack.Haystack("prose", [f"Sentence {i}." for i in range(10)], lambda text: 5)
    rng = random.Random(0)
    assert len(stack.span(rng, 24)) == 4
    assert len(stack.span(rng, 203)) == 40  # repeats
    assert stack.span(rng, 3) == []


def test_wrong_tasks_lengths_and_depths_are_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown task 'niah_singel_1', did you mean 'niah_single_1'"):
        tasks.get_task("niah_singel_1")
    with pytest.raises(ValueError, match="too short"):
        sample("niah_multivalue", 150)
    with pytest.raises(ValueError, match="depth must lie in"):
        sample("niah_single_1", depth=1.5)
    with pytest.raises(ValueError, match="takes no depth"):
        sample("vt", depth=0.5)
    with pytest.raises(ValueError, match="unknown haystack 'essay'"):
        sample("niah_single_1", haystack="essay")
    with pytest.raises(FileNotFoundError, match="haystack file not found"):
        sample("niah_single_1", haystack=f"file:{tmp_path / 'none.txt'}")
    with pytest.raises(ValueError, match="unknown split 'test'"):
        words.Words("test")
    with pytest.raises(ValueError, match="unknown kind of needle 'verbs'"):
        words.Words("train").distinct("verbs", 1, random.Random(0))
    with pytest.raises(ValueError, match="holds no sentence"):
        haystack.Haystack("noise", [], len)
    stack = tasks.haystack_for("passkey", None, count, "train")
    for questions, message in ((0, "at least 1"), (2, "takes one question")):
        with pytest.raises(ValueError, match=message):
            tasks.make_document(
                "passkey", random.Random(0), 512, count, stack, words.Words("train"), num_questions=questions
            )


def test_missing_word_lists_name_their_package(monkeypatch):
    words._word_list.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install wonderwords"):
        words.Words("train")
