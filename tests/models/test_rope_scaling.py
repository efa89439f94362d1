"""RoPE rules in config.json: every spelling, what is refused, and what is written back."""

from __future__ import annotations

import json

import pytest

from models import DynamicScaling, LinearScaling, LongRopeScaling, ModelConfig, YarnScaling
from tests.models.test_models import HF
from tests.tiny_models import TINY

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


def test_a_dynamic_rule_is_written_with_the_context_where_it_begins():
    config = ModelConfig(
        **{**TINY, "max_position_embeddings": 64},
        rope_scaling=DynamicScaling(factor=2.0, original_max_position_embeddings=32),
    )
    written = config.to_hf()
    assert written["max_position_embeddings"] == 32
    assert "original_max_position_embeddings" not in written["rope_parameters"]
    assert ModelConfig.from_hf(written) == config
