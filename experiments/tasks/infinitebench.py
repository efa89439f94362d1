"""InfiniteBench's generated retrieval tasks (Zhang et al. 2024, arXiv:2402.13718): passkey, number string, kv.

The templates are the ones the suite uses for base models (`yarn_mistral_templates`).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from experiments.tasks.base import Document, Question
from experiments.tasks.haystack import Haystack
from experiments.tasks.ruler import fit
from experiments.tasks.words import Words

PASSKEY_TOKENS = 8  # the suite's 6 assume several digits a token
NUMBER_STRING_TOKENS = 14  # likewise 12
KV_TOKENS = 50
PASSKEY_CONTEXT = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n\n{context}"
)
NUMBER_STRING_CONTEXT = (
    "There is an important info hidden inside a lot of irrelevant text. Find it. "
    "I will quiz you about the important information there.\n\n{context}"
)
PASSKEY = (
    "The pass key is {key}. Remember it. {key} is the pass key.",
    "\n\n\nWhat is the pass key?",
    "\n\nThe pass key is",
)
NUMBER_STRING = (
    "The sequence of digits is {key}. Remember it. {key} is the sequence of digits.",
    "\n\n\nWhat is the sequence of digits?",
    "\n\nThe sequence of digits is",
)
KV_CONTEXT = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{context}"
KV_QUESTION = '\n\nKey: "{key}"'
KV_PREFIX = "\nThe value associated with the specified key is: "


def _hidden_number(
    task: str,
    rng: random.Random,
    length: int,
    count_tokens: Callable[[str], int],
    haystack: Haystack,
    value: str,
    depth: float | None,
    num_questions: int,
    training: bool,
) -> Document:
    if num_questions != 1:
        raise ValueError(f"{task} hides one number and takes one question, got {num_questions}")
    is_passkey = task == "passkey"
    header = PASSKEY_CONTEXT if is_passkey else NUMBER_STRING_CONTEXT
    needle, question, prefix = PASSKEY if is_passkey else NUMBER_STRING
    limit = PASSKEY_TOKENS if is_passkey else NUMBER_STRING_TOKENS
    needle = needle.format(key=value)
    asked = Question(question, prefix, (value,), f" {value}.")
    room = count_tokens(asked.target) + 1 if training else limit
    fixed = room + sum(count_tokens(text) for text in (header.format(context=""), "\n" + needle, question + prefix))

    def build(budget: int) -> Document:
        sentences = haystack.span(rng, budget)
        place = rng.randrange(len(sentences) + 1) if depth is None else round(depth * len(sentences))
        body = haystack.separator.join([*sentences[:place], needle, *sentences[place:]])
        return Document(task, header.format(context=body), (asked,), limit)

    return fit(length, count_tokens, build, length - fixed, room, exact=not training)


def passkey(
    rng: random.Random,
    length: int,
    count_tokens: Callable[[str], int],
    haystack: Haystack,
    words: Words,
    *,
    depth: float | None = None,
    num_questions: int = 1,
    training: bool = False,
) -> Document:
    """A five-digit pass key in noise; see `experiments.tasks.make_document` for the arguments."""
    value = words.digit_string(rng, 5)
    return _hidden_number("passkey", rng, length, count_tokens, haystack, value, depth, num_questions, training)


def number_string(
    rng: random.Random,
    length: int,
    count_tokens: Callable[[str], int],
    haystack: Haystack,
    words: Words,
    *,
    depth: float | None = None,
    num_questions: int = 1,
    training: bool = False,
) -> Document:
    """Ten digits, some doubled, in noise; see `experiments.tasks.make_document` for the arguments."""
    value = words.repeated_digit_string(rng)
    return _hidden_number("number_string", rng, length, count_tokens, haystack, value, depth, num_questions, training)


def kv_retrieval(
    rng: random.Random,
    length: int,
    count_tokens: Callable[[str], int],
    haystack: Haystack,
    words: Words,
    *,
    depth: float | None = None,
    num_questions: int = 1,
    training: bool = False,
) -> Document:
    """A JSON object of uuid pairs, one key asked; see `experiments.tasks.make_document` for the arguments."""
    del haystack  # the object is its own haystack
    keys = words.distinct("uuids", num_questions, rng)
    questions = []
    for key in keys:
        value = words.uuid(rng)
        questions.append(Question(KV_QUESTION.format(key=key), KV_PREFIX, (value,), value))
    pairs = [f'"{key}": "{q.answers[0]}"' for key, q in zip(keys, questions, strict=True)]
    room = sum(count_tokens(q.target) + 1 for q in questions) if training else KV_TOKENS
    fixed = (
        count_tokens(KV_CONTEXT.format(context="{}"))
        + room
        + sum(count_tokens(pair + ", ") for pair in pairs)
        + sum(count_tokens(q.question + q.answer_prefix) for q in questions)
    )

    def build(budget: int) -> Document:
        filler: list[str] = []
        rest = budget
        while rest > 0:
            pair = f'"{words.uuid(rng)}": "{words.uuid(rng)}"'
            rest -= count_tokens(pair + ", ")
            if rest >= 0:
                filler.append(pair)
        merged = list(filler)
        for index, pair in enumerate(pairs):
            chosen = depth is not None and index == 0
            merged.insert(round(depth * len(filler)) if chosen else rng.randrange(len(merged) + 1), pair)
        context = KV_CONTEXT.format(context="{" + ", ".join(merged) + "}")
        return Document("kv_retrieval", context, tuple(questions), KV_TOKENS)

    return fit(length, count_tokens, build, length - fixed, room, exact=not training)
