"""Configurations of published models: what they declare has the number of parameters that their weights have.

`tests/goldens/models/published.json` has what a config.json of the hub says, and the number of parameters of its weights. For
GLM-4.5, MiniMax-M2, OLMoE, Qwen1.5, Qwen3.5 and ERNIE it is the number of transformers' classes, with the biases of routers.
"""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import pytest

import kvjax
import models
from tests import goldens

PUBLISHED = json.loads((goldens.FOLDER / "models" / "published.json").read_text())
QUICK = ("gemma-3-270m", "phi-4-mini", "deepseek-v2-lite")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.thorough] * (x not in QUICK)) for x in PUBLISHED])
def test_a_published_config_has_the_published_number_of_parameters(name):
    config = models.ModelConfig.from_hf(PUBLISHED[name]["config"], "bfloat16")
    leaves = jax.tree.leaves(models.param_shapes(config))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == PUBLISHED[name]["parameters"]
    assert models.ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    if name == "deepseek-v2-lite":
        assert config == dataclasses.replace(models.shapes.deepseek_v2_lite(), eos_token_ids=())
    if config.latent is not None:  # a token has one key of 576 numbers in each layer, and its position
        needed = kvjax.memory_needed("full", config, batch=1, prompt_slots=1024, max_new_tokens=1024)
        assert needed.device == pytest.approx(config.num_layers * 2048 * (2 * 576 + 4), rel=1e-4)
