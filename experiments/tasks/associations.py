"""Facts that a question means and does not name: who owns a dog, if the text says who keeps a poodle.

NoLiMa (Modarressi et al. 2025, arXiv:2502.05167) shows how much of a score is due to words that needle and question share.
Here too the question and the fact share no word but articles and prepositions. The names, the table and the sentences are
ours. The text has a fact about each of several people, so that a model cannot answer by the only name in it.

* ``assoc_form``: another form of the key of RULER's needle (took for take). The easiest: the shipped model, which knows this
  needle alone, answers it too.
* ``assoc_number``: another word for the key.
* ``assoc_kind``: a kind and its class.
* ``assoc_dish``: a dish and what it is made of.
* ``assoc_place``: a landmark and its city.
* ``assoc_country``: a landmark and its country, which takes two steps.

The answer quotes the fact, which names first the dog and last the person. So a model writes what it looks for, and then what
stands behind it. Asked for the name alone, a model of 1.5B parameters is near a guess (docs/notebook/understanding.md).

Each task has a twin, ``..._literal``, of the same seed: the same people at the same places of the same text, whose facts use
the question's words. So the difference of the two scores is what the paraphrase costs.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from experiments.tasks.base import Document, Question, Request
from experiments.tasks.fitting import fit_among

LITERAL = "_literal"  # ends the name of a twin
PEOPLE = (
    "Mia", "Tom", "Lena", "Omar", "Nina", "Paul", "Sara", "Ivan", "Rosa", "Hugo", "Dora", "Karl", "Emma", "Felix", "Clara",
    "Oscar", "Julia", "Simon", "Laura", "Peter",
)  # fmt: skip
PEOPLE_TOLD = 4  # facts in a text, unless more questions are asked


def association(
    request: Request,
    pairs: Mapping[str, Sequence[str]],
    literal: bool = False,
    beyond: Mapping[str, str] | None = None,
    numbers: bool = False,
) -> Document:
    """Hide a fact about each of some people in a text; a question asks for the person of whom something follows.

    Args:
        request: what to make.
        pairs: what the question names -> what a fact may name instead.
        literal: whether facts name it as the question does.
        beyond: name of ``pairs`` -> what the question names in its place, such as the country of a city.
        numbers: whether the answer is a number instead of a person.
    """
    rng, haystack, prompt, count_tokens = request.rng, request.haystack, request.prompt, request.count_tokens
    keys = sorted(beyond or pairs)
    count = max(PEOPLE_TOLD, request.num_questions)
    chosen = [(beyond[key] if beyond else key, key) for key in rng.sample(keys, count)]
    people = request.words.distinct("numbers", count, rng) if numbers else rng.sample(PEOPLE, count)
    facts = [
        prompt.forms["fact"].format(name=name, it=rng.choice(pairs[key]))
        for name, (_, key) in zip(people, chosen, strict=True)
    ]
    twins = [prompt.forms["literal"].format(name=name, it=it) for name, (it, _) in zip(people, chosen, strict=True)]
    questions = [
        Question(
            prompt.question.format(it=it),
            prompt.prefix.format(it=it),
            (name,),
            f" {name}." if numbers else fact.removeprefix("The") + '"',
        )
        for name, (it, _), fact in zip(people, chosen, twins if literal else facts, strict=True)
    ][: request.num_questions]
    twin_of = dict(zip(facts, twins, strict=True))
    bodies: list[str] = []  # of both forms; the longer one is fitted, so that the two have the same text around the facts

    def cost(fact: str) -> int:
        return max(count_tokens(haystack.separator + text) for text in (fact, twin_of[fact]))

    def join(parts: Sequence[str]) -> str:
        bodies[:] = [haystack.separator.join(map(form, parts)) for form in (str, lambda part: twin_of.get(part, part))]
        return max(bodies, key=count_tokens)

    document = fit_among(request, questions, facts, lambda budget: haystack.span(rng, budget), cost, join)
    return dataclasses.replace(document, context=prompt.context.format(context=bodies[literal]))
