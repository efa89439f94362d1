"""Rules of RoPE and sliding windows in config.json: every spelling is read as transformers reads it, and written back."""

from __future__ import annotations

import json

import pytest

from models import DynamicScaling, LinearScaling, LongRopeScaling, ModelConfig, YarnScaling
from models.files import gguf as gguf_files
from tests.models import gguf_writing, test_gguf_errors
from tests.tiny_models import HF, TINY

FACTORS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2, 3, 4, 5]}
YARN = YarnScaling(factor=4.0, original_max_position_embeddings=32)
LONG = LongRopeScaling(
    short_factor=(1.0, 1.5, 2.0, 3.0), long_factor=(2, 3, 4, 5), original_max_position_embeddings=32, factor=4.0
)


OLD = "original_max_position_embeddings"
LATER = YarnScaling(factor=4.0, original_max_position_embeddings=128)


@pytest.mark.parametrize(
    ("change", "rule", "context"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, LinearScaling(factor=4.0), 128),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.5}},
         DynamicScaling(factor=2.5, original_max_position_embeddings=128), 320),
        ({"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0, OLD: 32}}, YARN, 128),
        # Qwen's model cards add the rule and leave the number of positions.
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, OLD: 128}}, LATER, 512),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "finetuned": True, "attention_factor": None}}, LATER, 512),
        ({"rope_scaling": {"rope_type": "longrope", **FACTORS, OLD: 32}}, LONG, 128),
        # Phi writes the old context beside the rule, and transformers prefers it there.
        ({OLD: 32, "rope_scaling": {"rope_type": "longrope", **FACTORS, OLD: 64}}, LONG, 128),
        # The rule of a model card in a file that transformers 5 saved.
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": {"type": "yarn", "factor": 4.0}},
         LATER, 512),
    ],
)  # fmt: skip
def test_rules_are_read_and_written_back(change, rule, context):
    config = ModelConfig.from_hf({**HF, **change})
    assert config.rope_scaling == rule and config.max_position_embeddings == context
    written = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(written) == config
    for key, other in (("rope_scaling", "rope_parameters"), ("rope_parameters", "rope_scaling")):
        assert ModelConfig.from_hf({name: x for name, x in written.items() if name != other}) == config, key
    hash(config)  # it is part of a jit key


@pytest.mark.parametrize("change", [{"rope_theta": 1e4}, {"rope_type": "linear"}, {"factor": 8.0}, {OLD: 64}])
def test_two_keys_for_the_rotation_must_agree(change):
    rule = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, OLD: 32}
    same = ModelConfig.from_hf({**HF, "rope_parameters": rule, "rope_scaling": rule})
    assert same.rope_scaling == YARN and same.rope_theta == 1e6
    with pytest.raises(ValueError, match=f"rope_parameters and rope_scaling differ.*{next(iter(change))}"):
        ModelConfig.from_hf({**HF, "rope_parameters": rule, "rope_scaling": rule | change})


def test_an_added_rule_keeps_the_base():
    added = {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert ModelConfig.from_hf({**HF, **added}).rope_theta == 1e6


def test_a_dynamic_rule_is_written_with_the_context_where_it_begins():
    config = ModelConfig(
        **{**TINY, "max_position_embeddings": 64},
        rope_scaling=DynamicScaling(factor=2.0, original_max_position_embeddings=32),
    )
    written = config.to_hf()
    assert written["max_position_embeddings"] == 32
    assert "original_max_position_embeddings" not in written["rope_parameters"]
    assert ModelConfig.from_hf(written) == config


SWITCHED = {"use_sliding_window": True, "sliding_window": 64}
LAYERS = {"num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, (64,) * 4),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, (4096,) * 4),  # the default of transformers' class
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "mistral", "sliding_window": 128}, ()),  # never narrower than the context
        ({"model_type": "llama", "sliding_window": 64}, ()),  # not a key of Llama's class
        ({"model_type": "qwen2", **SWITCHED, "max_window_layers": 3}, (None, None, None, 64)),
        ({"model_type": "qwen2", **SWITCHED, "max_window_layers": 0}, (64,) * 4),
        ({"model_type": "qwen2", **SWITCHED, "max_window_layers": 4}, ()),
        ({"model_type": "qwen2", **SWITCHED}, ()),  # transformers' default is 28 layers
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False, "max_window_layers": 0}, ()),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, ()),
        ({"model_type": "qwen3", **SWITCHED, "max_window_layers": 0,  # the list goes before it
          "layer_types": ["sliding_attention", "full_attention"] * 2}, (64, None) * 2),
        ({"model_type": "qwen3", **SWITCHED, "layer_types": ["full_attention"] * 4}, ()),
    ],
)  # fmt: skip
def test_from_hf_reads_windows_as_transformers_does(change, windows):
    config = ModelConfig.from_hf({**HF, **LAYERS, **change})
    assert config.windows == windows
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_windows_in_some_layers_need_a_family_that_has_them():
    with pytest.raises(ValueError, match="layer_types.*full_attention"):
        ModelConfig.from_hf({**HF, **LAYERS, "model_type": "mistral", **SWITCHED, "layer_types": ["full_attention"] * 4})
    config = ModelConfig(**TINY, windows=(8, 8))
    assert config.to_hf()["model_type"] == "mistral" and ModelConfig.from_hf(config.to_hf()) == config
    for windows, more in (((8, None), {}), ((9, 8), {"qk_norm": True})):
        with pytest.raises(ValueError, match="no config.json of model_type .* has windows="):
            ModelConfig(**TINY, **more, windows=windows).to_hf()


def test_a_gguf_file_of_a_mistral_has_its_window_in_every_layer(tmp_path):
    path = test_gguf_errors.write(tmp_path / "m.gguf", {"llama.attention.sliding_window": 16})
    assert gguf_files.read_config(gguf_files.open_file(path)).windows == (16,)
    keys = gguf_writing.metadata({**test_gguf_errors.HF, "model_type": "qwen2"})
    path = test_gguf_errors.write(tmp_path / "q.gguf", {**keys, "qwen2.attention.sliding_window": 16})
    with pytest.raises(ValueError, match="q.gguf: unsupported sliding window of 16 tokens in a file of architecture 'qwen2'"):
        gguf_files.read_config(gguf_files.open_file(path))
