"""What the released code of ThinK keeps of the keys, and attention to it, on random tokens of one layer.

Run with torch installed, and with the path of a checkout of SalesforceAIResearch/ThinK (e365413)::

    python -m experiments.lab.goldens.think PATH

It runs ``key_pruner_query_driven`` of ``ThinK_eager/src/kv_pruning_utils.py``, in float32 on the CPU, and then steps as
``llama_model.py`` beside it takes them: the pruned keys meet the query's numbers of their channels, the other keys the whole
query, under one softmax. The code has channels for each query head, so a KV head has one query head here. Nothing is rotated,
which the code does before.

It writes ``think.json``: how the tokens are made (``seed``, ``sizes`` H, G, T, D, the first ``prompt`` of which are the
prompt), ``knobs`` in kvjax's names, ``channels``, those that each head keeps, ascending, and ``outputs`` [N, H, G, D] of
later tokens.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import numpy as np
import torch

from experiments.lab.goldens import write

SEED, HEADS, PROMPT, STEPS, DIM = 20261125, 3, 60, 3, 20
KNOBS = {"channels": 0.6, "obs_window": 32, "num_recent": 12}  # the code always asks the last 32 queries


def released(path: Path) -> object:
    """The function, without the rest of its file."""
    file = path / "ThinK_eager" / "src" / "kv_pruning_utils.py"
    tree = ast.parse(file.read_text())
    tree.body = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == "key_pruner_query_driven"]
    space: dict = {"torch": torch}
    exec(compile(tree, file.name, "exec"), space)
    return space["key_pruner_query_driven"]


def main() -> None:
    """Write the file."""
    rng, total = np.random.default_rng(SEED), PROMPT + STEPS
    q, k, v = (torch.tensor(rng.normal(size=(HEADS, total, DIM)).astype(np.float32))[None] for _ in range(3))
    pruned, recent, kept = released(Path(sys.argv[1]))(
        k[:, :, :PROMPT], q[:, :, :PROMPT], recent_size=KNOBS["num_recent"], ratio=1 - KNOBS["channels"]
    )
    outputs = []
    for t in range(PROMPT, total):
        recent = torch.cat([recent, k[:, :, t : t + 1]], dim=2)
        query = q[:, :, t : t + 1]
        asked = query[kept.unsqueeze(2)].view(1, HEADS, 1, -1)
        logits = torch.cat([asked @ pruned.transpose(2, 3), query @ recent.transpose(2, 3)], dim=-1) / DIM**0.5
        out = torch.softmax(logits, dim=-1) @ v[:, :, : t + 1]
        outputs.append([[[round(x, 6) for x in row] for row in head] for head in out[0].tolist()])
    told = {
        "seed": SEED, "sizes": [HEADS, 1, total, DIM], "prompt": PROMPT, "knobs": KNOBS,
        "channels": [head.nonzero()[:, 0].tolist() for head in kept[0]], "outputs": outputs,
    }  # fmt: skip
    write("think", told)


if __name__ == "__main__":
    main()
