"""Scores of a model's KV heads, by which methods such as `HeadKV` treat heads differently: read from files, and checked."""

import json
import math
import pathlib
from typing import Any

import numpy as np

from kvjax.protocol.fields import shown
from kvjax.protocol.typing import Model

Scores = tuple[tuple[float, ...], ...]  # one number for each KV head, layer by layer


def head_scores(path: str | pathlib.Path, config: Model) -> Scores:
    """Read the scores of a model's KV heads from a file, for the knob ``scores`` of `HeadKV` and `DuoAttention`.

    A file has one of two formats:

    * JSON as FYYFU/HeadKV has it, and as ``python -m experiments.heads.heads`` writes it: ``{"LAYER-HEAD": [number, ...]}``
      with an entry for every head. The score of a head is the mean of its numbers.
    * ``.tsv`` as mit-han-lab/duo-attention has it: a line for each layer, a column for each head, tabs between them. Numbers
      below 0 count as 0, and numbers above 1 as 1.

    Heads are query heads or KV heads. If the file scores query heads, a KV head gets the mean of its group.

    Args:
        path: the file.
        config: the model's description.

    Returns:
        A tuple for each layer, of a number for each KV head.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds something else, or scores for other numbers of layers or heads.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no head scores in {file}: expected a file, which experiments.heads.heads writes")
    try:
        text = file.read_text(encoding="utf-8-sig")
        table = _of_table(text) if file.suffix == ".tsv" else _of_json(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ValueError(f'{file} holds no head scores, expected {{"LAYER-HEAD": [number, ...]}}, got: {reason}') from error
    layers, heads = table.shape
    if layers != config.num_layers or heads not in (config.num_q_heads, config.num_kv_heads):
        raise ValueError(
            f"{file} has scores for {layers} layers of {heads} heads, the model has {config.num_layers} layers of "
            f"{config.num_q_heads} query heads and {config.num_kv_heads} KV heads: these are scores of another model"
        )
    pooled = table.reshape(layers, config.num_kv_heads, -1).mean(axis=2)
    return tuple(tuple(row) for row in pooled.tolist())


def check_score_sizes(owner: Any, model: Model) -> None:
    """Refuse scores of other numbers of layers or KV heads than the model's, for `kvjax.protocol.method.Method.check_sizes`.

    Raises:
        ValueError: they are missing, or do not fit.
    """
    table = score_table(owner, model.num_layers)
    if table.shape[1] != model.num_kv_heads:
        raise ValueError(
            f"{type(owner).__name__}: scores must have a number for each of the model's {model.num_kv_heads} KV heads, got "
            f"{table.shape[1]} in each layer"
        )


def score_table(owner: Any, num_layers: int) -> np.ndarray:
    """Check a method's field ``scores`` and return it as float64 [L, H].

    Raises:
        ValueError: they are missing, are not for ``num_layers`` layers, differ in length, or are all 0.
    """
    name, scores = type(owner).__name__, owner.scores
    if scores is None:
        raise ValueError(
            f"{name}: scores must have a number for each KV head of each layer, got None; kvjax.head_scores reads them from "
            "a file, and `python -m experiments.heads.heads` writes one for a model"
        )
    lengths = sorted({len(row) for row in scores})
    if len(scores) != num_layers or len(lengths) > 1:
        raise ValueError(
            f"{name}: scores must have as many numbers in each of the model's {num_layers} layers, got {len(scores)} layers "
            f"of {' or '.join(map(str, lengths))} numbers"
        )
    table = np.asarray(scores, np.float64)
    if not table.any():
        raise ValueError(f"{name}: scores must tell heads apart, got zeros alone")
    return table


def _of_json(given: Any) -> np.ndarray:
    """Parse HeadKV's JSON object: float64 [L, H]."""
    if not given:
        raise ValueError("no entry 0-0")
    found: dict[tuple[int, int], float] = {}
    for key, numbers in given.items():
        layer, _, head = key.partition("-")
        score = float(np.mean(np.asarray(numbers, np.float64)))
        if not (math.isfinite(score) and score >= 0):
            raise ValueError(f"{key}: {shown(numbers)}")
        found[int(layer), int(head)] = score
    layers, heads = (1 + max(key[at] for key in found) for at in (0, 1))
    missing = [f"{layer}-{head}" for layer in range(layers) for head in range(heads) if (layer, head) not in found]
    if missing:
        raise ValueError(f"no entry {missing[0]}")
    return np.array([[found[layer, head] for head in range(heads)] for layer in range(layers)])


def _of_table(text: str) -> np.ndarray:
    """Parse DuoAttention's lines: float64 [L, H]."""
    rows = [[float(number) for number in line.split("\t")] for line in text.splitlines() if line.strip()]
    table = np.array(rows, np.float64)
    if table.ndim != 2 or not np.isfinite(table).all():
        raise ValueError(f"{len(rows)} lines")
    return np.clip(table, 0, 1)
