"""RoPE frequencies and attention factors as ``transformers`` computes them, for rules as they stand in ``config.json``.

Run with torch and transformers installed::

    python -m experiments.lab.goldens.rope

``rope.json`` is a list of cases: ``hf`` (a config.json), ``length`` (tokens of the text, or null), ``inv_freq`` (D/2 numbers)
and ``attention_factor``.
"""

from __future__ import annotations

import copy
import json

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from experiments.lab.goldens import FOLDER

BASE = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}  # fmt: skip
OLD = {"original_max_position_embeddings": 1024}
SHORT = [1.0 + 0.05 * i for i in range(16)]
LONG = [1.0 + 0.3 * i * i for i in range(16)]
CASES = [  # the rule, what differs in the config, the length
    ({"rope_type": "linear", "factor": 4.0}, {}, None),
    ({"rope_type": "yarn", "factor": 4.0, **OLD}, {}, None),
    ({"rope_type": "yarn", "factor": None, **OLD}, {}, None),
    ({"rope_type": "yarn", "factor": 8.0}, {}, None),
    ({"rope_type": "yarn", "factor": 4.0, **OLD, "attention_factor": 0.75}, {}, None),
    ({"rope_type": "yarn", "factor": 40.0, **OLD, "mscale": 1.0, "mscale_all_dim": 0.7}, {}, None),
    ({"rope_type": "yarn", "factor": 40.0, **OLD, "mscale": 0.707}, {}, None),
    ({"rope_type": "yarn", "factor": 4.0, **OLD, "beta_fast": 4.0, "beta_slow": 3.9, "truncate": False}, {}, None),
    ({"rope_type": "yarn", "factor": 4.0, **OLD, "beta_fast": 0, "beta_slow": 2}, {"rope_theta": 1e6}, None),
    ({"rope_type": "yarn", "factor": 1.0, **OLD}, {"original_max_position_embeddings": 2048}, None),
    ({"rope_type": "dynamic", "factor": 2.0}, {}, 1000),
    ({"rope_type": "dynamic", "factor": 2.0}, {}, 4097),
    ({"rope_type": "dynamic", "factor": 8.0}, {}, 20000),
    ({"rope_type": "longrope", **OLD, "short_factor": SHORT, "long_factor": LONG}, {}, 1024),
    ({"rope_type": "longrope", **OLD, "short_factor": SHORT, "long_factor": LONG}, {}, 1025),
    ({"rope_type": "longrope", **OLD, "short_factor": SHORT, "long_factor": LONG, "factor": 32.0}, {}, 9),
    ({"rope_type": "longrope", **OLD, "short_factor": SHORT, "long_factor": LONG, "attention_factor": 1.5}, {}, 9),
    ({"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 0.5}, {}, 5000),
    ({"rope_type": "llama3", "factor": 8.0, **OLD, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, {}, None),
]


def main() -> None:
    """Write the file."""
    made = []
    for rule, changes, length in CASES:
        hf = {**BASE, **changes, "rope_scaling": rule}
        config = transformers.LlamaConfig(**{key: x for key, x in copy.deepcopy(hf).items() if key != "model_type"})
        seen = None if length is None else torch.tensor(length)
        frequencies, factor = ROPE_INIT_FUNCTIONS[rule["rope_type"]](config, None, seq_len=seen)
        made.append({"hf": hf, "length": length, "inv_freq": frequencies.tolist(), "attention_factor": float(factor)})
    lines = ",\n".join(json.dumps(case) for case in made)
    (FOLDER / "models" / "rope.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
