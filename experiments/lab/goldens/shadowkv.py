"""What the released code of ShadowKV attends to, and its outputs, on random tokens of one layer.

Run with torch installed, and with the path of a checkout of bytedance/ShadowKV (a21f5a9)::

    python -m experiments.lab.goldens.shadowkv PATH

It runs ``ShadowKVCache`` of ``models/kv_cache.py``, the version "for accuracy measurement and understanding", in float32 on
the CPU, with fewer outliers. It writes ``shadowkv.json``: how the tokens are made (``seed``, ``sizes`` H, G, T, D, the first
``prompt`` of which are the prompt, and ``inv_freq``'s ``base``), ``knobs`` in kvjax's names, and for each later token
``chosen``, the positions of the chosen chunks of each KV head, ascending, and ``outputs`` [N, H, G, D].
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import torch

from experiments.lab.goldens import write

SEED, BASE = 20261124, 1e4
HEADS, GROUP, PROMPT, STEPS, DIM = 2, 2, 125, 3, 128  # the code divides by sqrt(128) whatever the dimension
KNOBS = {"budget": 16, "rank": 24, "chunk_size": 8, "outlier_chunks": 3, "local_chunks": 4}


def released(path: Path) -> type:
    """The class, whose module imports kernels that need a GPU; this class does not use them."""
    for name, given in (("models.tensor_op", "batch_gather_gemm_rotary_pos_emb_cuda"), ("kernels", "shadowkv")):
        sys.modules[name] = types.SimpleNamespace(**{given: None})
    torch.cuda.Stream = lambda: None
    space: dict = {"__name__": "kv_cache"}
    exec(compile((path / "models" / "kv_cache.py").read_text(), "kv_cache.py", "exec"), space)
    return space["ShadowKVCache"]


def rotate(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """RoPE of [..., D] at positions [...], pairs (i, i + D/2)."""
    angle = position[..., None].float() * torch.tensor(BASE ** (-np.arange(0, DIM, 2) / DIM), dtype=torch.float32)
    cos, sin = torch.cos(angle), torch.sin(angle)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def main() -> None:
    """Write the file."""
    rng, total = np.random.default_rng(SEED), PROMPT + STEPS
    q, k, v = (torch.tensor(rng.normal(size=(1, n, total, DIM)), dtype=torch.float32) for n in (HEADS * GROUP, HEADS, HEADS))
    sizes = {"num_hidden_layers": 1, "num_attention_heads": HEADS * GROUP, "num_key_value_heads": HEADS}
    config = types.SimpleNamespace(**sizes, hidden_size=HEADS * GROUP * DIM)
    given = {name: KNOBS[name] for name in ("rank", "chunk_size")}
    cache = released(Path(sys.argv[1]))(
        config, max_length=total, device="cpu", dtype=torch.float32, sparse_budget=KNOBS["budget"], **given
    )
    cache.outlier_chunk, cache.local_chunk = KNOBS["outlier_chunks"], KNOBS["local_chunks"]
    at = torch.arange(total)
    query, key = rotate(q, at), rotate(k, at)
    cache.get_svd(k[:, :, :PROMPT], 0)
    cache.prefill_kv_cache(v[:, :, :PROMPT], 0, key[:, :, :PROMPT])
    chosen, outputs = [], []
    for t in range(PROMPT, total):
        now = slice(t, t + 1)
        cache.update_kv_cache(key[:, :, now], v[:, :, now], 0)
        positions = cache.get_retrieval_position_ids(0, query[:, :, now])
        values = cache.get_value_cache(0, positions)[0]
        keys = cache.get_key_cache(0, positions, rotate, None)[0]
        logits = torch.einsum("hgd,hsd->hgs", query[0, :, t].view(HEADS, GROUP, DIM), keys) / DIM**0.5
        out = torch.einsum("hgs,hsd->hgd", torch.softmax(logits, dim=-1), values)
        chosen.append([sorted(head) for head in positions[0].tolist()])
        outputs.append([[[round(x, 5) for x in row] for row in head] for head in out.tolist()])
    told = {
        "seed": SEED, "base": BASE, "sizes": [HEADS, GROUP, total, DIM], "prompt": PROMPT, "knobs": KNOBS,
        "chosen": chosen, "outputs": outputs,
    }  # fmt: skip
    write("shadowkv", told)


if __name__ == "__main__":
    main()
