"""What thunlp/InfLLM computes in one layer, on random queries, keys and values.

Run with torch installed and a clone of thunlp/InfLLM at 12b7079::

    python -m experiments.lab.goldens.infllm PATH_OF_THE_CLONE

It writes ``infllm.json``: ``seed`` and the sizes H, G, T, D of `arrays`, ``prompt``, ``base`` of RoPE, ``knobs`` in kvjax's
names, and ``out`` [H, G, T, D], of which the first ``prompt`` tokens are read together and the others one by one.

The code wants a GPU: its arrays are put on the processor here, and its events and streams do nothing. One line is changed.
Where a query stands among the tokens behind the window is counted from the end of all tokens that are given; it is counted
from the end of those that were read before. Without that, a token that leaves the window within a chunk of the prompt is
attended twice by the queries that are near to it.
"""

from __future__ import annotations

import contextlib
import sys
import types
from pathlib import Path

import numpy as np
import torch

from experiments.lab.goldens import write

KNOBS = {"budget": 8, "num_sink": 2, "num_local": 8, "block_size": 4, "num_repr": 2, "chunk": 8}
SIZES, PROMPT, BASE, SEED = (2, 2, 44, 8), 31, 100.0, 20261123
COUNTED = "self.global_remainder[0].size(-2) + rmd_st"
RIGHT = "self._global_remainder_ed - self._global_remainder_st + rmd_st"


def arrays(seed: int, heads: int, group: int, tokens: int, dim: int) -> tuple[np.ndarray, ...]:
    """Random q [H, G, T, D], k and v [H, T, D]."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(heads, group, tokens, dim)) * 1.5, *rng.normal(size=(2, heads, tokens, dim))


def module(path: Path, known: dict[str, object], changes: dict[str, str]) -> types.SimpleNamespace:
    """The names of a file of the clone, read with some changes and without its imports from beside it."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("from ."))
    for old, new in changes.items():
        assert old in text, f"{path}: expected {old!r}"
        text = text.replace(old, new)
    names = dict(known)
    exec(compile(text, str(path), "exec"), names)
    return types.SimpleNamespace(**names)


def main(clone: str) -> None:
    """Write the file."""
    torch.set_default_dtype(torch.float64)
    folder = Path(clone) / "inf_llm" / "attention"
    event = types.SimpleNamespace(record=lambda *_: None, wait=lambda *_: None)
    cuda = types.SimpleNamespace(Event=lambda: event, current_stream=lambda: None, stream=lambda _: contextlib.nullcontext())
    base = module(folder / "dot_production_attention" / "base.py", {}, {})
    plain = module(
        folder / "dot_production_attention" / "torch_impl.py",
        {"MultiStageDotProductionAttention": base.MultiStageDotProductionAttention},
        {},
    )
    rope = module(folder / "rope.py", {}, {'"cuda"': '"cpu"'})
    manager = module(
        folder / "context_manager.py",
        {
            "cuda": cuda,
            "get_multi_stage_dot_production_attention": lambda _: (plain.TorchMultiStageDotProductionAttention, False),
        },
        {'"cuda"': '"cpu"', "'cuda'": "'cpu'", "torch.cuda.": "cuda.", "assert _t.is_cuda": "pass", COUNTED: RIGHT},
    )
    heads, group, tokens, dim = SIZES
    angles = rope.RotaryEmbeddingESM(dim, BASE, 1.0)
    angles.inv_freq = 1 / BASE ** (torch.arange(0, dim, 2) / dim)
    layer = manager.ContextManager(
        angles, KNOBS["num_sink"], KNOBS["num_local"], KNOBS["block_size"], 2 * tokens,
        KNOBS["budget"] // KNOBS["block_size"], KNOBS["chunk"], repr_topk=KNOBS["num_repr"],
    )  # fmt: skip
    q, k, v = (torch.tensor(x) for x in arrays(SEED, *SIZES))
    given = q.reshape(1, heads * group, tokens, dim), k[None], v[None]
    out, first = [], 0
    for end in range(PROMPT, tokens + 1):
        piece = [x[:, :, first:end] for x in given]
        out.append(layer.append(*piece, *piece))
        first = end
    made = torch.cat(out, dim=2).reshape(SIZES).numpy().round(7).tolist()
    golden = {"seed": SEED, "sizes": SIZES, "prompt": PROMPT, "base": BASE, "knobs": KNOBS, "out": made}
    write("infllm", golden)


if __name__ == "__main__":
    main(sys.argv[1])
