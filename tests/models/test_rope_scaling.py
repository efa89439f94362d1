"""RoPE rules in config.json: every spelling, what is refused, and what is written back."""

from __future__ import annotations

import json
import re

import pytest

from models import DynamicScaling, LinearScaling, LongRopeScaling, ModelConfig, YarnScaling
from tests.models.test_models import HF
from tests.tiny_models import TINY

FACTORS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2, 3, 4, 5]}
YARN = YarnScaling(factor=4.0, original_max_position_embeddings=32)
LONG = LongRopeScaling(
    short_factor=(1.0, 1.5, 2.0, 3.0), long_factor=(2, 3, 4, 5), original_max_position_embeddings=32, factor=4.0
)


@pytest.mark.parametrize(
    ("change", "rule", "context"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, LinearScaling(factor=4.0), 128),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.5}},
            DynamicScaling(factor=2.5, original_max_position_embeddings=128),
            320,
        ),
        (
            {"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
            YARN,
            128,
        ),
        # Qwen's model cards add the rule and leave the number of positions.
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
            YarnScaling(factor=4.0, original_max_position_embeddings=128),
            512,
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "finetuned": True, "attention_factor": None}},
            YarnScaling(factor=4.0, original_max_position_embeddings=128),
            512,
        ),
        ({"rope_scaling": {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 32}}, LONG, 128),
        # Phi writes the old context beside the rule, and transformers prefers it there.
        (
            {
                "original_max_position_embeddings": 32,
                "rope_scaling": {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 64},
            },
            LONG,
            128,
        ),
    ],
)
def test_rules_are_read_and_written_back(change, rule, context):
    config = ModelConfig.from_hf({**HF, **change})
    assert config.rope_scaling == rule and config.max_position_embeddings == context
    written = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(written) == config
    for key, other in (("rope_scaling", "rope_parameters"), ("rope_parameters", "rope_scaling")):
        assert ModelConfig.from_hf({name: x for name, x in written.items() if name != other}) == config, key
    hash(config)  # it is part of a jit key


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "axial"}, "expected rope_type one of default, llama3, linear, dynamic, yarn, longrope"),
        ("yarn", "rope_scaling must be an object, got 'yarn'"),
        ({"rope_type": "yarn"}, "rope scaling of type 'yarn' lacks factor"),
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' lacks short_factor, long_factor"),
        ({"rope_type": "linear", "factor": None}, "'linear' lacks factor, got {"),
        ({"rope_type": "linear", "factor": 0.5}, "LinearScaling: factor must be a finite number of at least 1, got 0.5"),
        ({"rope_type": "dynamic", "factor": "2"}, "rope_scaling.factor must be a finite number, got '2'"),
        ({"rope_type": "linear", "factor": float("nan")}, "rope_scaling.factor must be a finite number, got nan"),
        ({"rope_type": "linear", "factor": 2.0, "alpha": 1000.0}, "'linear' has unsupported alpha, expected factor"),
        ({"rope_type": "default", "factor": 2.0}, "'default' has unsupported factor, expected none"),
        (
            {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
            "begins at max_position_embeddings=128, got original_max_position_embeddings=64",
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 6.5},
            "original_max_position_embeddings must be a positive whole number, got 6.5",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}, "0 < beta_slow <= beta_fast, got 2 and 1"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate must be true or false, got 1"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "head_dim / 2 = 4 numbers, got 1"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 2.0]},
            "short_factor and long_factor must have one length, got 1 and 2",
        ),
        ({"rope_type": "longrope", "short_factor": 1.0, "long_factor": [1.0]}, "short_factor must be a tuple of numbers"),
    ],
)
def test_unsupported_rules_are_refused(rope, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig.from_hf({**HF, "rope_scaling": rope})


def test_a_dynamic_rule_is_written_with_the_context_where_it_begins():
    config = ModelConfig(
        **{**TINY, "max_position_embeddings": 64},
        rope_scaling=DynamicScaling(factor=2.0, original_max_position_embeddings=32),
    )
    written = config.to_hf()
    assert written["max_position_embeddings"] == 32
    assert "original_max_position_embeddings" not in written["rope_parameters"]
    assert ModelConfig.from_hf(written) == config
