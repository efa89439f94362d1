"""The course of a training run: its length, batches, rates and rows."""

import bisect
import dataclasses
import random

from experiments.lab.training.mixture import SHORTEST, Mixture


@dataclasses.dataclass(frozen=True)
class Course:
    """The course of a training run: short rows first, long rows later, and always some of the earlier lengths.

    Attributes:
        steps: optimiser steps of the whole run.
        lengths: bucket lengths in tokens, increasing.
        tokens_per_step: rows x length of every batch.
        mixture: what rows are made of.
        peak: highest learning rate.
        warmup: steps until the highest learning rate is reached.
        weight_decay: weight decay of matrices.
        lm_weight: weight of the language-model loss, beside weight 1 of the answers' loss.
        lm_weight_first: `lm_weight` as long as only the shortest bucket is in use.
        scored: the share of a row's positions that have logits, as 1 / scored; answers come first. All positions of a model
            with a large vocabulary would take more memory than everything else.

    Raises:
        ValueError: no steps, lengths that do not increase or hold no row, or batches that are not whole rows.
    """

    steps: int
    lengths: tuple[int, ...]
    tokens_per_step: int
    mixture: Mixture
    peak: float = 2e-3
    warmup: int = 200
    weight_decay: float = 0.02
    lm_weight: float = 0.1
    lm_weight_first: float = 0.3
    scored: int = 1

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"lengths must increase, got {self.lengths}")
        if self.lengths[0] < SHORTEST:
            raise ValueError(f"lengths must be at least {SHORTEST} tokens, the shortest row, got {self.lengths[0]}")
        if self.tokens_per_step % self.lengths[-1]:
            raise ValueError(
                f"tokens_per_step must be a multiple of the longest length {self.lengths[-1]}, got {self.tokens_per_step}"
            )

    def stage(self, step: int) -> int:
        """Return the stage of a step: in stage i, the buckets 0..i are in use.

        The first stage takes 14 % of the run, because induction forms at the shortest length. The last stage, with all
        lengths, takes 40 %. The stages between share the rest evenly.
        """
        last = len(self.lengths) - 1
        if last == 0:
            return 0
        between = 0.46 / max(1, last - 1)
        starts = [0.14 + between * i for i in range(last - 1)] + [0.6]
        return bisect.bisect_right(starts, step / self.steps)

    def bucket(self, step: int, seed: int) -> tuple[int, int]:
        """Choose the (rows, length) of a step, by step and seed alone, so that a resumed run repeats it.

        The newest bucket of a stage gets 40 % of the stage's steps; in the last stage it gets 30 %. The older buckets share
        the rest evenly.
        """
        stage = self.stage(step)
        rng = random.Random(f"bucket/{seed}/{step}")
        newest = 0.3 if stage == len(self.lengths) - 1 else 0.4
        index = stage if stage == 0 or rng.random() < newest else rng.randrange(stage)
        length = self.lengths[index]
        return self.tokens_per_step // length, length

    def lm_weight_at(self, step: int) -> float:
        """Return the weight of the language-model loss in a step."""
        return self.lm_weight_first if self.stage(step) == 0 else self.lm_weight
