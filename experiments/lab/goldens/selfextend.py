"""The outputs of the released code of SelfExtend on random tokens of one layer.

Run with torch installed, and with the path of a checkout of datamllab/LongLM (cdbbb06)::

    python -m experiments.lab.goldens.selfextend PATH

It runs ``self_extend_forward`` of ``self_extend_patch/Llama.py``, the version without FlashAttention, in float32, with
projections that hand over given q, k and v. It writes ``selfextend.json``: how the tokens are made (``seed``, ``sizes`` H,
G, T, D, the first ``prompt`` of which are the prompt, and ``inv_freq``'s ``base``), ``knobs`` in kvjax's names, and
``outputs`` [T, H, G, D] of the last prompt tokens, `LAST` of them, and of all later tokens.
"""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path

import numpy as np
import torch

from experiments.lab.goldens import write

SEED, BASE, LAST = 20261124, 1e4, 4
HEADS, GROUP, PROMPT, STEPS, DIM = 2, 2, 50, 3, 16
KNOBS = {"group_size": 4, "window": 16}


def released(path: Path) -> types.FunctionType:
    """The function, whose module imports kernels and models that it does not use."""
    lines = (path / "self_extend_patch" / "Llama.py").read_text().split("\n")
    kept = [line for line in lines if not line.startswith(("from transformers", "from flash_attn", "from .selfextend"))]
    space: dict = {"__name__": "llama", "Cache": object, "nn": torch.nn, "torch": torch, "math": math}
    exec(compile("\n".join(kept), "Llama.py", "exec"), space)
    return space["self_extend_forward"]


class Past:
    """A cache of one layer."""

    def __init__(self) -> None:
        self.key = self.value = torch.zeros(1, HEADS, 0, DIM)

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values so far."""
        self.key, self.value = torch.cat([self.key, key], dim=2), torch.cat([self.value, value], dim=2)
        return self.key, self.value


def angles(_: torch.Tensor, position: torch.Tensor, seq_len: None) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [1, T, D] of RoPE at positions [1, T]."""
    angle = position[..., None].float() * torch.tensor(BASE ** (-np.arange(0, DIM, 2) / DIM), dtype=torch.float32)
    angle = torch.cat([angle, angle], dim=-1)
    return torch.cos(angle), torch.sin(angle)


def main(path: Path) -> None:
    """Write the file."""
    rng, total = np.random.default_rng(SEED), PROMPT + STEPS
    q, k, v = (torch.tensor(rng.normal(size=(n, total, DIM)), dtype=torch.float32) for n in (HEADS * GROUP, HEADS, HEADS))
    layer = types.SimpleNamespace(
        config=types.SimpleNamespace(pretraining_tp=1), num_heads=HEADS * GROUP, num_key_value_heads=HEADS,
        num_key_value_groups=GROUP, head_dim=DIM, hidden_size=HEADS * GROUP * DIM, layer_idx=0, attention_dropout=0.0,
        training=False, rotary_emb=angles, o_proj=lambda x: x,
    )  # fmt: skip
    forward, past, outputs = released(path), Past(), []
    for first, end in ((0, PROMPT), *((at, at + 1) for at in range(PROMPT, total))):
        for name, x in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
            setattr(layer, name, lambda _, x=x[:, first:end]: x.transpose(0, 1).reshape(1, x.shape[1], -1))
        mask = torch.full((end - first, end), -torch.inf).triu(first + 1)[None, None]
        at = torch.arange(first, end)[None]
        sizes = {"group_size_1": KNOBS["group_size"], "group_size_2": KNOBS["window"]}
        out = forward(layer, torch.zeros(1, end - first, 1), mask, at, past, **sizes)[0]
        outputs += out.reshape(end - first, HEADS, GROUP, DIM).double().numpy().round(6).tolist()
    golden = {
        "seed": SEED, "sizes": [HEADS, GROUP, total, DIM], "prompt": PROMPT, "base": BASE, "knobs": KNOBS,
        "outputs": outputs[PROMPT - LAST :],
    }  # fmt: skip
    write("selfextend", golden)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
