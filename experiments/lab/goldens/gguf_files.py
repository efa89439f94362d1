"""Golden outputs of transformers' own GGUF loading: tiny quantised files, a tiny tokenizer, and SmolLM2-135M-Instruct.

Run with torch, transformers, accelerate and gguf installed; the argument is the GGUF file of SmolLM2::

    python -m experiments.lab.goldens.gguf_files SmolLM2-135M-Instruct.Q4_1.gguf

It writes beside itself

* ``<family>.npz``: ``gguf`` (the bytes of a GGUF file), ``tokens`` int64 [B, T], ``logits`` float32 [B, T, V], and
  ``sums``: JSON of the sha256 of every tensor that transformers read from the file, in float32;
* ``tokens.json``: the tokens and merges of a small byte-level tokenizer, texts, and for each ``tokenizer.ggml.pre`` that
  transformers applies their ids; those of ``smollm`` with the pre-tokenizer of SmolLM2's own ``tokenizer.json`` set by hand,
  because transformers ignores this kind;
* ``smollm2.json``: of the real model with its weights rounded to bfloat16: sums of the float32 numbers, the largest logits
  after a prompt, its greedy answer; and token ids of texts.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models

from experiments.lab.goldens import FOLDER
from tests.models import gguf_writing
from tests.models.gguf_writing import QUANTS

HERE = FOLDER / "models" / "gguf"

SEED = 20261123
BATCH, LENGTH = 2, 24
# Rows of 32 numbers are whole blocks of these types.
KINDS = (QUANTS.Q4_0, QUANTS.Q4_1, QUANTS.Q5_0, QUANTS.Q5_1, QUANTS.Q8_0, QUANTS.F16, QUANTS.BF16)
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "attn_implementation": "eager",
}  # fmt: skip
FAMILIES = {  # name -> (class prefix in transformers, what differs from TINY)
    "llama": ("Llama", {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    # llama.cpp writes Mistral as llama; its heads need not add up to the hidden size.
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    # transformers takes no head_dim from such a file: 128 is the default of its class.
    "qwen3": ("Qwen3", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "num_hidden_layers": 1}),
}
DIGITS = ["0", "7", "42", "123", "1234", "12345678", "3.14", "v1.2.3", "07:45", "2024-11-23", "$1,234.56", "x1y22z333"]
TEXTS = [
    "", " ", "a", "  two  spaces ", "tabs\tand\n\nlines \n x", "don't WON'T I'll we've he'd it's", "Hello, World!  (ok?)",
    "snake_case camelCase HTTPServer", "(`a`) $5 ~x", "a/b\n//c",
    "über Straße naïve café", "中文字符和English混合",
    "日本語テキスト", "Ünï©ödé ½ ² ①",
    "emoji 😀👍🏽 end", "a+b=c; if (x<=3) { return -1; }", "....!!??--", "\r\nwindows\r\n",
    "مرحبا بالعالم", "русский текст 99", "<|im_start|>user\nhi 5<|im_end|>", "the number is 8675309.",
    "the number is  8675309 .", *DIGITS,
]  # fmt: skip
APPLIED = ("gpt-2", "llama-bpe", "dbrx", "qwen2", "tekken")  # the kinds that transformers applies


def digest(array: np.ndarray) -> str:
    """The first 16 digits of the sha256 of an array's float32 bytes."""
    return hashlib.sha256(np.ascontiguousarray(array, np.float32).tobytes()).hexdigest()[:16]


def sums(model: torch.nn.Module) -> dict[str, str]:
    """The digest of every parameter by name; tied parameters appear once."""
    return {name: digest(value.detach().numpy()) for name, value in sorted(model.named_parameters())}


def family(name: str, seed: int, folder: Path) -> dict[str, np.ndarray]:
    """Everything one file holds: a random model, quantised, and what transformers computes from the file."""
    prefix, overrides = FAMILIES[name]
    config = getattr(transformers, f"{prefix}Config")(**{**TINY, **overrides})
    source = getattr(transformers, f"{prefix}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for key, value in sorted(source.named_parameters()):
        noise = torch.randn(value.shape, generator=generator)
        weights[key] = (1 + 0.2 * noise if "norm" in key else 0.25 * noise).numpy()
    hf = json.loads(config.to_json_string(use_diff=False))
    tensors = gguf_writing.stored(hf, weights)
    matrices = [key for key, value in tensors.items() if value.ndim == 2]
    kinds = {key: KINDS[i % len(KINDS)] for i, key in enumerate(matrices)}
    gguf_writing.write(folder / "tiny.gguf", gguf_writing.metadata(hf), tensors, kinds)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="tiny.gguf", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.randint(0, TINY["vocab_size"], (BATCH, LENGTH), generator=generator)
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    return {
        "gguf": np.frombuffer((folder / "tiny.gguf").read_bytes(), np.uint8),
        "tokens": tokens.numpy(),
        "logits": logits.numpy(),
        "sums": np.array(json.dumps(sums(model))),
    }


def their_tokenizer(folder: Path, file: str, pre: str) -> Tokenizer:
    """Transformers' tokenizer of a GGUF file, with the rule of ``smollm`` where the file names it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file).backend_tokenizer
    if pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def tokens(folder: Path) -> dict:
    """A small tokenizer, and the ids of the texts under each kind."""
    small = Tokenizer(tokenizer_models.BPE())
    small.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # merges over every boundary
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    prose = Path(__file__).read_text(encoding="utf-8").splitlines(keepends=True)
    small.train_from_iterator([text for text in [*TEXTS * 3, *prose] if "<|" not in text and "unmerged" not in text], trainer)
    state = json.loads(small.to_str())["model"]
    vocabulary = sorted(state["vocab"], key=state["vocab"].get)
    merges = [" ".join(merge) for merge in state["merges"]]
    # Kinds that keep whole words find the first, which transformers leaves out: it is in no text.
    vocabulary += ["unmerged", "<|im_start|>", "<|im_end|>"]
    kinds = [1] * (len(vocabulary) - 2) + [3, 3]
    found = {}
    for pre in (*APPLIED, "smollm"):
        values = gguf_writing.tokenizer_metadata(vocabulary, merges, pre, kinds, eos_token_id=len(vocabulary) - 1)
        gguf_writing.write(folder / "t.gguf", {"general.architecture": "llama", **values}, {"a": np.zeros(1, np.float32)})
        tokenizer = their_tokenizer(folder, "t.gguf", pre)
        found[pre] = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    return {"tokens": vocabulary, "merges": merges, "kinds": kinds, "texts": TEXTS, "ids": found}


def real(path: Path) -> dict:
    """What transformers reads from the real file."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = their_tokenizer(path.parent, path.name, "smollm")
    plain = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    prompt = plain.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    with torch.no_grad():
        for value in model.parameters():  # the weights that a converted directory holds
            value.copy_(value.to(torch.bfloat16).float())
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        greedy = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    best = torch.topk(logits, 64)
    script = Path(__file__).read_text(encoding="utf-8")
    texts = [*TEXTS, *script.splitlines()[:120]]
    return {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "sums": sums(model),
        "prompt": prompt,
        "best": best.indices.tolist(),
        "logits": [round(value, 5) for value in best.values.tolist()],
        "greedy": greedy.tolist(),
        "texts": texts,
        "ids": [tokenizer.encode(text, add_special_tokens=False).ids for text in texts],
    }


def main() -> None:
    """Write all files beside this script."""
    for index, name in enumerate(FAMILIES):
        with tempfile.TemporaryDirectory() as folder:
            path = HERE / f"{name}.npz"
            np.savez_compressed(path, **family(name, SEED + index, Path(folder)))
    with tempfile.TemporaryDirectory() as folder:
        HERE.joinpath("tokens.json").write_text(json.dumps(tokens(Path(folder)), ensure_ascii=False), encoding="utf-8")
    found = real(Path(sys.argv[1]))
    HERE.joinpath("smollm2.json").write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    for path in sorted([*HERE.glob("*.npz"), *HERE.glob("*.json")]):
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} KB, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
