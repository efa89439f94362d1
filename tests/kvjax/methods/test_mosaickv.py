"""MosaicKV beyond the laws of every method: its bases, its storage, and plans of heads and segments, which are finalised."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.methods import Full
from kvjax.methods.mosaickv import store
from kvjax.methods.mosaickv.method import MosaicKV
from kvjax.protocol.method import LayerSpec, num_bytes
from tests.harness import frequencies, random_tokens, small
from tests.kvjax.cases import STEPS, against_oracle, drive_alike, feed_layer, of_state, prefill_layer
from tests.oracles import mosaickv
from tests.oracles.plain import rotate_all

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("mosaickv")]


# ---- bases --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
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


@pytest.mark.parametrize("strategy", ["static", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_a_prompt_may_be_sorted_in_pieces(strategy, monkeypatch):
    layout = small(MosaicKV, **{**mosaickv.KNOBS, "strategy": strategy, "buffer": 16, "segment": 32})._layout(16)
    _, key, value = random_tokens(7, 2, 2, 2, 48, 16)

    def packed():
        given = jnp.asarray(key), jnp.asarray(value), jnp.array([32, 48])
        run = functools.partial(store._pack_prompt, layout, max_new_tokens=8, max_loss=0.1, max_variance=0.5)
        return jax.jit(run)(*given, store.basis(store._moments(layout, *given)))

    whole = packed()
    monkeypatch.setattr(store, "_SORTED", 1)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), packed(), whole)
    assert (whole.key.values[:, :, :32] != 0).any(axis=-1).all()


def test_the_moments_of_all_rows_and_segments_are_decomposed_in_one_call():
    spec = LayerSpec(batch=3, num_kv_heads=2, group_size=4, head_dim=16, dtype="bfloat16", prompt_slots=48, max_new_tokens=8)
    method = small(MosaicKV, **mosaickv.KNOBS)
    text = str(jax.make_jaxpr(lambda state: method.finish(state, spec))(method.init(spec)))
    assert set(re.findall(r"f32\[([\d,]+)\] \w+:f32\[[\d,]+\] = eigh\[", text)) == {"3,3,2,2,16,16"}


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


# ---- the dynamic strategy ----------------------------------------------------------------------------------------

DYNAMIC = {
    "strategy": "dynamic", "fraction": 0.3, "segment": 128, "buffer": 16, "max_loss": 0.12, "max_variance": 0.5,
    "lifetime": 60.0,
}  # fmt: skip
DYNAMIC_STEPS = 150


@functools.cache
def uneven():
    """Rows whose KV heads want different strategies, and whose decoded tokens lie in other directions than the prompt.

    Keys of head 0 drift slowly and lie in few directions; keys of head 1 jump and are nearly isotropic.
    """
    lengths, dim = (150, 40), 32
    total = max(lengths) + DYNAMIC_STEPS
    q, k, v = random_tokens(12, 2, 2, 2, total, dim)
    rng = np.random.default_rng(5)
    for row, length in enumerate(lengths):
        for h, (decay, slow) in enumerate([(1.2, 0.97), (0.35, 0.0)]):
            spectrum = np.arange(1, dim + 1.0) ** -decay * 3
            for first, stop in ((0, length), (length, length + 60), (length + 60, total)):
                for x, keep in ((k, slow), (v, 0.0)):
                    axes = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
                    noise = rng.normal(size=(stop - first, dim)) * spectrum
                    for t in range(1, stop - first):
                        noise[t] = keep * noise[t - 1] + math.sqrt(1 - keep**2) * noise[t]
                    x[row, h, first:stop] = noise @ axes
    return (q, k, v), lengths


def still(dim):
    """No rotation, so that slow keys stay slow."""
    return np.zeros(dim // 2, np.float32)


@pytest.mark.slow
def test_dynamic_strategy_follows_the_oracle():
    """Plans differ between heads and segments, output segments are finalised, and every step attends as it should."""
    data, lengths = uneven()
    _, traces = against_oracle("mosaickv", data, lengths, still(32), **DYNAMIC)
    for trace in traces:
        assert len(trace.finalised) >= 2
        assert any(plans[0] != plans[1] for plans in trace.plans)
    seen = {plan for trace in traces for plans in trace.plans for plan in plans}
    assert len({rank for rank, _, _ in seen}) >= 2 and len({block for _, _, block in seen}) >= 2
    assert len({group for _, group, _ in seen}) >= 2


@pytest.mark.parametrize(
    "changed",
    [
        {"max_loss": 0.0},
        {"max_loss": 1.0, "max_variance": 0.0},
        {"max_variance": 10.0, "max_loss": 0.2},
        {"segment": 32, "lifetime": 1e6},
        {"lifetime": 10.0},
    ],
    ids=str,
)
@pytest.mark.thorough
def test_every_dynamic_knob_equals_the_oracle(changed):
    data, lengths = uneven()
    steps = 70
    q, k, v = (x[..., : max(lengths) + steps, :] for x in data)
    _, traces = against_oracle("mosaickv", (q, k, v), lengths, still(32), **{**DYNAMIC, **changed})
    plans = {plan for trace in traces for plans in trace.plans for plan in plans}
    if changed.get("max_loss") == 0.0:
        assert {(rank, group) for rank, group, _ in plans} == {(12, 1)}
    if changed.get("max_loss") == 1.0:
        assert plans == {(4, 4, 4)}
    if changed.get("max_variance") == 10.0:
        assert {block for _, _, block in plans} == {16}
