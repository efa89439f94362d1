"""What NVIDIA/kvpress keeps of a prompt, and the logits after it, on the tiny random model of ``tests/goldens/models``.

Run with kvpress (8bb29b9, on torch and transformers 5.2) installed::

    python -m experiments.lab.goldens.kvpress

It writes ``kvpress.json``: ``tokens`` int [P + N], of which the first P = `PROMPT` are the prompt that is compressed and the
others follow one by one; and for each method ``kept``, the positions that each KV head of each layer keeps of the prompt, and
``logits`` [N, V], float32, after each of the others. Where a press drops channels of keys, it writes ``channels`` in place of
``kept``, those that each KV head of each layer keeps.
"""

from __future__ import annotations

import json

import kvpress
import numpy as np
import torch
from kvpress.presses import kvzip_press
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from experiments.lab.goldens import FOLDER, write

SEED = 20261123
PROMPT, STEPS, BUDGET = 64, 3, 24
RATIO = 1 - (BUDGET + 0.5) / PROMPT  # kvpress rounds what it keeps down
SCORES = [[0.3, 0.9], [0.1, 0.2]]  # of the KV heads, for DuoAttention


class ScoredHeads(kvpress.DuoAttentionPress):
    """DuoAttentionPress with `SCORES` in place of those it would load."""

    def load_attention_pattern(self, model: object) -> tuple:
        """Sinks, recent tokens, and the scores."""
        return 6, 10, np.array(SCORES)


PRESSES = {  # name -> (the press, whether it needs the map of all probabilities)
    "snapkv": (lambda: kvpress.SnapKVPress(RATIO, window_size=8, kernel_size=5), False),
    "tova": (lambda: kvpress.TOVAPress(RATIO), False),
    "knorm": (lambda: kvpress.KnormPress(RATIO), False),
    "observedattention": (lambda: kvpress.ObservedAttentionPress(RATIO), True),
    "expectedattention": (lambda: kvpress.ExpectedAttentionPress(RATIO, n_future_positions=20), False),
    "keydiff": (lambda: kvpress.KeyDiffPress(RATIO), False),
    # Its last layer keeps half of the mean, the window included.
    "pyramidkv": (lambda: kvpress.PyramidKVPress(1 - BUDGET / PROMPT, window_size=8, kernel_size=5, beta=2), False),
    "duoattention": (lambda: ScoredHeads(0.5), False),
    "adakv": (lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(RATIO, window_size=8, kernel_size=5), 0.5), False),
}
THIN = {  # presses that drop channels of keys
    "think": lambda: kvpress.ThinKPress(0.4, window_size=8),
    "snapkv and think": lambda: kvpress.ComposedPress([PRESSES["snapkv"][0](), kvpress.ThinKPress(0.4, window_size=8)]),
}

TEXTS = {  # what KVzip reads beside the prompt, in chunks of `CHUNK` tokens: token ids
    "\n\nRepeat the previous context exactly.": [5, 9, 11],
    "\n\nRepeat the part of the previous context exactly, starting with": [7, 2],
    "before": [0] * 4,
    "after": [3, 8],
}
CHUNK = 20


class Words:
    """A tokenizer that knows `TEXTS`."""

    chat_template = "before, the message, after"

    def apply_chat_template(self, messages: list, **options: object) -> str:
        """One message between its texts."""
        return f"before{messages[0]['content']}after"

    def encode(self, text: str, **options: object) -> torch.Tensor:
        """The token ids of one of the texts."""
        return torch.tensor([TEXTS[text]])


class ShortKVzip(kvpress.KVzipPress):
    """KVzipPress in chunks of `CHUNK` tokens."""

    def prepare(self, model: object, tokenizer: object) -> list:
        """The chunks."""
        return super().prepare(model, tokenizer, chunk_size=CHUNK)


TWICE = {  # presses that read the prompt twice
    "kvzip": lambda: ShortKVzip(1 - BUDGET / PROMPT),
    "kvzip layerwise": lambda: ShortKVzip(1 - BUDGET / PROMPT, layerwise=True),
}


def tiny_model(attention: str) -> LlamaForCausalLM:
    """The model whose weights ``llama.npz`` holds."""
    golden = np.load(FOLDER / "models" / "llama.npz")
    given = json.loads(str(golden["config"]))
    sizes = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    )  # fmt: skip
    config = LlamaConfig(**{name: given[name] for name in sizes}, attn_implementation=attention)
    model = LlamaForCausalLM(config).eval()
    weights = {
        name.removeprefix("weight:"): torch.tensor(golden[name].astype(np.float32))
        for name in golden
        if name.startswith("weight:")
    }
    model.load_state_dict(weights)
    return model


@torch.no_grad()
def run(make: object, needs_map: bool, tokens: torch.Tensor) -> dict:
    """One press: the positions that are kept, and the logits of the tokens behind the prompt."""
    model = tiny_model("eager" if needs_map else "sdpa")
    dense, cache = DynamicCache(), DynamicCache()
    model(tokens[:, :PROMPT], past_key_values=dense)
    with make()(model):
        model(tokens[:, :PROMPT], past_key_values=cache)
    kept = []
    for layer, decoder in enumerate(model.model.layers):
        every, left = dense.layers[layer].keys[0], cache.layers[layer].keys[0]
        masked = getattr(decoder.self_attn, "masked_key_indices", None)
        held = [set(range(PROMPT)) for _ in every]
        if masked is not None:
            for head, slot in zip(masked[1].tolist(), masked[2].tolist(), strict=True):
                held[head].discard(slot)
        else:
            apart = (left[:, :, None] - every[:, None]).abs().amax(dim=3)
            assert apart.min(dim=2).values.max() < 1e-5
            held = [set(head.tolist()) for head in apart.argmin(dim=2)]
        kept.append([sorted(head) for head in held])
    return {"kept": kept, "logits": logits_after(model, cache, tokens)}


@torch.no_grad()
def run_thin(make: object, tokens: torch.Tensor) -> dict:
    """One press that drops channels: those that are left, and the logits of the tokens behind the prompt."""
    model, cache = tiny_model("sdpa"), DynamicCache()
    with make()(model):
        model(tokens[:, :PROMPT], past_key_values=cache)
    left = [[head.abs().amax(dim=0).nonzero()[:, 0].tolist() for head in layer.keys[0]] for layer in cache.layers]
    return {"channels": left, "logits": logits_after(model, cache, tokens)}


def logits_after(model: LlamaForCausalLM, cache: DynamicCache, tokens: torch.Tensor) -> list:
    """The logits of the tokens behind the prompt."""
    logits = []
    for at in range(PROMPT, PROMPT + STEPS):
        out = model(tokens[:, at : at + 1], past_key_values=cache, position_ids=torch.tensor([[at]]))
        logits.append([round(x, 6) for x in out.logits[0, -1].tolist()])
    return logits


def main() -> None:
    """Write the file."""
    tokens = torch.tensor(np.random.default_rng(SEED).integers(0, 64, (1, PROMPT + STEPS)))
    made = {name: run(make, needs_map, tokens) for name, (make, needs_map) in PRESSES.items()}
    thin = {name: run_thin(make, tokens) for name, make in THIN.items()}
    kvzip_press.AutoTokenizer.from_pretrained = lambda name: Words()
    twice = {name: run(make, False, tokens) for name, make in TWICE.items()}
    told = {"tokens": tokens[0].tolist(), "prompt": PROMPT, "methods": made, "thin": thin, "twice": twice}
    write("kvpress", told)


if __name__ == "__main__":
    main()
