"""Several turns over one long file: later questions refer to earlier ones, so a conversation's cache must hold both.

SCBench (Li et al. 2024, arXiv:2412.10319) asks about a context again and again; its questions stand alone. Here a question
may say "the same section", or name an earlier question by its number. So the questions behind the first are asked in turns
alone (`--question turns`).

A small model mistakes the section that a question means. So every question of the easier `file_turns_1` names its section. It
asks for a value of a new section or of an earlier one, or for a label that the user gave the section in an earlier question.
Values are in the file alone, labels in the conversation alone.

The file is in the form of an INI file: sections with the same keys and drawn values.
"""

from experiments.tasks.base import Document, Question, Request
from experiments.tasks.fitting import draw_until_full, fit_among

KEYS = ("owner", "port", "room", "disk", "region", "backup")
_NUMBERS = ("port", "disk")  # keys whose values are numbers


class _File:
    """The sections of a file, which are drawn when a question or the length asks for them.

    Args:
        request: what to make.
        nouns: values to draw from.

    Attributes:
        asked: values by key of the sections that are asked about, by name.
        left: keys of each of these sections that were not asked for.
    """

    def __init__(self, request: Request, nouns: list[str]) -> None:
        self._request, self._nouns = request, nouns
        # A line is more than 4 tokens, so there are more names than sections.
        count = request.length // (4 * len(KEYS)) + request.num_questions + 1
        self._names = request.words.distinct("words", count, request.rng)
        self.asked: dict[str, dict[str, str]] = {}
        self.left: dict[str, list[str]] = {}

    def _section(self) -> dict[str, str]:
        rng, words = self._request.rng, self._request.words
        return {key: words.number(rng, 4) if key in _NUMBERS else rng.choice(self._nouns) for key in KEYS}

    def new(self) -> str:
        """Draw a section that a question asks about; returns its name."""
        name = self._names[len(self.asked)]
        self.asked[name], self.left[name] = self._section(), self._request.rng.sample(KEYS, len(KEYS))
        return name

    def document(self, questions: list[Question]) -> Document:
        """Fill the length with more sections, among which the sections that are asked about lie."""

        def text(name: str, values: dict[str, str]) -> str:
            return "\n".join([f"[{name}]", *(f"{key} = {value}" for key, value in values.items())])

        def cost(section: str) -> int:
            return self._request.count_tokens("\n\n" + section)

        def others(budget: int) -> list[str]:
            names = iter(self._names[len(self.asked) :])
            return draw_until_full(lambda: text(next(names), self._section()), budget, cost)

        texts = [text(name, values) for name, values in self.asked.items()]
        return fit_among(self._request, questions, texts, others, cost, "\n\n".join)


def file_turns(request: Request) -> Document:
    """Draw a file of sections, and questions that refer to each other.

    Question 1 names a section. Later ones name another section, ask about the section before, or about the section of an
    earlier question, which is drawn. No key of a section is asked for twice.
    """
    rng, prompt = request.rng, request.prompt
    file = _File(request, request.words.plain_nouns)
    turns: list[str] = []  # the section of each question
    questions = []
    for number in range(1, request.num_questions + 1):
        earlier = [at for at, name in enumerate(turns[:-1], 1) if file.left[name] and name != turns[-1]]
        form = rng.choice(["new", *["same"] * bool(turns and file.left[turns[-1]]), *["back", "back"] * bool(earlier)])
        back = rng.choice(earlier) if form == "back" else 0
        name = file.new() if form == "new" else turns[back - 1]  # 0 - 1: the section before
        key = file.left[name].pop()
        question = prompt.forms[form].format(section=name, key=key, number=back)
        turns.append(name)
        value = file.asked[name][key]
        asked = prompt.question.format(number=number, question=question)
        questions.append(Question(asked, prompt.prefix.format(key=key), (value,), f" {value}"))
    return file.document(questions)


def file_turns_1(request: Request) -> Document:
    """Draw a file of sections, and questions that name their section.

    A question that names a section for the first time gives it a label. Later ones ask for another value of it or for the
    label, or name another section. Nothing is asked for twice.
    """
    rng, nouns, prompt = request.rng, request.words.plain_nouns, request.prompt
    labels = rng.sample(nouns, request.num_questions)
    file = _File(request, [noun for noun in nouns if noun not in labels])
    unasked: dict[str, str] = {}  # labels that were not asked for
    questions = []
    for number in range(1, request.num_questions + 1):
        known = [name for name in file.asked if file.left[name]]
        form = rng.choice(["labelled", *["new"] * bool(known), *["label"] * bool(unasked)])
        whole, prefix = prompt.question, prompt.prefix
        if form == "label":
            name, key = rng.choice(list(unasked)), ""
            value = unasked.pop(name)
            whole, prefix = prompt.forms["label_question"], prompt.forms["label_prefix"]
        else:
            name = file.new() if form == "labelled" else rng.choice(known)
            if form == "labelled":
                unasked[name] = labels.pop()
            key = file.left[name].pop()
            value = file.asked[name][key]
        question = prompt.forms[form].format(section=name, key=key, label=unasked.get(name))
        asked = whole.format(number=number, question=question)
        questions.append(Question(asked, prefix.format(section=name, key=key), (value,), f" {value}"))
    return file.document(questions)
