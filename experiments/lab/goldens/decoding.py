"""What NVIDIA/kvpress keeps when it evicts while decoding, and the logits, on the tiny model of ``kvpress.py``.

Run with kvpress (8bb29b9, on torch and transformers 5.2) installed::

    python -m experiments.lab.goldens.decoding

It runs ``DecodingPress`` around ``KnormPress``, which leaves the prompt whole and evicts after every ``interval`` tokens.
It writes ``decoding.json``: ``tokens`` int [P + N], of which the first P = ``prompt`` are the prompt, ``interval``,
``budget``, ``kept``, the positions that each KV head of each layer has at the end, and ``logits`` [N, V] after each of the
later tokens.
"""

from __future__ import annotations

import kvpress
import numpy as np
import torch
from transformers import DynamicCache

from experiments.lab.goldens import write
from experiments.lab.goldens.kvpress import tiny_model

SEED, PROMPT, STEPS, INTERVAL, BUDGET = 20261124, 40, 13, 5, 24


@torch.no_grad()
def main() -> None:
    """Write the file."""
    tokens = torch.tensor(np.random.default_rng(SEED).integers(0, 64, (1, PROMPT + STEPS)))
    press = kvpress.DecodingPress(kvpress.KnormPress(), compression_interval=INTERVAL, target_size=BUDGET)
    model, cache, logits, kept = tiny_model("sdpa"), DynamicCache(), [], []
    every = [torch.zeros(0) for _ in model.model.layers]  # of each layer the keys of all positions [H, T, D]

    def note(module: torch.nn.Module, given: tuple, named: dict, out: object) -> None:
        """Note the newest keys, before the press sees them."""
        keys = cache.layers[module.layer_idx].keys[0]
        seen = every[module.layer_idx]
        every[module.layer_idx] = torch.cat([seen, keys[:, -1:]], dim=1) if len(seen) else keys

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(note, with_kwargs=True)
    with press(model):
        model(tokens[:, :PROMPT], past_key_values=cache)
        for at in range(PROMPT, PROMPT + STEPS):
            out = model(tokens[:, at : at + 1], past_key_values=cache, position_ids=torch.tensor([[at]]))
            logits.append([round(x, 6) for x in out.logits[0, -1].tolist()])
    for layer, seen in zip(cache.layers, every, strict=True):
        apart = (layer.keys[0][:, :, None] - seen[:, None]).abs().amax(dim=3)
        assert apart.min(dim=2).values.max() < 1e-6
        kept.append([sorted(head) for head in apart.argmin(dim=2).tolist()])
        assert all(len(set(head)) == BUDGET + STEPS % INTERVAL for head in kept[-1])
    golden = {
        "tokens": tokens[0].tolist(), "prompt": PROMPT, "interval": INTERVAL, "budget": BUDGET, "kept": kept,
        "logits": logits,
    }  # fmt: skip
    write("decoding", golden)


if __name__ == "__main__":
    main()
