"""The batch shape of each training step: short rows first, long rows later, and always some of the earlier lengths."""

from __future__ import annotations

import bisect
import dataclasses
import random


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """The batch shapes of a run. The shape of a step depends on (seed, step) only, so a resumed run repeats it.

    Attributes:
        total_steps: optimiser steps of the whole run.
        tokens_per_step: rows x length of every batch.
        lengths: bucket lengths in tokens, increasing.
        seed: seed of the random draws.
    """

    total_steps: int
    tokens_per_step: int
    lengths: tuple[int, ...]
    seed: int

    def __post_init__(self) -> None:
        if self.total_steps < 1:
            raise ValueError(f"total_steps must be at least 1, got {self.total_steps}")
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 1:
            raise ValueError(f"lengths must be at least 1 and increase, got {self.lengths}")
        if self.tokens_per_step % self.lengths[-1]:
            raise ValueError(
                f"tokens_per_step must be a multiple of the longest length {self.lengths[-1]}, "
                f"got {self.tokens_per_step}"
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
        return bisect.bisect_right(starts, step / self.total_steps)

    def bucket(self, step: int) -> tuple[int, int]:
        """Choose the (rows, length) of a step.

        The newest bucket of a stage gets 40 % of the stage's steps; in the last stage it gets 30 %. The older buckets share
        the rest evenly.
        """
        stage = self.stage(step)
        rng = random.Random(f"bucket/{self.seed}/{step}")
        newest = 0.3 if stage == len(self.lengths) - 1 else 0.4
        index = stage if stage == 0 or rng.random() < newest else rng.randrange(stage)
        length = self.lengths[index]
        return self.tokens_per_step // length, length

    def is_first_stage(self, step: int) -> bool:
        """Say whether only the shortest bucket is in use, where language-model loss weighs more."""
        return self.stage(step) == 0
