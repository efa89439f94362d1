"""GGUF files of Gemma 3, gpt-oss and Phi-3 against the goldens of `test_families.py`, and SentencePiece tokenizers.

The files are written here from llama.cpp's conversion script, not with the code under test.
"""

from __future__ import annotations

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers import models as kinds

import models
from models.files import gguf as gguf_files
from models.files.tables.checkpoint import checkpoint_table
from tests.models import gguf_writing
from tests.models.test_families import assert_close, golden, write_checkpoint
from tests.tiny_models import run

pytestmark = pytest.mark.usefixtures("quick_compile")

ARCHITECTURES = {"gemma3_text": "gemma3", "gpt_oss": "gpt-oss", "phi3": "phi3"}


def tensors(hf, weights):
    """The tensors of a checkpoint as llama.cpp stores them, by name."""
    made = {}
    for name, value in weights.items():
        stem, _, end = name.rpartition(".")
        if name.endswith(".sinks"):
            stem, end = name, "weight"
        if stem in gguf_writing.TOP:
            made[f"{gguf_writing.TOP[stem]}.{end}"] = value + (hf["model_type"] == "gemma3_text" and "norm" in stem)
            continue
        _, _, layer, rest = stem.split(".", 3)
        block = f"blk.{layer}."
        if rest == "mlp.experts":  # gate_up_proj, down_proj, and their biases
            bias = end.endswith("_bias")
            kind, value = "bias" if bias else "weight", value if bias else value.swapaxes(1, 2)
            parts = {"gate": value[:, 0::2], "up": value[:, 1::2]} if end.startswith("gate_up") else {"down": value}
            made |= {f"{block}ffn_{part}_exps.{kind}": np.ascontiguousarray(x) for part, x in parts.items()}
        elif rest == "post_attention_layernorm":
            made[block + ("ffn_norm" if hf["model_type"] == "phi3" else "post_attention_norm") + ".weight"] = value
        else:
            made[f"{block}{gguf_writing.NAMES[rest]}.{end}"] = value
    if hf["model_type"] == "gemma3_text":  # their conversion adds 1 to every norm
        made = {name: x + 1 if name.startswith("blk.") and "norm" in name else x for name, x in made.items()}
    return made


def metadata(hf):
    """The metadata of a model from its config.json."""
    arch, dim = ARCHITECTURES[hf["model_type"]], hf["head_dim"]
    values = gguf_writing.metadata({**hf, "model_type": arch, "rope_parameters": None, "sliding_window": None})
    rope = hf["rope_parameters"]
    values[f"{arch}.attention.sliding_window"] = hf["sliding_window"] or 0
    if arch == "gemma3":
        full, near = rope["full_attention"], rope["sliding_attention"]
        values |= {f"{arch}.rope.freq_base": full["rope_theta"], f"{arch}.rope.freq_base_swa": near["rope_theta"],
                   f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": full["factor"]}  # fmt: skip
    if arch == "gpt-oss":
        values |= {
            f"{arch}.rope.freq_base": rope["rope_theta"], f"{arch}.rope.scaling.type": "yarn",
            f"{arch}.rope.scaling.factor": rope["factor"],
            f"{arch}.rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            f"{arch}.expert_count": hf["num_local_experts"], f"{arch}.expert_used_count": hf["num_experts_per_tok"],
            f"{arch}.expert_feed_forward_length": hf["intermediate_size"],
        }  # fmt: skip
    if arch == "phi3":
        values |= {f"{arch}.rope.freq_base": rope["rope_theta"],
                   f"{arch}.rope.dimension_count": int(dim * rope["partial_rotary_factor"])}  # fmt: skip
    return values


def as_gguf(tmp_path, name, **changes):
    """A golden's model as a checkpoint in ``tmp_path/hf`` and as a file; its config.json, with ``changes``."""
    write_checkpoint(tmp_path / "hf", golden(name))
    hf = json.loads(str(golden(name)["config"])) | changes
    (tmp_path / "hf" / "config.json").write_text(json.dumps(hf))
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    values, stored = metadata(hf), tensors(hf, weights)
    if hf["rope_parameters"].get("rope_type") == "longrope":
        for kind in ("long", "short"):
            stored[f"rope_factors_{kind}.weight"] = np.array(hf["rope_parameters"][f"{kind}_factor"], np.float32)
        values["phi3.rope.scaling.original_context_length"] = hf["original_max_position_embeddings"]
    gguf_writing.write(tmp_path / "x.gguf", values, stored)
    return hf


# What a file does not say: every sixth layer of Gemma 3 is full, its scale is of its heads, gpt-oss clamps at 7 and its YaRN
# has the usual bounds.
CHANGES = {
    "gemma3_text": {"layer_types": ["sliding_attention"] * 3, "query_pre_attn_scalar": 8},
    "gpt_oss": {
        "swiglu_limit": 7.0, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "truncate": False,
                            "original_max_position_embeddings": 16},
    },
    "phi3": {},
    "phi4_longrope": {},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_is_the_checkpoint_it_was_made_of(name, tmp_path):
    """The config and the logits; the checkpoints are compared with transformers in `test_families.py`."""
    as_gguf(tmp_path, name, **CHANGES[name])
    (params, config), (wanted, of_hf) = models.from_pretrained(tmp_path / "x.gguf"), models.from_pretrained(tmp_path / "hf")
    numbers = {"eos_token_ids": (), "dtype": "float32"}
    assert vars(config) | numbers == vars(of_hf) | numbers
    tokens = jnp.asarray(golden(name)["tokens"][:1], jnp.int32)
    assert_close(run(config, params, tokens), np.asarray(run(of_hf, wanted, tokens)))


def test_a_converted_file_is_the_checkpoint_again(tmp_path):
    """Norms lose the 1 that files of Gemma add."""
    as_gguf(tmp_path, "gemma3_text", **CHANGES["gemma3_text"])
    file = gguf_files.open_file(tmp_path / "x.gguf")
    config = gguf_files.read_config(file)
    found = gguf_files.GGUFTensors.of(file, config, checkpoint_table(config))
    for name, value in load_file(tmp_path / "hf" / "model.safetensors").items():
        np.testing.assert_allclose(found.read(name, np.dtype(np.float32)), value, atol=2e-7, err_msg=name)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gemma3_text", "gemma3.rope.scaling.type", "yarn"), ("gemma3_text", "gemma3.attention.sliding_window_pattern", 4),
        ("gpt_oss", "gpt-oss.expert_count", 0), ("gpt_oss", "gpt-oss.expert_used_count", "2"),
        ("phi4_longrope", "phi3.rope.scaling.attn_factor", 3.0), ("phi3", "phi3.attn_logit_softcapping", 3.0),
    ],
)  # fmt: skip
def test_what_a_file_may_not_ask_for_is_named(name, key, value, tmp_path):
    hf = as_gguf(tmp_path, name, **CHANGES[name])
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    file = gguf_files.open_file(tmp_path / "x.gguf")
    factors = {key: file.read(key, np.dtype(np.float32)) for key in file.tensors if key.startswith("rope_factors")}
    old = {key: file.metadata[key] for key in file.metadata if "original_context_length" in key}
    gguf_writing.write(tmp_path / "y.gguf", metadata(hf) | old | {key: value}, {**tensors(hf, weights), **factors})
    with pytest.raises(ValueError, match="num_local_experts" if value == 0 else key):
        models.from_pretrained(tmp_path / "y.gguf")


PIECES = {  # piece -> score; the pair of the highest score is merged first
    "<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, **{f"<0x{byte:02X}>": 0.0 for byte in range(256)},
    "\u2581": -9.0, "a": -10.0, "b": -11.0, "c": -12.0, "ab": -2.0, "bc": -1.0, "abc": -3.0, "\u2581a": -4.0,
    "\u2581\u2581": -5.0, "\u2581abc": -6.0, "<mark>": 0.0,
}  # fmt: skip
TYPES = [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 260), 4]


def words(model, **values):
    return {
        "general.architecture": "llama", "tokenizer.ggml.model": model, "tokenizer.ggml.tokens": list(PIECES),
        "tokenizer.ggml.scores": list(PIECES.values()), "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in values.items()},
    }  # fmt: skip


def opened(tmp_path, values):
    gguf_writing.write(tmp_path / "x.gguf", values, {})
    return gguf_files.open_file(tmp_path / "x.gguf")


def bpe(text):
    """SentencePiece's merging in a loop: of all neighbours that are a piece together, the two of the highest score."""
    parts = list(text)
    while True:
        pairs = [(PIECES[a + b], -at) for at, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in PIECES]
        if not pairs:
            return [piece for x in parts for piece in ([x] if x in PIECES else [f"<0x{byte:02X}>" for byte in x.encode()])]
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


TEXTS = ["abc", "a bc  ab", "abcabc é\n", "", "  ", "cab"]


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_merged_as_sentencepiece_merges_them(prefix, tmp_path):
    tokenizer = gguf_files.build_tokenizer(opened(tmp_path, words("llama", add_space_prefix=prefix)))
    for text in TEXTS:
        spaced = ("\u2581" * (prefix and text != "")) + text.replace(" ", "\u2581")
        got = tokenizer.encode(text)
        assert got.tokens == ["<s>", *bpe(spaced)], text
        assert tokenizer.decode(got.ids) == text
    assert tokenizer.encode("ab<mark>", add_special_tokens=False).tokens[-1] == "<mark>"


def test_unigram_takes_the_best_division(tmp_path):
    """Against the same model in the library's own terms."""
    tokenizer = gguf_files.build_tokenizer(opened(tmp_path, words("t5", add_bos_token=False)))
    plain = Tokenizer(kinds.Unigram(list(PIECES.items()), 0, True))
    plain.normalizer = normalizers.Replace(" ", "\u2581")
    plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    plain.decoder = decoders.Metaspace()
    for text in ("abc", "a bc ab", "cab abc"):
        assert tokenizer.encode(text).ids == plain.encode(text).ids, text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.scores": [0.5]}, "the tokenizer must have a score and a type for each of"),
        ({"tokenizer.ggml.scores": None}, "the tokenizer lacks tokenizer.ggml.scores"),
        ({"tokenizer.ggml.model": "bert"}, "unsupported tokenizer model 'bert' (WordPiece), expected 'gpt2'"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_refused(change, message, tmp_path):
    values = {key: value for key, value in (words("llama") | change).items() if value is not None}
    with pytest.raises(ValueError, match=re.escape(message)):
        gguf_files.build_tokenizer(opened(tmp_path, values))
