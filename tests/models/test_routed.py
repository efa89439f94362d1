"""Experts with a sigmoid router beside attention that is not latent (GLM-4.5, MiniMax-M2): the laws of methods hold."""

from __future__ import annotations

import pytest

import models
from kvjax.testing import laws
from kvjax.testing.subject import Subject
from tests.harness import any_example
from tests.models.test_families import edges
from tests.tiny_models import vivid_params

LAWS = (
    laws.ragged_rows_equal_alone,
    laws.generating_in_two_calls_equals_one,
    laws.decoding_keeps_structure_shapes_and_dtypes,
    laws.bfloat16_is_kept,
    laws.resident_bytes_are_the_arrays,
    laws.ragged_questions_equal_alone,
)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["full", "snapkv", "quest", "verified"])
@pytest.mark.parametrize("name", ["glm4_moe", "minimax_m2"])
def test_laws(name, method):
    config = models.ModelConfig.from_hf(edges(name, vocab_size=64, max_position_embeddings=256))
    subject = Subject(any_example(method), config, vivid_params(config), few_programs=True)
    for law in LAWS:
        law(subject)
