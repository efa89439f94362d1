"""RULER's needle-in-a-haystack family and variable tracking (Hsieh et al. 2024, arXiv:2404.06654).

Prompts are the suite's own, word for word, including its global "are" -> "is" rewriting for single answers.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

from experiments.tasks.base import Document, Question, Request, join_answers
from experiments.tasks.fitting import draw_until_full, fit, insert
from experiments.tasks.haystack import NOISE
from experiments.tasks.words import Words, distinct

NIAH_TOKENS = 128
VT_TOKENS = 40
VT_HOPS = 4
ONE_SHOT_FROM = 1024  # tokens; longer documents begin with a solved example
NIAH_CONTEXT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}"
)
NIAH_QUESTION = "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
NIAH_PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
VT_CONTEXT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}"
VT_QUESTION = "\nQuestion: Find all variables that are assigned the value {query} in the text above."
VT_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned "
    "the value {query}, they are: "
)


@dataclasses.dataclass(frozen=True)
class NiahSpec:
    """Arguments of a RULER needle task.

    Attributes:
        name: registry name.
        haystack: "noise", "prose" or "needles" (a haystack of needles only).
        keys: kind of key, "words" or "uuids".
        values: kind of value, "numbers" or "uuids".
        num_keys: number of keys in the text (a haystack of needles has as many as fit).
        num_values: number of values of each queried key.
        num_queries: number of keys that a question asks for.
    """

    name: str
    haystack: str
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    @property
    def singular(self) -> bool:
        """Whether a single answer is expected; the suite's prompt then has its singular form."""
        return self.num_values * self.num_queries == 1


NIAH_SPECS = (
    NiahSpec("niah_single_1", "noise"),
    NiahSpec("niah_single_2", "prose"),
    NiahSpec("niah_single_3", "prose", values="uuids"),
    NiahSpec("niah_multikey_1", "prose", num_keys=4),
    NiahSpec("niah_multikey_2", "needles"),
    NiahSpec("niah_multikey_3", "needles", keys="uuids", values="uuids"),
    NiahSpec("niah_multivalue", "prose", num_values=4),
    NiahSpec("niah_multiquery", "prose", num_keys=4, num_queries=4),
)


def singular_form(template: str) -> str:
    """Rewrite a template for a single answer as RULER does, which replaces every "are", even within words."""
    return template.replace("Some", "A").replace("are all", "is").replace("are", "is")


def _niah_texts(spec: NiahSpec) -> tuple[str, str, str, str]:
    """Return the context, question and prefix templates and the kind word, in the form that the suite uses."""
    texts = (NIAH_CONTEXT, NIAH_QUESTION, NIAH_PREFIX)
    kind = spec.values
    if spec.singular:
        texts = tuple(singular_form(text) for text in texts)
        kind = kind[:-1]
    return (*texts, kind)


def _positions(rng: random.Random, count: int, size: int) -> list[int]:
    """Draw where to insert `count` needles among `size` sentences: at the suite's 40 depths, or anywhere if 40 is too few."""
    if count <= 40:
        return [size * step // 39 for step in rng.sample(range(40), count)]
    return [rng.randrange(size + 1) for _ in range(count)]


def niah(spec: NiahSpec, request: Request) -> Document:
    """Build a needle document.

    Args:
        spec: the needle task.
    """
    rng, words, haystack, count_tokens = request.rng, request.words, request.haystack, request.count_tokens
    context_text, question_text, prefix_text, kind = _niah_texts(spec)
    asked = request.num_questions * spec.num_queries
    num_keys = max(spec.num_keys, asked)
    if spec.haystack == "needles":
        num_keys = max(num_keys, 2)
    keys = words.distinct(spec.keys, num_keys, rng)
    values: dict[str, list[str]] = {key: words.distinct(spec.values, spec.num_values, rng) for key in keys}
    needles = [(k, NEEDLE.format(kind=spec.values, key=k, value=v)) for k in keys for v in values[k]]
    rng.shuffle(needles)
    separator = "\n" if spec.haystack == "needles" else haystack.separator

    def questions() -> list[Question]:
        groups = [keys[start : start + spec.num_queries] for start in range(0, asked, spec.num_queries)]
        answers = [tuple(value for key in group for value in values[key]) for group in groups]
        return [
            Question(
                question_text.format(kind=kind, query=join_answers(group)),
                prefix_text.format(kind=kind, query=join_answers(group)),
                mine,
                " " + join_answers(mine) + ".",
            )
            for group, mine in zip(groups, answers, strict=True)
        ]

    def cost(text: str) -> int:
        return count_tokens(separator + text)

    def distractor() -> tuple[str, str]:
        key, value = words.distinct(spec.keys, 1, rng)[0], words.distinct(spec.values, 1, rng)[0]
        return key, NEEDLE.format(kind=spec.values, key=key, value=value)

    def build(budget: int) -> str:
        if spec.haystack == "needles":
            drawn = draw_until_full(distractor, budget, lambda one: cost(one[1]))
            filler = [text for key, text in drawn if key not in values]
        else:
            filler = haystack.span(rng, budget)
        positions = _positions(rng, len(needles), len(filler))
        if request.depth is not None:
            first = next(i for i, (key, _) in enumerate(needles) if key == keys[0])
            positions[first] = round(request.depth * len(filler))
        body = separator.join(insert(filler, [text for _, text in needles], positions))
        return context_text.format(kind=kind, context=body)

    fixed = count_tokens(context_text.format(kind=kind, context="")) + sum(cost(text) for _, text in needles)
    document = fit(request, questions(), NIAH_TOKENS, fixed, build)
    for mine in values.values():  # the answers come in the order of the text
        mine.sort(key=lambda value: document.context.index(f" is: {value}."))
    return dataclasses.replace(document, questions=tuple(questions()))


def _chain(rng: random.Random, words: Words, value: str, letters: int) -> tuple[list[str], list[str]]:
    names = distinct(lambda: words.variable(rng, letters), VT_HOPS + 1)
    statements = [f"VAR {names[0]} = {value}"]
    statements += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names)]
    return names, statements


def _interleave(rng: random.Random, sentences: list[str], chain: list[str]) -> list[str]:
    """Insert a chain's statements, in order, at random positions."""
    positions = sorted(rng.sample(range(len(sentences) + 1), min(len(chain), len(sentences) + 1)))
    positions += [len(sentences)] * (len(chain) - len(positions))
    return insert(sentences, chain, positions)


def variable_tracking(request: Request) -> Document:
    """Build a variable-tracking document with a chain for each question.

    The task takes no depth, because a chain is spread over the whole text.
    """
    rng, words, haystack, count_tokens = request.rng, request.words, request.haystack, request.count_tokens
    numbers = distinct(lambda: words.number(rng, 5), request.num_questions)
    chains = [_chain(rng, words, value, letters=5) for value in numbers]
    questions = [
        Question(
            VT_QUESTION.format(query=value), VT_PREFIX.format(query=value, count=len(names)), tuple(names), " ".join(names)
        )
        for value, (names, _) in zip(numbers, chains, strict=True)
    ]
    head = ""
    if request.length >= ONE_SHOT_FROM:
        value = words.number(rng, 5)
        names, statements = _chain(rng, words, value, letters=3)
        body = "\n".join(_interleave(rng, [NOISE] * 5, statements)).replace(". \n", ".\n")
        head = VT_CONTEXT.format(context=body) + VT_QUESTION.format(query=value)
        head += VT_PREFIX.format(query=value, count=len(names)) + " ".join(names) + "\n\n"

    def build(budget: int) -> str:
        sentences = haystack.span(rng, budget)
        for _, statements in chains:
            sentences = _interleave(rng, sentences, statements)
        return head + VT_CONTEXT.format(context=haystack.separator.join(sentences).replace(". \n", ".\n"))

    fixed = count_tokens(head + VT_CONTEXT.format(context=""))
    fixed += sum(count_tokens("\n" + text) for _, statements in chains for text in statements)
    return fit(request, questions, VT_TOKENS, fixed, build)
