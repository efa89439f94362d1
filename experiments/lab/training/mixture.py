"""The mixture of training rows: the share of every task, and how contexts, questions and answers become one text."""

import dataclasses
from collections.abc import Mapping

from experiments.tasks import GROUPS

PROSE = "prose"  # rows of plain prose (language-model loss only)
COPY = "copy"  # rows of random segments listed twice, in another order
ROW_TASKS = (*GROUPS["trained"], PROSE, COPY)  # rows and metrics name a task by its index here
SHORTEST = 224  # tokens; the shortest training row


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The part of a task in training.

    Attributes:
        weight: relative share of rows; harder tasks have a larger share.
        cost: tokens that a further question adds (needles, question, answer); 0 means a single question.
        shortest: the task needs rows of at least this many tokens.
        prose_share: share of rows whose haystack is prose although the suite uses noise.
    """

    weight: float
    cost: int
    shortest: int = SHORTEST
    prose_share: float = 0.0


@dataclasses.dataclass(frozen=True)
class Form:
    """The texts around a row's parts: ``opening context question answering prefix answer end asking question ...``.

    Attributes:
        end: token id that closes every answer.
        pad: token id behind a row's end.
        opening: text before the context.
        answering: text between a question and the opening of its answer.
        asking: text before every question but the first.
    """

    end: int
    pad: int
    opening: str = ""
    answering: str = ""
    asking: str = ""


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The rows of a training run.

    Attributes:
        recipes: the part of each task; tasks without a recipe have no rows.
        form: the texts around a row's parts.
        lm_everywhere: whether contexts of prose and questions have language-model loss, too, and not only rows of prose.
    """

    recipes: Mapping[str, Recipe]
    form: Form
    lm_everywhere: bool

    def __hash__(self) -> int:
        return hash((*self.recipes.items(), self.form, self.lm_everywhere))


BUILTIN = Mixture(
    {
        "niah_single_1": Recipe(0.5, 75, prose_share=0.0),
        "niah_single_2": Recipe(0.7, 75),
        "niah_single_3": Recipe(1.0, 110),
        "niah_multikey_1": Recipe(0.9, 75),
        "niah_multikey_2": Recipe(1.6, 60),
        "niah_multikey_3": Recipe(1.6, 150),
        "niah_multivalue": Recipe(2.0, 200, shortest=320),
        "niah_multiquery": Recipe(1.6, 220, shortest=320),
        "vt": Recipe(1.4, 190, shortest=320, prose_share=0.15),
        "passkey": Recipe(0.35, 0, prose_share=0.3),
        "number_string": Recipe(0.5, 0, prose_share=0.3),
        "kv_retrieval": Recipe(1.6, 110, shortest=320),
        PROSE: Recipe(0.4, 0),
        COPY: Recipe(3.0, 0),
    },
    Form(end=0, pad=1),
    lm_everywhere=True,
)

# A pretrained model copies already, so there are no rows to copy. It has more prose instead, so that it forgets nothing.
# Digits are tokens of their own, so uuids are longer than in the mixture of the model that ships.
CHAT_RECIPES = {
    "niah_single_1": Recipe(0.5, 90),
    "niah_single_2": Recipe(0.7, 90),
    "niah_single_3": Recipe(1.0, 150),
    "niah_multikey_1": Recipe(1.0, 90),
    "niah_multikey_2": Recipe(1.8, 90),
    "niah_multikey_3": Recipe(1.8, 220, shortest=512),
    "niah_multivalue": Recipe(1.8, 240, shortest=512),
    "niah_multiquery": Recipe(1.8, 280, shortest=512),
    "vt": Recipe(1.8, 230, shortest=512, prose_share=0.1),
    "passkey": Recipe(0.4, 0, prose_share=0.3),
    "number_string": Recipe(0.6, 0, prose_share=0.3),
    "kv_retrieval": Recipe(1.8, 190, shortest=512),
    PROSE: Recipe(2.0, 0),
}


def chat_mixture(around: tuple[str, str], end: str, end_id: int, pad_id: int) -> Mixture:
    """Make the mixture for a model that answers in a chat.

    Args:
        around: the chat template's texts before and after a user's message.
        end: the text of the token that closes an answer.
        end_id: its id.
        pad_id: token id behind a row's end.

    Raises:
        ValueError: the text after a message does not begin by closing the message, so that it is unknown how the next
            message opens.
    """
    before, after = around
    if not after.startswith(end):
        raise ValueError(f"the chat template must close a message with {end!r}, got {after!r}")
    # A message opens like the first one, behind the text that closes an answer: "\n<|im_start|>user\n" in ChatML.
    opening = before[before.rfind(end) + len(end) :] if end in before else before
    return Mixture(CHAT_RECIPES, Form(end_id, pad_id, before, after, opening), lm_everywhere=False)
