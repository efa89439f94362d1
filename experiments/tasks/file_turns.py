"""Several turns over one long file: later questions refer to earlier ones, so a conversation's cache must hold both.

SCBench (Li et al. 2024, arXiv:2412.10319) asks about a context again and again; its questions stand alone. Here a question
may say "the same section", or name an earlier question by its number. So the questions behind the first are asked in turns
alone (`--question turns`).

A small model mistakes the section that a question means. So every question of the easier `file_turns_1` names its section. It
asks for a value of a new section or of an earlier one, or for a label that the user gave the section in an earlier question.
Values are in the file alone, labels in the conversation alone.

The file is in the form of an INI file: sections with the same keys and drawn values.
"""

from __future__ import annotations

from collections.abc import Callable

from experiments.tasks.base import Document, Question, Request
from experiments.tasks.fitting import draw_until_full, fit, mix

TURN_TOKENS = 24
CONTEXT = (
    "Below is the file machines.ini. Read it carefully. I will ask several questions about it, one after the other.\n\n"
    "{context}"
)
ASKED = "\n\nQuestion {number}: {question} Answer with the value alone."
NEW = "In the section [{section}], what is the value of {key}?"
SAME = "In the same section, what is the value of {key}?"
BACK = "Go back to the section of question {number}: what is its value of {key}?"
PREFIX = "\nThe value of {key} is"
LABELLED = "In the section [{section}], what is the value of {key}? I give this section the label {label}."
LABEL = "Which label did I give to the section [{section}]?"
LABEL_ASKED = "\n\nQuestion {number}: {question} Answer with the label alone."
NAMED_PREFIX = "\nIn the section [{section}], the value of {key} is"
LABEL_PREFIX = "\nThe label of the section [{section}] is"
KEYS = ("owner", "port", "room", "disk", "region", "backup")
_NUMBERS = ("port", "disk")  # keys whose values are numbers


def file_turns(request: Request) -> Document:
    """Draw a file of sections, and questions that refer to each other.

    Question 1 names a section. Later ones name another section, ask about the section before, or about the section of an
    earlier question, which is drawn. No key of a section is asked for twice.
    """
    rng = request.rng
    names, section = _sections(request, request.words.plain_nouns)
    asked: dict[str, dict[str, str]] = {}  # the sections that are asked about
    left: dict[str, list[str]] = {}  # keys of each section that were not asked for
    turns: list[str] = []  # the section of each question
    questions = []
    for number in range(1, request.num_questions + 1):
        earlier = [at for at, name in enumerate(turns[:-1], 1) if left[name] and name != turns[-1]]
        form = rng.choice([NEW, *([SAME] if turns and left[turns[-1]] else []), *([BACK, BACK] if earlier else [])])
        back = rng.choice(earlier) if form == BACK else 0
        name = names[len(asked)] if form == NEW else turns[back - 1]  # 0 - 1: the section before
        if name not in asked:
            asked[name], left[name] = section(name), rng.sample(KEYS, len(KEYS))
        key = left[name].pop()
        text = ASKED.format(number=number, question=form.format(section=name, key=key, number=back))
        turns.append(name)
        questions.append(Question(text, PREFIX.format(key=key), (asked[name][key],), f" {asked[name][key]}"))
    return _document(request, names, section, asked, questions)


def file_turns_1(request: Request) -> Document:
    """Draw a file of sections, and questions that name their section.

    A question that names a section for the first time gives it a label. Later ones ask for another value of it or for the
    label, or name another section. Nothing is asked for twice.
    """
    rng, nouns = request.rng, request.words.plain_nouns
    labels = rng.sample(nouns, request.num_questions)
    names, section = _sections(request, [noun for noun in nouns if noun not in labels])
    asked: dict[str, dict[str, str]] = {}  # the sections that are asked about
    left: dict[str, list[str]] = {}  # keys of each section that were not asked for
    unasked: dict[str, str] = {}  # labels that were not asked for
    questions = []
    for number in range(1, request.num_questions + 1):
        known = [name for name in asked if left[name]]
        form = rng.choice([LABELLED, *([NEW] if known else []), *([LABEL] if unasked else [])])
        if form == LABEL:
            name = rng.choice(list(unasked))
            label = unasked.pop(name)
            text = LABEL_ASKED.format(number=number, question=LABEL.format(section=name))
            questions.append(Question(text, LABEL_PREFIX.format(section=name), (label,), f" {label}"))
            continue
        name = names[len(asked)] if form == LABELLED else rng.choice(known)
        if form == LABELLED:
            asked[name], left[name], unasked[name] = section(name), rng.sample(KEYS, len(KEYS)), labels.pop()
        key = left[name].pop()
        text = ASKED.format(number=number, question=form.format(section=name, key=key, label=unasked.get(name)))
        value = asked[name][key]
        questions.append(Question(text, NAMED_PREFIX.format(section=name, key=key), (value,), f" {value}"))
    return _document(request, names, section, asked, questions)


def _sections(request: Request, nouns: list[str]) -> tuple[list[str], Callable[[str], dict[str, str]]]:
    """Draw names of sections, more than fit, and return what draws the values of a section."""
    rng, words = request.rng, request.words
    # A line is more than 4 tokens, so there are more names than sections.
    names = words.distinct("words", request.length // (4 * len(KEYS)) + request.num_questions + 1, rng)

    def section(name: str) -> dict[str, str]:
        return {"name": name, **{key: words.number(rng, 4) if key in _NUMBERS else rng.choice(nouns) for key in KEYS}}

    return names, section


def _document(
    request: Request,
    names: list[str],
    section: Callable[[str], dict[str, str]],
    asked: dict[str, dict[str, str]],
    questions: list[Question],
) -> Document:
    """Fill the length with more sections, among which the sections that are asked about lie."""
    texts = [_text(values) for values in asked.values()]

    def cost(text: str) -> int:
        return request.count_tokens("\n\n" + text)

    def build(budget: int) -> str:
        pool = iter(names[len(asked) :])
        others = draw_until_full(lambda: _text(section(next(pool))), budget, cost)
        return CONTEXT.format(context="\n\n".join(mix(request, others, texts)))

    fixed = request.count_tokens(CONTEXT.format(context="")) + sum(map(cost, texts))
    return fit(request, questions, TURN_TOKENS, fixed, build)


def _text(values: dict[str, str]) -> str:
    return "\n".join([f"[{values['name']}]", *(f"{key} = {values[key]}" for key in KEYS)])
