"""What transformers' logits processors and warpers make of random logits while tokens are added.

Run with torch and transformers 5.24 installed::

    python -m experiments.lab.goldens.samplers

It writes ``samplers.json``: ``prompt`` int [B, P], ``drawn`` int [B, N], ``logits`` [N, B, V], and for each case the options
of ``kvjax.decoding.Sampler`` and the scores [N, B, V] before each of the N tokens, where null is minus infinity.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import generation

from experiments.lab.goldens import write

SEED, ROWS, PROMPT, STEPS, VOCAB = 20261129, 2, 6, 5, 9
CASES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3}, {"repetition_penalty": 0.7}, {"no_repeat_ngram": 1}, {"no_repeat_ngram": 2},
    {"no_repeat_ngram": 3}, {"logit_bias": {3: -2.5, 7: 1.25}}, {"temperature": 0.7, "min_p": 0.2},
    {"temperature": 1.4, "top_k": 5, "top_p": 0.8, "min_p": 0.3},
    {"logit_bias": {0: 1.5}, "repetition_penalty": 1.2, "no_repeat_ngram": 2, "temperature": 0.8, "top_k": 6, "top_p": 0.9},
)  # fmt: skip


def processors(options: dict[str, Any]) -> generation.LogitsProcessorList:
    """Build the list in the order of ``generate``."""
    makers = {
        "logit_bias": lambda bias: generation.SequenceBiasLogitsProcessor([[[i], x] for i, x in bias.items()]),
        "repetition_penalty": generation.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram": generation.NoRepeatNGramLogitsProcessor,
        "temperature": generation.TemperatureLogitsWarper,
        "top_k": generation.TopKLogitsWarper,
        "top_p": generation.TopPLogitsWarper,
        "min_p": generation.MinPLogitsWarper,
    }
    return generation.LogitsProcessorList([make(options[name]) for name, make in makers.items() if name in options])


def main() -> None:
    """Write the file."""
    draws = np.random.default_rng(SEED)
    prompt, drawn = draws.integers(0, VOCAB, (ROWS, PROMPT)), draws.integers(0, VOCAB, (ROWS, STEPS))
    logits = draws.normal(0, 2, (STEPS, ROWS, VOCAB)).round(3)
    cases = []
    for options in CASES:
        scores = []
        for step, given in enumerate(logits):
            seen = torch.tensor(np.concatenate([prompt, drawn[:, :step]], axis=1))
            made = processors(options)(seen, torch.tensor(given, dtype=torch.float32))
            scores.append([[None if x == -np.inf else round(x, 5) for x in row] for row in made.tolist()])
        cases.append({"options": options, "scores": scores})
    golden = {"prompt": prompt.tolist(), "drawn": drawn.tolist(), "logits": logits.tolist(), "cases": cases}
    write("samplers", golden)


if __name__ == "__main__":
    main()
