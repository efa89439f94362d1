"""The clusters that microsoft/RetrievalAttention makes of random keys and values.

Run with torch and triton and a clone of microsoft/RetrievalAttention at 6b1228c. Triton's interpreter needs no GPU::

    TRITON_INTERPRET=1 python -m experiments.lab.goldens.retroinfer PATH_OF_THE_CLONE

It writes ``retroinfer.json``: ``seed``, ``tokens``, ``dim``, ``knobs`` in kvjax's names; of each cluster the ``centroid``,
the ``value_sum``, and the ``members``, numbers of keys.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import torch

from experiments.lab.goldens import write

SEED, TOKENS, DIM = 20261124, 96, 16
KNOBS = {"cluster_size": 4, "segment": 32, "iterations": 5}


def arrays(seed: int, tokens: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Random keys [T, D], whose mean is not 0, and values [T, D]."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(tokens, dim)) + rng.normal(size=(1, dim)) * 2, rng.normal(size=(tokens, dim))


def main(clone: str) -> None:
    """Write the file."""
    sys.path.insert(0, str(Path(clone) / "cache_hub"))
    key, value = (torch.tensor(x, dtype=torch.float32)[None] for x in arrays(SEED, TOKENS, DIM))
    mean = key.mean(dim=1, keepdim=True)
    centroid, value_sum, clusters, size = importlib.import_module("kmeans").segment_k_means(
        key - mean, value, TOKENS // KNOBS["cluster_size"], KNOBS["iterations"], TOKENS // KNOBS["segment"]
    )
    golden = {
        "seed": SEED, "tokens": TOKENS, "dim": DIM, "knobs": KNOBS,
        "centroid": (centroid + mean)[0].double().numpy().round(6).tolist(),
        "value_sum": value_sum[0].double().numpy().round(6).tolist(),
        "members": [sorted(row[:count].tolist()) for row, count in zip(clusters[0], size[0], strict=True)],
    }  # fmt: skip
    write("retroinfer", golden)


if __name__ == "__main__":
    main(sys.argv[1])
