"""Experts with a sigmoid router beside attention that is not latent (GLM-4.5, MiniMax-M2): the laws of methods hold."""

from __future__ import annotations

import pytest

import models
from tests.harness import hold_laws
from tests.models.test_families import edges
from tests.tiny_models import vivid_params


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["full", "snapkv", "quest", "verified"])
@pytest.mark.parametrize("name", ["glm4_moe", "minimax_m2"])
def test_laws(name, method):
    config = models.ModelConfig.from_hf(edges(name, vocab_size=64, max_position_embeddings=256))
    hold_laws(method, config, vivid_params(config))
