"""Experts in 4 bits (MXFP4): the decoder against a loop over numbers, and a model of such a file."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models.files import four_bits
from tests.models.test_families import generator
from tests.tiny_models import vivid_params

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
    config = models.ModelConfig.from_hf({
        **generator().TINY, **SIZES, "model_type": "gpt_oss", "num_experts_per_tok": 2, "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    })  # fmt: skip
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
