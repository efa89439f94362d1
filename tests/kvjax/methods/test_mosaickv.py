"""MosaicKV beyond the laws of every method: its knobs against the oracle, its bases, its storage, what it refuses."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.methods import Full
from kvjax.methods.mosaickv.method import MosaicKV
from kvjax.protocol.method import LayerSpec, num_bytes
from tests.harness import drive, frequencies, random_tokens, small
from tests.kvjax.cases import STEPS, against_oracle, drive_alike, feed_layer, of_state, prefill_layer
from tests.oracles import mosaickv
from tests.oracles.plain import rotate_all

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("mosaickv")]


# ---- the static strategy against the oracle ----------------------------------------------------------------------


@pytest.mark.thorough
def test_one_block_when_the_fraction_is_less():
    """A tenth of eight blocks is one block; selection reads the block's own kept coordinates, not its tokens'."""
    data = random_tokens(0, 1, 2, 2, 32 + STEPS, 16)
    got, (trace,) = against_oracle("mosaickv", data, [32], fields={"capacity": 0.3}, fraction=0.01)
    assert [len(trace.attended[0][h]) for h in range(2)] == [4 + 1] * 2
    seen = got.attended[:, 0].sum(axis=(1, 2))
    assert seen[7] == 2 * (4 + 8) and seen[8] == 2 * (4 + 1)  # the buffer was flushed


@pytest.mark.thorough
def test_fraction_is_traced_below_its_capacity():
    data = random_tokens(0, 2, 2, 2, 40 + STEPS, 16)
    for fraction in (0.1, 0.45):
        against_oracle("mosaickv", data, [9, 40], fields={"capacity": 0.5}, fraction=fraction)
    many = jax.vmap(lambda f: run_steps(small(MosaicKV, **{**mosaickv.KNOBS, "fraction": f}, capacity=0.5), data, 40))
    swept = many(jnp.asarray([0.1, 0.45], jnp.float32))
    for at, fraction in enumerate((0.1, 0.45)):
        alone = run_steps(small(MosaicKV, **{**mosaickv.KNOBS, "fraction": fraction}, capacity=0.5), data, 40)
        np.testing.assert_allclose(swept[at], alone, atol=1e-5, rtol=0)


def run_steps(method, data, prompt):
    """Outputs of one decode step behind a dense prompt."""
    state = prefill_layer(method, data, np.full(len(data[0]), prompt), prompt=prompt, room=1)
    return feed_layer(method, state, data, np.full((len(data[0]), 1), prompt))[0]


# ---- bases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [16, pytest.param(64, marks=pytest.mark.thorough)])
def test_bases_keep_scores_and_commute_with_means(dim):
    q, k, v = random_tokens(0, 1, 2, 2, 40 + STEPS, dim)
    got = drive_alike(small(MosaicKV, **mosaickv.KNOBS), q, k, v, [40], frequencies(dim))
    keys, queries = rotate_all(k[0], frequencies(dim)), rotate_all(q[0], frequencies(dim))
    for name, tokens in zip(mosaickv.STATE, (keys, v[0].astype(np.float64)), strict=True):
        found = of_state(mosaickv, got.state, 0)[name].astype(np.float64)
        for h in range(2):
            for s, first in enumerate(range(0, 40, 16)):
                basis, members = found[h, s], tokens[h, first : min(first + 16, 40)]
                assert mosaickv.is_eigenbasis(basis, members)
                np.testing.assert_allclose(basis @ basis.T, np.eye(dim), atol=1e-5)
                turned = members @ basis.T
                for query in queries[h, :, 40]:
                    np.testing.assert_allclose(turned @ (basis @ query), members @ query, atol=1e-4)
                np.testing.assert_allclose(turned.mean(axis=0), basis @ members.mean(axis=0), atol=1e-12)


# ---- storage ------------------------------------------------------------------------------------------------------


def kept_after(method, prompt):
    """Shapes of the state that decoding keeps after a prompt."""
    sizes = {"batch": 1, "num_kv_heads": 2, "group_size": 4, "head_dim": 128, "dtype": "bfloat16"}
    spec = LayerSpec(**sizes, prompt_slots=prompt, max_new_tokens=64)
    return jax.eval_shape(lambda: method.finish(method.init(spec), spec))


@pytest.mark.parametrize("prompt", [16384, 131072])
def test_uncompressed_cache_is_gone_after_the_prompt(prompt):
    state = kept_after(MosaicKV(channels=0.25), prompt)
    assert num_bytes(state) <= 0.40 * num_bytes(kept_after(Full(), prompt))
    for leaf in jax.tree.leaves(state):
        assert not (leaf.shape[-1:] == (128,) and leaf.shape[-2] >= prompt), f"a leaf {leaf.shape} holds the prompt"
        assert math.prod(leaf.shape) <= 2 * prompt * 32 * 1.01, f"a leaf {leaf.shape} is larger than the packed keys"


@pytest.mark.thorough
def test_extend_is_dense_and_flushes():
    """Three tokens at once over the packed prompt and the buffer, which they fill; then a step over what was packed."""
    prompt, count = 37, 3  # 5 tokens in a buffer of 8
    q, k, v = data = random_tokens(4, 2, 2, 2, 48, 16)
    method, at = small(MosaicKV, **mosaickv.KNOBS), np.array([np.arange(prompt, prompt + count + 1), [-1] * (count + 1)])
    before = prefill_layer(method, data, [prompt] * 2, prompt=prompt, room=8)
    out, state = feed_layer(method, before, data, at[:, :count])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b[1]), state, before)
    step, _ = feed_layer(method, state, data, at[:, count:])
    inv_freq = frequencies(16)
    turned, keys = rotate_all(q[0], inv_freq), rotate_all(k[0], inv_freq)
    row = mosaickv.Row(keys, v[0].astype(np.float64), prompt, all_knobs(mosaickv.KNOBS), **of_state(mosaickv, before, 0))
    want = row.extend(turned[:, :, prompt : prompt + count], prompt)
    np.testing.assert_allclose(out[0], want, atol=1e-4, rtol=0)
    assert row.buffer == []
    want, _ = row.decode(turned[:, :, prompt + count], prompt + count)
    np.testing.assert_allclose(step[0, ..., 0, :], want, atol=1e-4, rtol=0)


def all_knobs(knobs):
    """Every knob that the oracle's `Row` reads, at its default unless given."""
    return {"strategy": "static", "max_loss": 0.1, "max_variance": 0.5, "lifetime": 8192, **knobs}


@pytest.mark.thorough
def test_state_after_two_thousand_tokens_equals_state_rebuilt():
    """Steps in the middle and at the end, against everything so far packed at once with the last prompt segment's basis."""
    prompt, steps, dim = 37, 2000, 16
    q, k, v = random_tokens(6, 1, 2, 2, prompt + steps, dim)
    knobs = {**mosaickv.KNOBS, "fraction": 0.1}
    got = drive(small(MosaicKV, **knobs), q, k, v, [prompt], prompt=prompt)
    turned, keys = rotate_all(q[0], frequencies(dim)), rotate_all(k[0], frequencies(dim))
    for last in (1003, 2000):
        row = mosaickv.Row(keys, v[0].astype(np.float64), prompt, all_knobs(knobs), **of_state(mosaickv, got.state, 0))
        row.buffer += range(prompt, prompt + last - 12)
        row.flush()
        for step in range(last - 12, last):
            want, attended = row.decode(turned[:, :, prompt + step], prompt + step)
            np.testing.assert_allclose(got.outputs[step, 0], want, atol=1e-4, rtol=0)
            for h in range(2):
                assert set(np.flatnonzero(got.attended[step, 0, h]).tolist()) == attended[h]
