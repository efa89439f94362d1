"""Real prompts of several kinds in one batch."""

from __future__ import annotations

import dataclasses

import numpy as np

import models
from experiments.answering import LoadedModel, pad
from experiments.lab.exact.settings import TEXTS, ExactSettings
from experiments.lab.fidelity import FidelitySettings, answers, passages
from experiments.tasks import get_task

_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts of a batch.

    Attributes:
        tokens: int32 [B, S], padded on the right.
        lengths: int32 [B].
        kinds: the kind of text of each row.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    kinds: tuple[str, ...]


def make_prompts(model: LoadedModel, settings: ExactSettings, length: int, samples: int) -> Prompts:
    """Make ``samples`` prompts of each kind of text of the settings, the kinds in turn: row i has kind i modulo their number.

    Args:
        model: the model.
        settings: the kinds of text, the tokens that must fit behind each prompt, the seed.
        length: tokens of prompt and answer together.
        samples: prompts of each kind.

    Raises:
        ValueError: a text is too short, or a length is too short for a task.
    """
    made = {kind: _of_kind(model, settings, length, samples, kind) for kind in settings.texts}
    order = [(kind, at) for at in range(samples) for kind in settings.texts]
    width = -(-(length - settings.tokens) // _BLOCK) * _BLOCK
    tokens, lengths = pad([made[kind][at] for kind, at in order], width)
    return Prompts(tokens, lengths, tuple(kind for kind, _ in order))


def _of_kind(model: LoadedModel, settings: ExactSettings, length: int, samples: int, kind: str) -> list[list[int]]:
    running = kind in TEXTS
    asked = FidelitySettings(
        lengths=(length,),
        streams=(kind,) if running else ("answers",),
        samples=samples,
        tokens=settings.tokens,
        haystack=settings.haystack if kind == "prose" else "prose",
        task="listing" if running else kind,
        seed=settings.seed,
    )
    if running:
        found = passages(model, asked, length, asked.haystack if kind == "prose" else kind)
    else:
        chat = models.ChatTemplate.from_directory(model.directory) if get_task(kind).chat else None
        # `answers` leaves room for the right answer alone, and all rows must have room for the tokens of the settings.
        around = chat.around() if chat else None
        found = answers(model, asked, length - settings.tokens, around)
    sizes = [min(size, length - settings.tokens) for size in found.lengths.tolist()]
    return [row[:size].tolist() for row, size in zip(found.prompts, sizes, strict=True)]
