"""The course of a training run: its length, batches, rates and rows."""

from __future__ import annotations

import dataclasses

from experiments.lab.training.mixture import Mixture


@dataclasses.dataclass(frozen=True)
class Course:
    """The course of a training run.

    Attributes:
        steps: optimiser steps of the whole run.
        lengths: bucket lengths of the curriculum, in tokens.
        tokens_per_step: rows x length of a batch.
        mixture: what rows are made of.
        peak: highest learning rate.
        warmup: steps until the highest learning rate is reached.
        weight_decay: weight decay of matrices.
        lm_weight: weight of the language-model loss, beside weight 1 of the answers' loss.
        lm_weight_first: `lm_weight` as long as only the shortest bucket is in use.
        scored: the share of a row's positions that have logits, as 1 / scored; answers come first. All positions of a model
            with a large vocabulary would take more memory than everything else.
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
