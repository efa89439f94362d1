"""Dialogues: one of several requests that differ in little, and facts that the user corrects.

* `near_duplicates`, in the manner of OpenAI's MRCR, which goes back to Vodrahalli et al. (2024, arXiv:2409.12640): the user
  asks for many short texts, and several times for the same kind about the same topic. The question asks for one of these,
  to be written again. Texts of other kinds about the topic, and of the kind about other topics, stand between them.
* `corrections`: the user states numbers of things, and corrects each of them later, once or twice. The newest counts.

The words are ours.

Departures from MRCR: the requests differ in the person for whom the text is, whom the question names; the suite's are the
same word for word, and it asks for the n-th, which a model of 1.5B parameters does not find. The suite compares whole answers
by their similarity, which gives near-duplicates most of the score. Here the words up to the first wrong one count, and the
texts differ from their first words on.
"""

import random

from experiments.tasks.associations import PEOPLE
from experiments.tasks.base import Document, Question, Request
from experiments.tasks.fitting import draw_until_full, fit, spread
from experiments.tasks.words import distinct

KINDS = ("riddle", "letter", "poem", "story", "speech", "toast")
TOPICS = ("rain", "bread", "clocks", "bridges", "stars", "boots", "trains", "maps", "snow", "lamps", "keys", "ships")
_LINES = (
    "The {adjective} {noun} waits by the door.", "A {noun} knows the way home.", "Nobody asks the {adjective} {noun}.",
    "Then comes a {noun} with {adjective} hands.", "Give the {noun} a chair.", "Every {noun} is {adjective} at night.",
)  # fmt: skip
TEXT_LINES = 3
_NOUNS = (
    "clock", "river", "lamp", "garden", "baker", "window", "horse", "road", "friend", "chair", "forest", "letter", "bridge",
    "boy", "fire", "cloud", "spoon", "tailor",
)  # fmt: skip
_ADJECTIVES = (
    "green", "quiet", "happy", "broken", "small", "cold", "bright", "lazy", "brave", "golden", "heavy", "tired", "clever",
    "wet",
)  # fmt: skip
OWNED = ("locker", "garage", "bicycle", "safe", "gate", "suitcase", "phone", "cabin")


def _title(rng: random.Random) -> str:
    return f"{rng.choice(_ADJECTIVES).capitalize()} {rng.choice(_NOUNS)}."


def _text(rng: random.Random, title: str) -> str:
    """Draw a short text that begins with a title."""
    lines = rng.sample(_LINES, TEXT_LINES)
    return " ".join([title, *(line.format(adjective=rng.choice(_ADJECTIVES), noun=rng.choice(_NOUNS)) for line in lines)])


def near_duplicates(request: Request, count: int) -> Document:
    """Ask for one of ``count`` texts of the same kind about the same topic, each for another person."""
    rng, prompt = request.rng, request.prompt
    pairs = [(kind, topic) for kind in KINDS for topic in TOPICS]
    kind, topic = rng.choice(pairs)
    others = [pair for pair in pairs if pair != (kind, topic)]
    texts = [_text(rng, title) for title in distinct(lambda: _title(rng), count)]
    everybody = rng.sample(PEOPLE, len(PEOPLE))
    people, strangers = everybody[:count], everybody[count:]

    def turn(asked: tuple[str, str], person: str, text: str) -> str:
        return prompt.forms["turn"].format(kind=asked[0], topic=asked[1], person=person, text=text)

    def cost(text: str) -> int:
        return request.count_tokens("\n\n" + text)

    wanted = [turn((kind, topic), person, text) for person, text in zip(people, texts, strict=True)]

    def other() -> str:
        return turn(rng.choice(others), rng.choice(strangers), _text(rng, _title(rng)))

    def build(budget: int) -> str:
        drawn = draw_until_full(other, budget, cost)
        return prompt.context.format(context="\n\n".join(spread(rng, drawn, rng.sample(wanted, count))))

    question, prefix = (form.format(kind=kind, topic=topic, person=people[0]) for form in (prompt.question, prompt.prefix))
    questions = [Question(question, prefix, (texts[0],), f" {texts[0]}")]
    return fit(request, questions, request.count_tokens(prompt.context.format(context="")) + sum(map(cost, wanted)), build)


def corrections(request: Request, times: int, things: int) -> Document:
    """State numbers of some things, correct each of them some ``times``, and ask for one of them."""
    rng, words, prompt, haystack = request.rng, request.words, request.prompt, request.haystack
    owned = rng.sample(OWNED, things)
    values = {thing: words.distinct("numbers", times + 1, rng) for thing in owned}
    turns: list[str] = []
    for at in range(times + 1):  # all statements, then all first corrections, so that no place gives the answer away
        form = prompt.forms["correction" if at else "statement"]
        turns += [
            form.format(thing=thing, value=values[thing][at], old=values[thing][at - 1])
            for thing in rng.sample(owned, things)
        ]

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
