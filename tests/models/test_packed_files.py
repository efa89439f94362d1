"""Checkpoints in 8 bits, and experts in 4 bits (MXFP4): the numbers they stand for, read in parts, refused without scales."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models.files import adapter, four_bits
from models.files.eight_bits import BLOCK, SCALE, pack, pack_file
from models.files.tables.checkpoint import EMBEDDING, checkpoint_table
from models.files.tensors import SafeTensors
from tests.models.test_families import edges
from tests.tiny_models import BUILTIN, factors_of, vivid_params

CONFIG = models.ModelConfig(
    vocab_size=96, hidden_size=64, intermediate_size=128, num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=32,
    max_position_embeddings=256, tie_word_embeddings=True, qk_norm=True, eos_token_ids=(0,), rope_theta=1e4,
)  # fmt: skip


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A tiny checkpoint in float32, and the same in 8 bits."""
    whole = tmp_path_factory.mktemp("models") / "whole"
    models.save_pretrained(whole, vivid_params(CONFIG), CONFIG)
    packed = whole.parent / "packed"
    shutil.copytree(whole, packed)
    pack_file(whole / "model.safetensors", packed / "model.safetensors", 32)
    return whole, packed


def test_numbers_in_8_bits_are_near_the_numbers_they_were_made_of():
    made = np.random.default_rng(0).normal(size=(3, 5, 2 * BLOCK)).astype(np.float32)
    made[0, 0, :BLOCK] = 0
    packed = pack({"a": made, "vector": made[0, 0], "odd": made[..., :7]})
    assert packed["a"].dtype == np.int8 and packed["a" + SCALE].shape == (3, 5, 2) and len(packed) == 4
    assert packed["vector"] is not None and packed["odd"].dtype == np.float32, "vectors and odd rows are not packed"
    back = packed["a"] * np.repeat(packed["a" + SCALE].astype(np.float32), BLOCK, axis=-1)
    half = np.repeat(packed["a" + SCALE].astype(np.float32), BLOCK, axis=-1) / 2
    assert (abs(back - made) <= 1.02 * half + 1e-9).all(), "half a step, and what float16 rounds of a scale"


def test_a_checkpoint_in_8_bits_loads_as_its_numbers(directories):
    whole, packed = (models.from_pretrained(directory, dtype="float32")[0] for directory in directories)
    assert jax.tree.structure(whole) == jax.tree.structure(packed)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(packed), strict=True):
        assert a.dtype == b.dtype and np.linalg.norm(a - b) <= 0.01 * np.linalg.norm(a)
    sizes = [(directory / "model.safetensors").stat().st_size for directory in directories]
    assert sizes[1] < 0.35 * sizes[0]


@pytest.mark.parametrize("cut", [(slice(8, 24), slice(None)), (slice(None), slice(8, 40))])
def test_a_part_of_a_matrix_is_the_part_of_the_whole(directories, cut):
    """As every device of a mesh reads it; a cut through a block, too."""
    files = SafeTensors.of(directories[1], CONFIG, checkpoint_table(CONFIG))
    name = "model.layers.0.mlp.down_proj.weight"
    whole = files._read(name, (slice(None), slice(None)))
    np.testing.assert_array_equal(files._read(name, cut), whole[cut])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(EMBEDDING + SCALE), f"wrong dtype {EMBEDDING}: got I8 without the scales"),
        (lambda t: t.update({EMBEDDING + SCALE: np.ones((96, 3), np.float16)}), "got F16 (96, 3) for a tensor (96, 64)"),
        (lambda t: t.update({"model.norm.weight": np.ones(64, np.int8)}), "I8 without the scales model.norm.weight_scale"),
        (lambda t: t.update({x + SCALE: np.ones(2, np.float16) for x in ("model.norm.weight", "stray")}),
         "unused model.norm.weight_scale [2]\n  unused stray_scale [2]"),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_are_named(directories, tmp_path, change, said):
    broken = tmp_path / "broken"
    shutil.copytree(directories[1], broken)
    tensors = load_file(broken / "model.safetensors")
    change(tensors)
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(said)):
        models.from_pretrained(broken, dtype="float32")


def test_an_adapter_in_8_bits_loads_as_its_numbers(tmp_path):
    params = vivid_params(CONFIG)
    factors = factors_of(params, 32)
    adapter.save_adapter(tmp_path, factors, adapter.AdapterConfig(base="b", fingerprint="f", rank=32, stretch=1.0))
    before = adapter.load_adapter(tmp_path)[0]
    pack_file(tmp_path / adapter.WEIGHTS, tmp_path / adapter.WEIGHTS, 32)
    after = adapter.load_adapter(tmp_path)[0]
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.linalg.norm(np.asarray(a, np.float32) - b) <= 0.01 * np.linalg.norm(np.asarray(a, np.float32))
    tensors = load_file(tmp_path / adapter.WEIGHTS)
    del tensors["mlp/down/a" + SCALE]
    save_file(tensors, tmp_path / adapter.WEIGHTS)
    with pytest.raises(ValueError, match="damaged: wrong dtype mlp/down/a: got I8 without the scales mlp/down/a_scale"):
        adapter.load_adapter(tmp_path)


def test_what_ships_is_small_enough_for_a_clone():
    """The toy and the adapter are in 8 bits; whoever trains them again packs them (`models.files.eight_bits.pack_file`)."""
    sizes = {file: file.stat().st_size for file in BUILTIN.parent.glob("**/*.safetensors")}
    assert sizes[BUILTIN / "model.safetensors"] < 16_000_000 and sum(sizes.values()) < 24_500_000


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 3}
VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def drawn(shape, seed=0):
    """Blocks and scales of a tensor [E, in, out]."""
    rng = np.random.default_rng(seed)
    experts, inner, outer = shape
    blocks = rng.integers(0, 256, (experts, outer, inner // 32, 16), dtype=np.uint8)
    return blocks, rng.integers(122, 127, (experts, outer, inner // 32), dtype=np.uint8)


def decoded(blocks, scales):
    """The tensor [E, in, out], number by number as the specification says."""
    experts, outer, columns, _ = blocks.shape
    made = np.zeros((experts, columns * 32, outer))
    for at in np.ndindex(experts, outer, columns, 16):
        expert, row, column, byte = at
        for half, code in enumerate((blocks[at] % 16, blocks[at] // 16)):
            sign, size = (-1) ** (int(code) // 8), VALUES[int(code) % 8]
            made[expert, column * 32 + 2 * byte + half, row] = sign * size * 2.0 ** (int(scales[at[:3]]) - 127)
    return made


@pytest.mark.parametrize(
    "index", [(slice(None),) * 3, (slice(None), slice(None), slice(2, 4)), (slice(1, 2), slice(16, 80), slice(None))]
)
def test_a_part_is_decoded_as_a_loop_decodes_it(index):
    blocks, scales = drawn((2, 96, 5))
    got = four_bits.numbers(blocks, scales, index)
    np.testing.assert_array_equal(got.astype(np.float64), decoded(blocks, scales)[index])


def write(directory, change=None):
    """A model of gpt-oss whose experts are in 4 bits; return the tensors with the numbers that they stand for."""
    layers = ["sliding_attention", "full_attention"]
    config = models.ModelConfig.from_hf(edges("gpt_oss", **SIZES, layer_types=layers))
    params = vivid_params(config)
    models.save_pretrained(directory, params, config)
    plain = load_file(directory / "model.safetensors")
    stored = dict(plain)
    for seed, name in enumerate(sorted(plain)):
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = drawn(stored.pop(name).shape, seed)
            stored |= {name + "_blocks": blocks, name + "_scales": scales}
            plain[name] = decoded(blocks, scales).astype(np.float32)
    if change is not None:
        change(stored)
    save_file(stored, directory / "model.safetensors")
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    return plain


def test_a_file_in_4_bits_is_the_model_of_its_numbers(tmp_path):
    plain = write(tmp_path / "packed")
    params, config = models.from_pretrained(tmp_path / "packed")
    models.save_pretrained(tmp_path / "plain", params, config)
    again = load_file(tmp_path / "plain" / "model.safetensors")
    assert again.keys() == plain.keys()
    for name, value in plain.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


def test_blocks_without_their_scales_are_refused(tmp_path):
    name = "model.layers.1.mlp.experts.down_proj"
    write(tmp_path, lambda stored: stored.pop(name + "_scales"))
    with pytest.raises(ValueError, match=f"missing {name} .*\n  unused {name}_blocks"):
        models.from_pretrained(tmp_path)
