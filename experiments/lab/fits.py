"""Prints the table of docs/fits.md: the longest prompt and the most rows by card and model.

`python -m experiments.lab.fits`: everything comes from `kvjax.memory_needed`, by shapes alone.
"""

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh

import models
from experiments.cli import Job
from kvjax.accounting import longest_prompt, most_rows
from kvjax.accounting.fits import SPARE
from kvjax.mesh.sharding import bytes_on_device
from models import shapes
from models.sharding import leaf_shardings

CARDS = 16, 24, 40, 80, 141  # GB
METHODS = "full", "snapkv", "mosaickv", "pariskv"
MODELS = {  # a name, the model, the dtype of its weights, devices
    "1.5B": (shapes.qwen25_1_5b, None, 1), "8B": (shapes.llama31_8b, None, 1), "8B in int8": (shapes.llama31_8b, "int8", 1),
    "70B on 2": (shapes.llama31_70b, None, 2), "70B on 4": (shapes.llama31_70b, None, 4),
}  # fmt: skip
LENGTH, ROOM = 32768, 256  # tokens of the rows that are counted, and tokens that may follow


def options(model: str) -> tuple[Any, dict[str, Any]]:
    """Return a model's description, and the further arguments of `kvjax.memory_needed`."""
    make, weight_dtype, devices = MODELS[model]
    config = make()
    params, mesh = models.param_shapes(config, weight_dtype), None
    if devices > 1:
        mesh = AbstractMesh((1, devices), ("data", "model"))

        def split(path: Any, leaf: Any) -> Any:
            return leaf.update(sharding=leaf_shardings("/".join(key.key for key in path), leaf, mesh))

        params = jax.tree_util.tree_map_with_path(split, params)
    return config, {"params": params, "mesh": mesh, "max_new_tokens": ROOM}


def cell(model: str, method: str, card: int) -> str:
    """Compute the longest prompt of one row, in K tokens, and the most rows of `LENGTH` tokens."""
    config, more = options(model)
    sizes = {"device_bytes": card * 1e9, **more}
    longest = longest_prompt(method, config, batch=1, step=1024, **sizes)
    rows = most_rows(method, config, prompt_slots=LENGTH, **sizes)
    return "; ".join("any" if number is None else f"{number:,}" for number in (longest and longest // 1024, rows))


def lines() -> Iterator[str]:
    """Make the table's lines; a card without room for the weights and `SPARE` has none."""
    yield "| model | GB | " + " | ".join(METHODS) + " |"
    yield "|---" * (2 + len(METHODS)) + "|"
    for model in MODELS:
        weights = bytes_on_device(options(model)[1]["params"])
        for card in CARDS:
            if weights + SPARE < card * 1e9:
                yield f"| {model} | {card} | " + " | ".join(cell(model, method, card) for method in METHODS) + " |"


def _print() -> None:
    for line in lines():
        print(line, flush=True)


main = Job(_print)


if __name__ == "__main__":
    raise SystemExit(main())
