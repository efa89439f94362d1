"""How many slots do the heads of each layer keep? `python -m experiments.heads.kept --method kvzip`, for ``head_factor``.

A method whose heads share one budget (`kvjax.methods.KVzip`, `kvjax.methods.KVgrad`, `kvjax.methods.AttentionMatching`) gives
most of it to the few heads that retrieve, but allocates one number of slots for each head. The model prefills prompts of a
task, without a bound on what a head keeps. The most slots that a head of a layer keeps in any of them, as a multiple of the
budget, is rounded up to a power of the root of 2, so that few layers differ: this is the layer's ``head_factor``, at least
0.25. Which heads retrieve belongs to the model. The file has ``{"head_factor": [...]}``; commands take its path for the knob.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
from jsonargparse.typing import PositiveInt

import kvjax
from experiments.answering import Choice
from experiments.cli import Job, option, output_file
from experiments.heads.prompts import PromptSettings, encode_prompts
from experiments.records import markdown_rows, write_bytes
from kvjax.protocol.typing import method_layers


@dataclasses.dataclass(frozen=True)
class KeptSettings(PromptSettings):
    """The settings of `experiments.heads.kept`.

    Attributes:
        method: the method, with its knobs
        out: the file of factors
    """

    method: str = "kvzip(budget=1/8)"
    samples: PositiveInt = 4
    out: pathlib.Path = option(pathlib.Path("runs/kept.json"), read=output_file)


def _kept(settings: KeptSettings) -> None:
    model = settings.load()
    choice = Choice.parse(settings.method).check()
    method = choice.at(settings.length, model.tokenizer, model.config).method
    if "head_factor" not in vars(method):
        raise ValueError(f"expected a method with a head_factor, got {settings.method}")
    if len(method_layers(model.config)) < model.config.num_layers:
        raise ValueError(f"expected a model whose layers all attend to the whole context, got {settings.model}")
    free = dataclasses.replace(method, head_factor=settings.length / method.budget)
    most = np.zeros(model.config.num_layers)
    for prompt in encode_prompts(model, settings).wholes:
        cache = kvjax.prefill(model.params, [prompt], config=model.config, method=free, max_new_tokens=1)
        held = [np.asarray(state.cache.position >= 0).sum(axis=2).max() for state in cache.layers]
        most = np.maximum(most, np.array(held) / method.budget)
    factors = np.round(np.exp2(np.ceil(2 * np.log2(np.maximum(most, 0.25))) / 2), 3)
    write_bytes(settings.out, (json.dumps({"head_factor": factors.tolist()}) + "\n").encode())
    rows = (
        (str(layer), f"{kept:.2f}", f"{factor:g}") for layer, (kept, factor) in enumerate(zip(most, factors, strict=True))
    )
    print("\n".join(markdown_rows([("layer", "most", "head_factor"), *rows])))
    print(f"\nhead_factor={settings.out}, slots allocated {factors.mean():.2f} times the budget")


main = Job(_kept, KeptSettings, compiles=True)


if __name__ == "__main__":
    raise SystemExit(main())
