"""GGUF files of Qwen3-Next against the checkpoint that they are made of.

The files are written here from llama.cpp's conversion script, not with the code under test. The checkpoint's own logits are
compared with transformers in `test_families.py`.
"""

from __future__ import annotations

import json
import re

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

import kvjax
import models
from models.files import gguf as gguf_files
from models.files.tables.checkpoint import checkpoint_table
from tests.models import gguf_writing
from tests.models.test_families import assert_close, golden
from tests.tiny_models import vivid_params

pytestmark = pytest.mark.usefixtures("quick_compile")
F32 = np.dtype(np.float32)
LINEAR, EXPERTS, ARCH = 3, 4, "qwen3next"


def config_json(**changes):
    """Three layers of linear attention, then one of attention; experts in all."""
    hf = json.loads(str(golden("qwen3_next")["config"]))
    kinds = ["linear_attention"] * LINEAR + ["full_attention"]
    return hf | {"num_hidden_layers": len(kinds), "layer_types": kinds, "mlp_only_layers": []} | changes


def heads_apart(hf, weight):
    """The rows of ``in_proj_qkvz`` in a loop over key heads: all queries, keys and values, and all gates."""
    count, key = hf["linear_num_key_heads"], hf["linear_key_head_dim"]
    value = hf["linear_num_value_heads"] // count * hf["linear_value_head_dim"]
    parts = [[], [], [], []]
    for head in np.split(weight, count):
        for rows, part in zip(parts, np.split(head, [key, 2 * key, 2 * key + value]), strict=True):
            rows.append(part)
    query, keys, values, gates = (np.concatenate(rows) for rows in parts)
    return np.concatenate([query, keys, values]), gates


def tensors(hf, weights, legacy=False):
    """The tensors of a checkpoint as llama.cpp stores them; ``legacy`` has the projections in one, and axes of one."""
    made = {}
    for name, value in weights.items():
        stem, _, end = name.rpartition(".")
        if name.endswith("norm.weight") and "linear_attn" not in name:
            value = value + 1
        if stem in gguf_writing.TOP:
            made[f"{gguf_writing.TOP[stem]}.{end}"] = value
            continue
        _, _, layer, rest = name.split(".", 3)
        block, kind = f"blk.{layer}.", rest.removesuffix(f".{end}")
        if "mlp.experts." in rest:
            _, _, index, which, _ = rest.split(".")
            stack = made.setdefault(
                f"{block}ffn_{which.removesuffix('_proj')}_exps.weight", np.empty((EXPERTS, *value.shape), F32)
            )
            stack[int(index)] = value
        elif end == "A_log":
            made[f"{block}ssm_a"] = -np.exp(value)
        elif end == "dt_bias":
            made[f"{block}ssm_dt.bias"] = value
        elif kind == "linear_attn.in_proj_qkvz" and legacy:
            made[f"{block}ssm_in.weight"] = value
        elif kind == "linear_attn.in_proj_qkvz":
            made[f"{block}attn_qkv.weight"], made[f"{block}attn_gate.weight"] = heads_apart(hf, value)
        else:
            alone = kind.endswith("conv1d") or (kind.endswith("shared_expert_gate") and not legacy)
            ours = "post_attention_norm" if kind == "post_attention_layernorm" else gguf_writing.NAMES[kind]
            made[f"{block}{ours}.{end}"] = value.squeeze() if alone else value
    return made


def metadata(hf):
    values = gguf_writing.metadata({**hf, "model_type": ARCH, "sliding_window": None})
    own = {
        "rope.dimension_count": int(hf["head_dim"] * hf["rope_parameters"]["partial_rotary_factor"]),
        "expert_count": hf["num_experts"], "expert_used_count": hf["num_experts_per_tok"],
        "expert_feed_forward_length": hf["moe_intermediate_size"],
        "expert_shared_feed_forward_length": hf["shared_expert_intermediate_size"],
        "ssm.conv_kernel": hf["linear_conv_kernel_dim"], "ssm.state_size": hf["linear_key_head_dim"],
        "ssm.group_count": hf["linear_num_key_heads"], "ssm.time_step_rank": hf["linear_num_value_heads"],
        "ssm.inner_size": hf["linear_value_head_dim"] * hf["linear_num_value_heads"],
        "full_attention_interval": LINEAR + 1,
    }  # fmt: skip
    return values | {f"{ARCH}.{key}": value for key, value in own.items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny random model in Hugging Face layout: its directory, config.json and tensors."""
    folder, hf = tmp_path_factory.mktemp("next") / "hf", config_json()
    config = models.ModelConfig.from_hf(hf, "float32")
    models.save_pretrained(folder, vivid_params(config), config)
    return folder, hf, load_file(folder / "model.safetensors")


def write(path, hf, stored, kinds=None, **changes):
    values = metadata(hf) | {f"{ARCH}.{key}": value for key, value in changes.items()}
    gguf_writing.write(path, {key: value for key, value in values.items() if value is not None}, stored, kinds)
    return path


def logits(params, config):
    """After a ragged prompt, and after each of three tokens more."""
    tokens = golden("qwen3_next")["tokens"]
    rows = [tokens[0, :11].astype(np.int32), tokens[1, :5].astype(np.int32)]
    cache = kvjax.prefill(params, rows, config=config, method="full", max_new_tokens=4)
    made = [np.asarray(cache.logits)]  # the next step takes the cache's arrays
    for step in range(3):
        cache = kvjax.decode_step(params, cache, np.array([3 + step, 9 - step], np.int32))
        made.append(np.asarray(cache.logits))
    return np.stack(made)


def test_prompt_and_decode_equal_the_checkpoint(checkpoint, tmp_path):
    folder, hf, weights = checkpoint
    path = write(tmp_path / "x.gguf", hf, tensors(hf, weights))
    (params, config), (wanted, of_hf) = models.from_pretrained(path), models.from_pretrained(folder)
    numbers = {"eos_token_ids": (), "dtype": "float32"}
    assert vars(config) | numbers == vars(of_hf) | numbers
    assert config.linear.layers == tuple(range(LINEAR))
    assert_close(logits(params, of_hf), logits(wanted, of_hf))  # one config compiles once


@pytest.mark.parametrize("legacy", [False, True])
def test_every_tensor_is_the_checkpoint_s_again(legacy, checkpoint, tmp_path):
    """With a layer more, which predicts the token after the next and is not read, and with llama.cpp's own interval of 4."""
    _, hf, weights = checkpoint
    stored = tensors(hf, weights, legacy) | {"blk.4.nextn.eh_proj.weight": np.ones((16, 32), F32)}
    path = write(tmp_path / "x.gguf", hf, stored, block_count=5, nextn_predict_layers=1, full_attention_interval=None)
    file = gguf_files.open_file(path)
    config = gguf_files.read_config(file)
    assert config.num_layers == LINEAR + 1
    found = gguf_files.GGUFTensors.of(file, config, checkpoint_table(config))
    for name, value in weights.items():
        np.testing.assert_allclose(found.read(name, F32), value, atol=5e-7, err_msg=name)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0])
def test_quantised_matrices_are_decoded(kind, tmp_path):
    """The file's own numbers: as if the checkpoint had been rounded first."""
    hf = config_json(hidden_size=32, moe_intermediate_size=32)
    config = models.ModelConfig.from_hf(hf, "float32")
    models.save_pretrained(tmp_path / "hf", vivid_params(config), config)
    stored = tensors(hf, load_file(tmp_path / "hf" / "model.safetensors"))
    kinds = {name: kind for name, x in stored.items() if x.ndim > 1 and x.shape[-1] == 32}
    assert {"blk.0.attn_qkv.weight", "blk.0.attn_gate.weight", "blk.0.ffn_down_exps.weight"} <= set(kinds)

    def rounded(value):
        half = kind.name == "F16"
        return value.astype(np.float16).astype(F32) if half else gguf.dequantize(gguf.quantize(value, kind), kind)

    first = write(tmp_path / "coded.gguf", hf, stored, kinds)
    plainly = {name: rounded(x) if name in kinds else x for name, x in stored.items()}
    second = write(tmp_path / "plain.gguf", hf, plainly)
    table = checkpoint_table(config)
    coded, plain = (gguf_files.GGUFTensors.of(gguf_files.open_file(path), config, table) for path in (first, second))
    for leaf in table:
        for name in leaf.names:
            np.testing.assert_array_equal(coded.read(name, F32), plain.read(name, F32), err_msg=name)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ssm.state_size", None), ("rope.dimension_count", None), ("expert_count", 0), ("full_attention_interval", 0),
        ("ssm.inner_size", 25), ("ssm.conv_kernel", 4.0), ("expert_gating_func", 2), ("expert_weights_norm", False),
        ("attention.recurrent_layers", [True] * 4), ("rope.scaling.type", "yarn"), ("nextn_predict_layers", -1.0),
        ("nextn_predict_layers", 4),
    ],
)  # fmt: skip
def test_what_a_file_may_not_ask_for_is_named(key, value, tmp_path):
    tensors = {"token_embd.weight": np.ones((32, 16), F32)} | {f"x{i}": np.ones(1, F32) for i in range(9)}
    path = write(tmp_path / "x.gguf", config_json(), tensors, **{key: value})
    with pytest.raises(ValueError, match=f"x.gguf: .*qwen3next.{key}"):
        gguf_files.read_config(gguf_files.open_file(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blk.0.attn_gate.weight": None}, "missing blk.0.attn_gate.weight [24, 16]"),
        ({"blk.1.ssm_conv1d.weight": np.ones((64, 3), F32)}, "misshaped blk.1.ssm_conv1d.weight: got [64, 3], expected"),
        ({"blk.0.ffn_gate_exps.weight": None, "blk.0.ffn_gate_up_exps.weight": np.ones((4, 24, 16), F32)},
         "unused blk.0.ffn_gate_up_exps.weight [4, 24, 16]"),
        ({"blk.2.ssm_a": np.zeros(4, F32)}, "tensor blk.2.ssm_a must have numbers below 0"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_not_the_model_s_is_named(change, message, checkpoint, tmp_path):
    _, hf, weights = checkpoint
    stored = {name: x for name, x in (tensors(hf, weights) | change).items() if x is not None}
    with pytest.raises(ValueError, match=re.escape(message)):
        models.from_pretrained(write(tmp_path / "x.gguf", hf, stored))
