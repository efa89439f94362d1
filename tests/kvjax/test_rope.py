"""RoPE rules: against transformers' numbers, against float64, through methods, and where the length changes frequencies."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import rope
from kvjax.decoding.checks import check_border, check_room
from kvjax.decoding.passes import layer_inputs
from kvjax.methods import Full, MosaicKV, StreamingLLM, TokenSelect
from kvjax.methods.chess.method import Chess
from kvjax.protocol.typing import Rope
from kvjax.testing.model import TinyModel
from models import DynamicScaling, LongRopeScaling, ModelConfig, YarnScaling
from tests import goldens, tape
from tests.harness import small
from tests.oracles import rope as plain

CASES = json.loads((goldens.FOLDER / "models" / "rope.json").read_text())
DIM, ROWS, TOKENS = 32, 4, 5  # one shape for all, so that nothing compiles twice
LONG = LongRopeScaling(
    short_factor=(1.0,) * (DIM // 2), long_factor=tuple(map(float, range(1, DIM // 2 + 1))), factor=1.0,
    original_max_position_embeddings=16,
)  # fmt: skip
FACTOR = YarnScaling(factor=1.0, attention_factor=1.3, original_max_position_embeddings=8)
DYNAMIC = DynamicScaling(factor=3.0, original_max_position_embeddings=16)


def turned(scaling, theta, position, length):
    """What happens to 1 in the first half of a key's channels: complex [B, T, D/2], from NumPy arrays [B, T] and [B]."""
    assert position.shape == (ROWS, TOKENS)
    key = np.zeros((ROWS, 1, TOKENS, DIM), np.float32)
    key[..., : DIM // 2] = 1
    key, position, length = jnp.asarray(key), jnp.asarray(position, jnp.int32), np.broadcast_to(length, ROWS)
    query, key = rope.prepare(key[:, :, None], key, position, jnp.asarray(length, jnp.int32), Rope(theta, scaling))
    np.testing.assert_array_equal(query[:, :, 0], key)
    out = np.asarray(rope.rotate(key, position[:, None], rope.inverse_frequencies(DIM, theta, scaling)), np.float64)[:, 0]
    return out[..., : DIM // 2] + 1j * out[..., DIM // 2 :]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["hf"]["rope_scaling"]["rope_type"])
def test_rules_as_transformers_computes_them(case):
    config = ModelConfig.from_hf(case["hf"])
    scaling, ones = config.rope_scaling, np.ones((ROWS, TOKENS))
    assert config.head_dim == DIM
    assert rope.attention_factor(scaling) == pytest.approx(case["attention_factor"], rel=1e-6)
    one = turned(scaling, config.rope_theta, ones, case["length"] or 1)[0, 0]
    np.testing.assert_allclose(np.angle(one), case["inv_freq"], rtol=2e-5)
    np.testing.assert_allclose(np.abs(one), case["attention_factor"], rtol=1e-5)
    if not rope.depends_on_length(scaling):
        table = rope.inverse_frequencies(DIM, config.rope_theta, scaling)
        np.testing.assert_allclose(table, case["inv_freq"], rtol=1e-6)


def random_rule(rng, kind):
    """Numbers that a rule could have."""
    rule = {"factor": float(rng.uniform(1, 40)), "original_max_position_embeddings": int(rng.integers(64, 5000))}
    if kind == "yarn":
        slow = float(rng.uniform(0.5, 4))
        rule |= {"beta_slow": slow, "beta_fast": slow * float(rng.uniform(1, 40)), "truncate": bool(rng.integers(2))}
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            rule[name] = float(rng.uniform(0.5, 2)) if rng.integers(2) else None
    if kind == "longrope":
        rule |= {f"{name}_factor": tuple(rng.uniform(1, 9, DIM // 2).tolist()) for name in ("short", "long")}
    return rule


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
def test_every_rule_equals_float64(kind):
    """Every row of a batch has the frequencies of its own length."""
    rng = np.random.default_rng(7)
    cls = {"yarn": YarnScaling, "dynamic": DynamicScaling, "longrope": LongRopeScaling}[kind]
    for _ in range(8):
        rule, theta = random_rule(rng, kind), float(10 ** rng.uniform(2, 6))
        old = rule["original_max_position_embeddings"]
        length = np.array([old // 2, old, old + 1, 3 * old], np.int32)
        position = np.stack([rng.integers(0, n, TOKENS) for n in length])
        got = turned(cls(**rule), theta, position, length)
        for row, n in enumerate(length):
            named = {"rope_type": kind, **rule}
            angle = position[row][:, None] * plain.frequencies(named, DIM, theta, int(n))
            want = plain.attention_factor(named) * np.exp(1j * angle)
            # Angles in float32 are exact to about 1e-7 of themselves.
            np.testing.assert_allclose(got[row], want, rtol=0, atol=3e-6 + 6e-7 * position[row].max())


def test_stored_keys_rotate_as_others():
    rng = np.random.default_rng(0)
    key, inv_freq = rng.normal(size=(2, 3, 5, 8)).astype(np.float32), np.float32([1, 0.3, 0.1, 0.01])
    for position in (jnp.arange(5) * 700, jnp.asarray(rng.integers(-9, 9000, (2, 1, 5)))):
        got = rope.rotate_stored(jnp.asarray(key), position, jnp.asarray(inv_freq))
        np.testing.assert_allclose(got, rope.rotate(jnp.asarray(key), position, inv_freq), atol=1e-6)


def test_a_short_text_is_not_stretched():
    position = np.broadcast_to(np.arange(11, 16), (ROWS, TOKENS))
    for scaling in (LONG, DYNAMIC):
        np.testing.assert_array_equal(turned(scaling, 1e4, position, 16), turned(None, 1e4, position, 16))
        assert np.abs(turned(scaling, 1e4, position, 17) - turned(None, 1e4, position, 17)).max() > 0.1


def given(scaling, method):
    """A key of ones and a query as a layer's method gets them, at position 40 of rows of 41 tokens."""
    model = tape.Tape(
        num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=DIM, vocab_size=64, max_position_embeddings=64,
        rope_scaling=scaling,
    )  # fmt: skip
    key, position = jnp.ones((ROWS, 1, TOKENS, DIM)), jnp.full((ROWS, TOKENS), 40, jnp.int32)
    length = jnp.full((ROWS,), 41, jnp.int32)
    return layer_inputs(model, 0, method, key[:, :, None], key, key, position, position, None, None, length)


@pytest.mark.parametrize("scaling", [LONG, DYNAMIC], ids=["longrope", "dynamic"])
def test_methods_that_renumber_tokens_keep_short_frequencies(scaling):
    assert (np.asarray(given(scaling, StreamingLLM(budget=8)).key) == 1).all()
    assert np.abs(np.asarray(given(scaling, Full()).key) - 1).max() > 0.1


def test_a_text_does_not_grow_across_the_border_of_longrope():
    """Stored keys would keep the short factors; what renumbers tokens, or has the same factors on both sides, goes on."""
    model = TinyModel(num_layers=1, head_dim=DIM, max_position_embeddings=64, rope_scaling=LONG)
    params, text = model.random_params(0), [[3] * 14, [5] * 9]
    same = dataclasses.replace(LONG, long_factor=LONG.short_factor)
    cache = kvjax.prefill(params, text, config=model, max_new_tokens=24, pad_multiple=1)
    check_room(cache, 2)
    for call in (
        lambda: kvjax.extend(params, cache, [[1, 2, 3], [1]]),
        lambda: kvjax.generate(params, cache, max_new_tokens=9, limits=[0, 9]),
        lambda: kvjax.stream(params, cache, max_new_tokens=3),
        lambda: kvjax.sweep(params, text, config=model, methods=["full"], max_new_tokens=3),
    ):
        with pytest.raises(ValueError, match="original_max_position_embeddings=16.*expected at most [27] more"):
            call()
    length = np.array([14, 9])
    for case in ((LONG, Full(), length + 9), (LONG, small(StreamingLLM, budget=8), length), (same, Full(), length)):
        check_border(dataclasses.replace(model, rope_scaling=case[0]), *case[1:], 24)


def test_methods_get_queries_and_keys_with_the_attention_factor():
    for method in (StreamingLLM(budget=8), TokenSelect(), MosaicKV(), Full()):
        inputs = given(FACTOR, method)
        np.testing.assert_allclose(inputs.query, 1.3, rtol=1e-6)
        np.testing.assert_allclose(inputs.key, 1.3, rtol=1e-6)
        np.testing.assert_array_equal(inputs.value, 1)
        np.testing.assert_array_equal(inputs.inv_freq, rope.inverse_frequencies(DIM, 100.0))


def test_chess_refuses_to_undo_a_rotation_that_it_does_not_know():
    q = np.ones((1, 1, 1, 1, 12, 8), np.float32)
    model, params = tape.record(q, q[:, :, :, 0], q[:, :, :, 0], np.zeros((1, 12, 64)), rope_scaling=DYNAMIC)
    method = Chess(page_vec_rope="pre", page_size=4, trigger="never")
    with pytest.raises(ValueError, match="page_vec_rope='pre' needs frequencies that do not change.*got rope_type 'dynam"):
        tape.read(model, params, [8], method, 4)


def test_an_unknown_rule_is_refused():
    class Other:
        rope_type = "axial"

    with pytest.raises(ValueError, match="expected a rope_type of llama3, yarn, .* got 'axial'"):
        rope.inverse_frequencies(8, 1e4, Other)
