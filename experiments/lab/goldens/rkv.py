"""What the released code of R-KV keeps of random keys.

Run with torch installed, and with the path of a checkout of Zefan-Cai/R-KV (d15c976)::

    python -m experiments.lab.goldens.rkv PATH

It runs ``R1KV`` of ``rkv/compression/r1_kv.py`` in float32. It writes ``rkv.json``: how the tokens are made (``seed``,
``sizes`` H, G, T, D; keys have a mean that is not 0, so that many repeat each other), ``knobs`` in kvjax's names, and
``kept``, the tokens that each KV head keeps. Keys are not rotated.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from experiments.lab.goldens import write

SEED, HEADS, GROUP, TOKENS, DIM = 20261124, 2, 2, 96, 16
KNOBS = {"budget": 40, "obs_window": 8, "kernel": 7, "mix": 0.1, "threshold": 0.5}


def main(path: Path) -> None:
    """Write the file."""
    space: dict = {"__name__": "rkv"}
    for name in ("rkv/utils.py", "rkv/compression/r1_kv.py"):
        text = (path / name).read_text().replace("from . import cal_similarity, compute_attention_scores", "")
        exec(compile(text, name, "exec"), space)
    rng = np.random.default_rng(SEED)
    query = torch.tensor(rng.normal(size=(1, HEADS * GROUP, TOKENS, DIM)), dtype=torch.float32)
    key = torch.tensor(rng.normal(size=(1, HEADS, TOKENS, DIM)) + rng.normal(size=(1, HEADS, 1, DIM)), dtype=torch.float32)
    number = torch.arange(TOKENS, dtype=torch.float32).expand(1, HEADS, TOKENS)[..., None].expand_as(key)
    press = space["R1KV"](
        budget=KNOBS["budget"], window_size=KNOBS["obs_window"], kernel_size=KNOBS["kernel"], mix_lambda=KNOBS["mix"]
    )
    _, left = press.update_kv(key, query[:, :, -KNOBS["obs_window"] :], number)
    kept = [sorted(int(x) for x in head) for head in left[0, :, :, 0]]
    golden = {"seed": SEED, "sizes": [HEADS, GROUP, TOKENS, DIM], "knobs": KNOBS, "kept": kept}
    write("rkv", golden)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
