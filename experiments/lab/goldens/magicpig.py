"""What the released code of MagicPIG samples, and its outputs, on random tokens of one layer.

Run with torch and transformers installed, and with the path of a checkout of Infini-AI-Lab/MagicPIG (ac9aa36)::

    python -m experiments.lab.goldens.magicpig PATH

It runs ``SimCache`` of ``evaluations/RULER/pred/cache_ref.py``, the reference of the paper's accuracy, in float32 on the CPU,
with planes of NumPy's generator. It writes ``magicpig.json``: how the tokens and planes are made (``seed``, ``sizes`` H, G,
T, D, the first ``prompt`` of which are the prompt), ``knobs`` in kvjax's names, and for each later token ``sampled``, the
share of all pairs of a query head and a token that were sampled, and ``outputs`` [N, H, G, D]. Keys are not rotated.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import torch

from experiments.lab.goldens import write

SEED = 20261124
HEADS, GROUP, PROMPT, STEPS, DIM = 2, 2, 60, 3, 16
KNOBS = {"num_tables": 12, "num_bits": 4, "num_sink": 4, "num_local": 6}


class Cache:
    """Stands for transformers' class, of which the code uses nothing."""


def repeat_kv(x: torch.Tensor, times: int) -> torch.Tensor:
    """Of transformers: KV heads [B, H, ...] for each query head."""
    return x.repeat_interleave(times, dim=1)


def released(path: Path) -> type:
    """The class."""
    llama = types.ModuleType("transformers.models.llama.modeling_llama")
    llama.repeat_kv, utils = repeat_kv, types.ModuleType("transformers.cache_utils")
    utils.Cache = Cache
    sys.modules |= {x.__name__: x for x in (llama, utils)}
    space: dict = {"__name__": "cache_ref"}
    exec(compile((path / "evaluations/RULER/pred/cache_ref.py").read_text(), "cache_ref.py", "exec"), space)
    return space["SimCache"]


def main() -> None:
    """Write the file."""
    rng, total, layer = np.random.default_rng(SEED), PROMPT + STEPS, 1  # layer 0 is dense
    q, k, v = (torch.tensor(rng.normal(size=(1, n, total, DIM)), dtype=torch.float32) for n in (HEADS * GROUP, HEADS, HEADS))
    bits, tables = KNOBS["num_bits"], KNOBS["num_tables"]
    planes = torch.tensor(rng.normal(size=(tables, bits, DIM)), dtype=torch.float32)
    cache = released(Path(sys.argv[1]))(
        bits, tables, num_qh=HEADS * GROUP, num_kh=HEADS, head_dim=DIM, num_layers=2, device="cpu", dtype=torch.float32
    )
    cache.hash_matrix = [planes.reshape(1, 1, tables * bits, DIM).mT.expand(1, HEADS, -1, -1)]
    for each in range(2):
        cache.update(k[:, :, :PROMPT], v[:, :, :PROMPT], q[:, :, :PROMPT], each)
        cache.select_kv_cache(KNOBS["num_sink"], each, KNOBS["num_local"])
    sampled, outputs = [], []
    for at in range(PROMPT, total):
        before = cache.sparse
        out = cache.update(*(x[:, :, at : at + 1] for x in (k, v, q)), layer)
        sampled.append(round(cache.sparse - before, 6))
        outputs.append(out.reshape(HEADS, GROUP, DIM).double().numpy().round(6).tolist())
    golden = {
        "seed": SEED, "sizes": [HEADS, GROUP, total, DIM], "prompt": PROMPT, "knobs": KNOBS,
        "sampled": sampled, "outputs": outputs,
    }  # fmt: skip
    write("magicpig", golden)


if __name__ == "__main__":
    main()
