"""The texts that methods decode: contexts, the tokens that follow them, and the token that each step should predict."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np

import kvjax
from experiments.answering import LoadedModel, pad
from experiments.lab.fidelity.settings import WHOLE_PROSE, FidelitySettings
from experiments.tasks import encode_prompt, held_out_text, length_within, make_samples, opening_ids, prose_text

_BLOCK = 128  # tokens; contexts are padded to a multiple of this


@dataclasses.dataclass(frozen=True)
class Texts:
    """N texts of a stream at a length, with at most S tokens of context and at most T steps.

    Attributes:
        prompts: int32 [N, S], contexts, padded on the right.
        lengths: int32 [N], tokens of each context.
        forced: int32 [N, T], tokens that are fed one by one, padded on the right.
        targets: int32 [N, T], the token that follows each fed token.
        counts: int32 [N], number of fed tokens, at least 1.
    """

    prompts: np.ndarray
    lengths: np.ndarray
    forced: np.ndarray
    targets: np.ndarray
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def steps(self) -> int:
        """The most steps of a text, T."""
        return self.forced.shape[1]

    def rows(self, start: int, rows: int) -> tuple[int, Texts]:
        """Take ``rows`` texts from ``start`` on, repeating the first behind the last text; also return how many are new."""
        real = min(rows, len(self) - start)
        at = [start + (row if row < real else 0) for row in range(rows)]
        return real, Texts(*(array[at] for array in vars(self).values()))


def make_texts(prompts: Sequence[Sequence[int]], following: Sequence[Sequence[int]], context: int, steps: int) -> Texts:
    """Make texts from contexts and the tokens that follow them; leave out texts of fewer than two such tokens.

    Args:
        prompts: token ids of the contexts.
        following: token ids of each text; of n tokens, the first n - 1 are fed, and the last n - 1 are predicted.
        context: tokens of the longest context that fits.
        steps: the most tokens that are fed.

    Raises:
        ValueError: a context is too long, or no text has two tokens.
    """
    kept = [i for i, ids in enumerate(following) if len(ids) > 1]
    if not kept:
        raise ValueError("expected a text of at least two tokens, got only shorter texts")
    longest = max(len(prompts[i]) for i in kept)
    if longest > context:
        raise ValueError(
            f"contexts must have at most {context} tokens beside {steps} steps, got {longest}: use a longer length"
        )
    padded, lengths = pad([prompts[i] for i in kept], -(-context // _BLOCK) * _BLOCK)
    forced, counts = pad([following[i][: min(steps, len(following[i]) - 1)] for i in kept], steps)
    targets, _ = pad([following[i][1 : steps + 1] for i in kept], steps)
    return Texts(padded, lengths, forced, targets, counts)


def passages(model: LoadedModel, settings: FidelitySettings, length: int, kind: str) -> Texts:
    """Cut passages from the text that `experiments.tasks` holds out for evaluation, or from all prose, without a template.

    One passage begins in each of `samples` equal parts of the text, at a random token. So contexts may overlap, but the
    tokens that follow them overlap only if a part is shorter than `tokens`.

    Args:
        model: the model.
        settings: how many passages, and how many tokens are fed.
        length: tokens of context and text together.
        kind: "prose", "prose:whole", "code" or "file:PATH".

    Raises:
        ValueError: the text is too short.
        FileNotFoundError: there is no such text.
    """
    first = opening_ids(model.tokenizer)
    whole = kind == WHOLE_PROSE
    text = " ".join(prose_text().split()) if whole else held_out_text(kind)
    ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    wanted = length + 1 - len(first)  # the token after the last step is predicted, too
    if len(ids) < wanted:
        raise ValueError(
            f"the {'text' if whole else 'held-out part'} of {kind} has {len(ids)} tokens, expected {wanted}: use shorter "
            "lengths or a longer text (--haystack file:PATH)"
        )
    rng = random.Random(f"fidelity/{length}/{settings.seed}")
    part = (len(ids) - wanted) / settings.samples
    starts = [int((index + rng.random()) * part) for index in range(settings.samples)]
    context = length - settings.tokens
    cut = [[*first, *ids[start : start + wanted]] for start in starts]
    return make_texts([p[:context] for p in cut], [p[context:] for p in cut], context, settings.tokens)


def answers(model: LoadedModel, settings: FidelitySettings, length: int, around: tuple[str, str] | None) -> Texts:
    """Make texts of the right answers of a task, behind context and question.

    Args:
        model: the model.
        settings: which task, and how many samples.
        length: tokens of context, question and answer together.
        around: texts before and after the user's content in the chat template; None without a template.

    Raises:
        ValueError: the length is too short for the task.
    """

    def ids(text: str) -> list[int]:
        return model.tokenizer.encode(text, add_special_tokens=False).ids

    before, after = around or ("", "")
    with length_within(length, len(ids(before + after))) as left:
        samples = make_samples(
            settings.task,
            length=left,
            count=settings.samples,
            seed=settings.seed,
            count_tokens=lambda text: len(ids(text)),
            haystack=settings.task_haystack,
        )
    following = [ids(sample.target) for sample in samples]
    texts = [before + sample.opening + sample.question + after + sample.answer_prefix for sample in samples]
    prompts = [ids(text) if before else encode_prompt(model.tokenizer, text) for text in texts]
    steps = min(settings.tokens, max(len(target) - 1 for target in following))
    return make_texts(prompts, following, length - steps, max(steps, 1))


def greedy(model: LoadedModel, asked: Texts, rows: int) -> Texts:
    """Generate Full's answers to the questions of ``asked``, up to the end-of-text token, in batches of ``rows``."""
    made: list[list[int]] = []
    for start in range(0, len(asked), rows):
        real, batch = asked.rows(start, rows)
        cache = kvjax.prefill(
            model.params, batch.prompts, config=model.config, lengths=batch.lengths, max_new_tokens=asked.steps + 1
        )
        out = kvjax.generate(model.params, cache, max_new_tokens=asked.steps + 1)
        tokens, counts = np.asarray(out.tokens), np.asarray(out.num_tokens)
        made += [tokens[row, : counts[row]].tolist() for row in range(real)]
    prompts = [prompt[:size].tolist() for prompt, size in zip(asked.prompts, asked.lengths, strict=True)]
    return make_texts(prompts, made, asked.prompts.shape[1], asked.steps)
