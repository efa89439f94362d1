"""InfiniteBench's generated retrieval tasks (Zhang et al. 2024, arXiv:2402.13718): passkey, number string, kv.

Questions and answer openings are the suite's for base models (`yarn_mistral_templates`). The headers of hidden numbers have
an older wording, because the shipped model was trained with it. The reader of the suite's files
(`experiments.benchmarks.infinitebench_file`) has the suite's own headers.
"""

from __future__ import annotations

from experiments.tasks.base import Document, Question, Request
from experiments.tasks.fitting import draw_until_full, fit, mix

PASSKEY_TOKENS = 8  # the suite's 6 tokens assume several digits a token
NUMBER_STRING_TOKENS = 14  # the suite's 12 tokens assume several digits a token
KV_TOKENS = 50
KV_CONTEXT = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{context}"
KV_QUESTION = '\n\nKey: "{key}"'
KV_PREFIX = "\nThe value associated with the specified key is: "


def _number_context(order: str) -> str:
    """Return the context template of a hidden number; `order` tells the model what to do with the number."""
    return (
        f"There is an important info hidden inside a lot of irrelevant text. {order} "
        "I will quiz you about the important information there.\n\n{context}"
    )


def _number_texts(what: str) -> tuple[str, str, str]:
    """Return needle template, question and answer prefix of a hidden number that the suite calls `what`."""
    return (f"The {what} is {{key}}. Remember it. {{key}} is the {what}.", f"\n\n\nWhat is the {what}?", f"\n\nThe {what} is")


PASSKEY_CONTEXT = _number_context("Find it and memorize them.")
NUMBER_STRING_CONTEXT = _number_context("Find it.")
PASSKEY = _number_texts("pass key")
NUMBER_STRING = _number_texts("sequence of digits")


def _hidden_number(request: Request, value: str, header: str, texts: tuple[str, str, str], limit: int) -> Document:
    """Build a document that hides one number.

    Args:
        value: the number.
        header: context template.
        texts: needle template, question and answer prefix.
        limit: most tokens of the answer.
    """
    needle, question, prefix = texts
    needle = needle.format(key=value)

    def build(budget: int) -> str:
        sentences = mix(request, request.haystack.span(request.rng, budget), [needle])
        return header.format(context=request.haystack.separator.join(sentences))

    fixed = request.count_tokens(header.format(context="")) + request.count_tokens("\n" + needle)
    return fit(request, [Question(question, prefix, (value,), f" {value}.")], limit, fixed, build)


def passkey(request: Request) -> Document:
    """Hide a five-digit pass key in noise, with a single question."""
    value = request.words.digit_string(request.rng, 5)
    return _hidden_number(request, value, PASSKEY_CONTEXT, PASSKEY, PASSKEY_TOKENS)


def number_string(request: Request) -> Document:
    """Hide ten digits, some doubled, in noise, with a single question."""
    value = request.words.repeated_digit_string(request.rng)
    return _hidden_number(request, value, NUMBER_STRING_CONTEXT, NUMBER_STRING, NUMBER_STRING_TOKENS)


def kv_retrieval(request: Request) -> Document:
    """Build a JSON object of uuid pairs, which is its own haystack; each question asks for a key's value."""
    rng, words, count_tokens = request.rng, request.words, request.count_tokens
    keys = words.distinct("uuids", request.num_questions, rng)
    questions = []
    for key in keys:
        value = words.uuid(rng)
        questions.append(Question(KV_QUESTION.format(key=key), KV_PREFIX, (value,), value))
    pairs = [f'"{key}": "{q.answers[0]}"' for key, q in zip(keys, questions, strict=True)]

    def cost(pair: str) -> int:
        return count_tokens(pair + ", ")

    def build(budget: int) -> str:
        others = draw_until_full(lambda: f'"{words.uuid(rng)}": "{words.uuid(rng)}"', budget, cost)
        return KV_CONTEXT.format(context="{" + ", ".join(mix(request, others, pairs)) + "}")

    fixed = count_tokens(KV_CONTEXT.format(context="{}")) + sum(map(cost, pairs))
    return fit(request, questions, KV_TOKENS, fixed, build)
