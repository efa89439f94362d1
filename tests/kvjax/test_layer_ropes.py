"""Layers that rotate differently: the rotation of each layer, and what methods refuse there.

Their logits and laws are in `tests/kvjax/test_kinds_of_models.py`.
"""

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import rope
from kvjax.cache import PlainCache
from kvjax.methods.chess.method import Chess
from kvjax.methods.chess.page_tree import page_vectors
from kvjax.protocol.typing import Rope, layer_ropes
from kvjax.testing.model import TinyModel
from models import DynamicScaling, YarnScaling
from models.sizes.parts import LayerRope
from tests.harness import TINY, any_example, random_tokens, tiny_params
from tests.kvjax.test_kinds_of_models import KINDS

pytestmark = pytest.mark.usefixtures("quick_compile")
NOPE = KINDS["ropes"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roped(TinyModel):
    ropes: Any = ()


def test_a_model_need_not_know_of_ropes():
    assert layer_ropes(TinyModel(rope_theta=50.0)) == (Rope(50.0, None, None),) * 2 == layer_ropes(Roped(rope_theta=50.0))
    assert layer_ropes(Roped(ropes=NOPE.ropes)) == (Rope(100.0, None, 0), Rope(100.0, None, 4))


@pytest.mark.parametrize("wrong", [(Rope(1e4),), (Rope(1e4, None, 3), Rope(1e4)), (Rope(1e4), Rope(1e4, None, 10))])
def test_wrong_ropes_are_refused(wrong):
    with pytest.raises(ValueError, match=re.escape("must be an object for each of 2 layers, which rotates None (all) or an")):
        layer_ropes(Roped(ropes=wrong))


def test_frequencies_of_a_part_of_a_head():
    whole = rope.inverse_frequencies(8, 100.0)
    np.testing.assert_array_equal(rope.frequencies(Rope(100.0), 8), whole)
    np.testing.assert_array_equal(rope.frequencies(Rope(100.0, None, 8), 8), whole)
    np.testing.assert_array_equal(rope.frequencies(Rope(100.0, None, 4), 8), [1.0, np.float32(0.1), 0, 0])
    np.testing.assert_array_equal(rope.frequencies(Rope(100.0, None, 0), 8), np.zeros(4))


def test_channels_that_do_not_rotate_are_not_scaled():
    rule = YarnScaling(factor=1.0, attention_factor=1.5, original_max_position_embeddings=8)
    query, key, _ = random_tokens(0, 1, 2, 2, 3, 8)
    position = jnp.arange(3, dtype=jnp.int32)[None]
    got = rope.prepare(query, key, position, jnp.array([3], jnp.int32), Rope(100.0, rule, 4))
    for made, given in zip(got, (query, key), strict=True):
        np.testing.assert_allclose(made, given * np.tile(np.float32([1.5, 1.5, 1, 1]), 2), rtol=1e-6)


def read(method, config=NOPE):
    return kvjax.prefill(tiny_params(), [[1, 2, 3]], config=config, method=method, max_new_tokens=4)


def test_chess_undoes_the_rotation_of_each_layer():
    """The mean key of a page before RoPE, in a layer without positions and in a layer that rotates half of each head."""
    keys, values, _ = random_tokens(1, 3, 2, 2, 12, 8)
    position = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), (3, 2, 12))
    layers = [
        PlainCache(key=jnp.asarray(key), value=jnp.asarray(key), position=position, cursor=jnp.full((3,), 12, jnp.int32))
        for key in (values, keys[:, :, 0])
    ]
    frequencies = [rope.frequencies(each, TINY.head_dim) for each in layer_ropes(NOPE)]
    pages = jnp.zeros((3, 1), jnp.int32) + 1
    got = np.asarray(page_vectors(layers, pages, 4, [jnp.asarray(each) for each in frequencies]))
    wanted = []
    for layer, of_layer in zip(layers, frequencies, strict=True):
        key = np.asarray(layer.key, np.float64)[:, :, 4:8]
        first, second = key[..., :4], key[..., 4:]
        angle = np.arange(4, 8)[:, None] * of_layer
        back = [first * np.cos(angle) + second * np.sin(angle), second * np.cos(angle) - first * np.sin(angle)]
        wanted.append(np.concatenate(back, axis=-1).mean(axis=2))
    np.testing.assert_allclose(got[:, 0], np.stack(wanted, axis=2).reshape(3, -1), atol=1e-5)


def test_methods_look_at_the_rules_of_all_layers():
    changing = LayerRope(theta=1e4, scaling=DynamicScaling(factor=2.0, original_max_position_embeddings=16))
    config = dataclasses.replace(TINY, ropes=(LayerRope(theta=1e4), changing))
    verified, chess = kvjax.Verified(draft=any_example("snapkv")), Chess(page_vec_rope="pre", page_size=4, trigger="never")
    for method in (verified, chess):
        with pytest.raises(ValueError, match=f"{type(method).__name__}.*got rope_type 'dynamic'"):
            read(method, config)


def test_ntk_wants_whole_heads_that_rotate():
    with pytest.raises(ValueError, match="NTK: expected layers that rotate whole heads or nothing, got 4 of 8 channels"):
        read("ntk")
