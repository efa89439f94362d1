"""How many slots do the heads of each layer keep? `python -m experiments.heads.kept --method kvzip`, for ``head_factor``.

A method whose heads share one budget (`kvjax.methods.KVzip`, `kvjax.methods.KVgrad`, `kvjax.methods.AttentionMatching`) gives
most of it to the few heads that retrieve, but allocates one number of slots for each head. The model prefills prompts of a
task, without a bound on what a head keeps. The most slots that a head of a layer keeps in any of them, as a multiple of the
budget and times ``spare``, is the layer's ``head_factor``: which heads these are belongs to the model.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jsonargparse.typing import PositiveInt

import kvjax
from experiments.answering import choices_of
from experiments.cli import Job
from experiments.heads.prompts import PromptSettings, encode_prompts
from experiments.records import markdown_rows


@dataclasses.dataclass(frozen=True)
class KeptSettings(PromptSettings):
    """The settings of `experiments.heads.kept`.

    Attributes:
        method: the method, with its knobs
        spare: factor for prompts of which a layer keeps more
    """

    method: str = "kvzip(budget=1/8)"
    samples: PositiveInt = 4
    spare: float = 1.25


def _kept(settings: KeptSettings) -> None:
    model = settings.load()
    (choice,) = choices_of(settings.method)
    method = choice.at(settings.length, model.tokenizer, model.config).method
    if "head_factor" not in vars(method):
        raise ValueError(f"expected a method with a head_factor, got {settings.method}")
    free = dataclasses.replace(method, head_factor=settings.length / method.budget)
    most = np.zeros(model.config.num_layers)
    for prompt in encode_prompts(model, settings).wholes:
        cache = kvjax.prefill(model.params, [prompt], config=model.config, method=free, max_new_tokens=1)
        held = [np.asarray(state.cache.position >= 0).sum(axis=2).max() for state in cache.layers]
        most = np.maximum(most, np.array(held) / method.budget)
    factors = np.round(most * settings.spare, 2)
    print(
        "\n".join(
            markdown_rows(
                [("layer", "most", "head_factor"), *((str(x), f"{most[x]:.2f}", f"{factors[x]:g}") for x in range(len(most)))]
            )
        )
    )
    print(f"\nhead_factor=({', '.join(f'{x:g}' for x in factors)}), slots allocated {factors.mean():.2f} times the budget")


main = Job(_kept, KeptSettings, compiles=True)


if __name__ == "__main__":
    raise SystemExit(main())
