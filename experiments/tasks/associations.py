"""Facts that a question means and does not name: who owns an animal, if the text says to whom the horse belongs.

NoLiMa (Modarressi et al. 2025, arXiv:2502.05167) shows how much of a score is due to words that needle and question share.
Here too the question and the fact share no word but those of a frame, which all facts of the text share. The table and the
sentences are ours. The text has several facts, so that a model cannot answer by the only name or number in it. In RULER's
frame stand

* ``assoc_form``: another form of the key (took for take). The easiest: the shipped model, which knows this needle alone,
  answers it too;
* ``assoc_opposite``: the key's opposite;
* ``assoc_number``: another word for the key.

In sentences about people, which the answer quotes, so that it names first the horse and last the person, stand

* ``assoc_kind``: a kind and its class;
* ``assoc_made``: a thing and what it is made from.

Each task has a twin, ``..._literal``, of the same seed: the same answers at the same places of the same text, whose facts use
the question's words. So the difference of the two scores is what the paraphrase costs. docs/notebook/understanding.md has the
forms that a model of 1.5B parameters does not answer.
"""

import dataclasses
from collections.abc import Sequence

from experiments.tasks.base import Document, Question, Request
from experiments.tasks.fitting import fit_among

LITERAL = "_literal"  # ends the name of a twin
PEOPLE = (
    "Mia", "Tom", "Lena", "Omar", "Nina", "Paul", "Sara", "Ivan", "Rosa", "Hugo", "Dora", "Karl", "Emma", "Felix", "Clara",
    "Oscar", "Julia", "Simon", "Laura", "Peter",
)  # fmt: skip
TOLD = 4  # facts in a text, unless more questions are asked


def table(pairs: Sequence[str]) -> dict[str, list[str]]:
    """Read pairs such as "animal: horse, tiger": what a question names -> what a fact may name instead."""
    return {key: things.split(", ") for key, _, things in (pair.partition(": ") for pair in pairs)}


def association(request: Request, pairs: Sequence[str], literal: bool = False, people: bool = False) -> Document:
    """Hide some facts in a text; a question asks for the person or the number of which something follows.

    Args:
        request: what to make.
        pairs: see `table`.
        literal: whether facts name it as the question does.
        people: whether the answer is a person instead of a number.
    """
    rng, haystack, prompt, count_tokens = request.rng, request.haystack, request.prompt, request.count_tokens
    named = table(pairs)
    count = max(TOLD, request.num_questions)
    keys = rng.sample(sorted(named), count)
    names = rng.sample(PEOPLE, count) if people else request.words.distinct("numbers", count, rng)
    things = [rng.choice(named[key]) for key in keys]
    facts = [prompt.forms["fact"].format(name=name, it=thing) for name, thing in zip(names, things, strict=True)]
    twins = [prompt.forms["literal"].format(name=name, it=key) for name, key in zip(names, keys, strict=True)]
    questions = [
        Question(
            prompt.question.format(it=key),
            prompt.prefix.format(it=key),
            (name,),
            prompt.forms["answer"].format(name=name, rest=told.removeprefix("The")),
        )
        for name, key, thing, told in zip(names, keys, things, twins if literal else facts, strict=True)
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
