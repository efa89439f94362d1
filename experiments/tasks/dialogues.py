"""Dialogues: the n-th of several equal requests, and facts that the user corrects.

* `near_duplicates`, in the manner of OpenAI's MRCR, which goes back to Vodrahalli et al. (2024, arXiv:2409.12640): the user
  asks for many short texts, and for one of them several times in the same words. The texts differ, and the question asks for
  one of them by its number, to be written again. Texts of other kinds about the same topic, and of the same kind about other
  topics, stand between them. In the easier form each request says its own number, so the question's words find it.
* `corrections`: the user states numbers of things, and corrects each of them later, once or twice. The newest counts.

The words are ours. The suite compares whole answers by their similarity, which gives near-duplicates most of the score. Here
the words up to the first wrong one count, and the texts differ from their first words on.
"""

from __future__ import annotations

from experiments.tasks.base import Document, Question, Request
from experiments.tasks.fitting import draw_until_full, fit, spread
from experiments.tasks.words import distinct

KINDS = ("riddle", "letter", "poem", "story", "speech", "toast")
TOPICS = ("rain", "bread", "clocks", "bridges", "stars", "boots", "trains", "maps", "snow", "lamps", "keys", "ships")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_LINES = (
    "The {adjective} {noun} waits by the door.", "A {noun} knows the way home.", "Nobody asks the {adjective} {noun}.",
    "Then comes a {noun} with {adjective} hands.", "Give the {noun} a chair.", "Every {noun} is {adjective} at night.",
)  # fmt: skip
TEXT_LINES = 3
OWNED = ("locker", "garage", "bicycle", "safe", "gate", "suitcase", "phone", "cabin")
DIGITS = 4


def _title(request: Request) -> str:
    return f"{_adjective(request).capitalize()} {request.rng.choice(request.words.plain_nouns)}."


def _adjective(request: Request) -> str:
    return request.rng.choice([word for word in request.words.adjectives if word.isalpha()])


def _text(request: Request, title: str) -> str:
    """Draw a short text that begins with a title."""

    def drawn(line: str) -> str:
        return line.format(adjective=_adjective(request), noun=request.rng.choice(request.words.plain_nouns))

    return " ".join([title, *map(drawn, request.rng.sample(_LINES, TEXT_LINES))])


def near_duplicates(request: Request, count: int, numbered: bool = False) -> Document:
    """Ask for one of ``count`` texts that were requested in the same words; with ``numbered`` a request has its number."""
    rng, prompt = request.rng, request.prompt
    pairs = [(kind, topic) for kind in KINDS for topic in TOPICS]
    kind, topic = rng.choice(pairs)
    others = [pair for pair in pairs if pair != (kind, topic)]
    form = prompt.forms["numbered" if numbered else "turn"]
    texts = [_text(request, title) for title in distinct(lambda: _title(request), count)]
    number = rng.randrange(count)

    def turn(asked: tuple[str, str], at: int, text: str) -> str:
        return form.format(kind=asked[0], topic=asked[1], number=at + 1, text=text)

    def cost(text: str) -> int:
        return request.count_tokens("\n\n" + text)

    wanted = [turn((kind, topic), at, text) for at, text in enumerate(texts)]

    def other() -> str:
        return turn(rng.choice(others), rng.randrange(len(ORDINALS)), _text(request, _title(request)))

    def build(budget: int) -> str:
        drawn = draw_until_full(other, budget, cost)
        return prompt.context.format(context="\n\n".join(spread(rng, drawn, wanted)))

    asked = {"kind": kind, "topic": topic, "ordinal": ORDINALS[number], "number": number + 1}
    question = prompt.forms["by_number" if numbered else "by_place"].format(**asked)
    prefix = prompt.prefix.format(**asked)
    questions = [Question(prompt.question.format(question=question), prefix, (texts[number],), f" {texts[number]}")]
    return fit(request, questions, request.count_tokens(prompt.context.format(context="")) + sum(map(cost, wanted)), build)


def corrections(request: Request, times: int, things: int) -> Document:
    """State numbers of some things, correct each of them some ``times``, and ask for one of them."""
    rng, words, prompt, haystack = request.rng, request.words, request.prompt, request.haystack
    owned = rng.sample(OWNED, things)
    values = {thing: words.distinct("numbers", times + 1, rng) for thing in owned}
    turns: list[str] = []
    for at in range(times + 1):  # all statements, then all first corrections, so that no place gives the answer away
        form = prompt.forms["correction" if at else "statement"]
        turns += [form.format(thing=thing, value=values[thing][at]) for thing in rng.sample(owned, things)]

    def cost(text: str) -> int:
        return request.count_tokens("\n\n" + text)

    def filler() -> str:
        return prompt.forms["filler"].format(text=" ".join(haystack.span(rng, rng.randint(40, 120))))

    def build(budget: int) -> str:
        drawn = draw_until_full(filler, budget, cost)
        return prompt.context.format(context="\n\n".join(spread(rng, drawn, turns)))

    thing = owned[0]
    answer = values[thing][-1]
    questions = [Question(prompt.question.format(thing=thing), prompt.prefix.format(thing=thing), (answer,), f" {answer}.")]
    return fit(request, questions, request.count_tokens(prompt.context.format(context="")) + sum(map(cost, turns)), build)
