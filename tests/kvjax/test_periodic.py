"""`Periodic`: evictions that are applied again while decoding, beside float64 loops; what bounds its memory; refusals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import registry
from kvjax.method import Inputs, LayerSpec
from kvjax.methods import (
    RKV,
    AdaKV,
    ExpectedAttention,
    Full,
    KeyDiff,
    Knorm,
    ObservedAttention,
    PyramidKV,
    Quest,
    SnapKV,
)
from kvjax.step import run_decode, run_prefill
from kvjax.testing.layer import stored
from kvjax.testing.model import TinyModel
from kvjax.typing import EMPTY
from tests.harness import example, frequencies, random_tokens
from tests.oracles import expectedattention, rkv, snapkv
from tests.oracles.plain import best, keep_again, rotate_all

pytestmark = pytest.mark.usefixtures("quick_compile")

LENGTHS = np.array([40, 13, 6, 1])
PROMPT, STEPS, DIM = 40, 14, 8
SNAP = {"budget": 12, "obs_window": 5, "kernel": 3, "pooling": "avg"}
EXPECTED = {"budget": 12, "num_sink": 2, "num_future": 7, "epsilon": 0.0}


def again_snapkv(q, k, v, rotated_q, rotated_k, inv_freq, budget, again, **knobs):
    """What SnapKV does to a prompt, done to the kept tokens, as if these were a prompt."""

    def keep(h, tokens, budget):
        kept = snapkv.keep(rotated_q[:, :, tokens], rotated_k[:, tokens], h, len(tokens), budget, **knobs)
        return {tokens[at] for at in kept}

    return (lambda h, tokens: keep(h, tokens, budget)), (lambda h, tokens, t: keep(h, tokens, again))


def again_knorm(q, k, v, rotated_q, rotated_k, inv_freq, budget, again):
    def keep(h, tokens, budget):
        return best({i: -float(np.sum(np.square(k[h, i], dtype=np.float64))) for i in tokens}, budget)

    return (lambda h, tokens: keep(h, tokens, budget)), (lambda h, tokens, t: keep(h, tokens, again))


def again_expectedattention(q, k, v, rotated_q, rotated_k, inv_freq, budget, again, num_sink, num_future, epsilon):
    """The moments are those of all queries; the shares are among the kept tokens."""

    def keep(h, tokens, t, budget):
        moments = num_sink, num_future, epsilon
        return expectedattention.keep(q, rotated_k, v, h, tokens, t + 1, inv_freq, budget, *moments)

    return (lambda h, tokens: keep(h, tokens, len(tokens) - 1, budget)), (lambda h, tokens, t: keep(h, tokens, t, again))


# Method, its oracle's rule, the rule's knobs, and the interval.
CASES = [
    (kvjax.Periodic(evict=SnapKV(**SNAP), interval=4), again_snapkv, {**SNAP, "again": 12}, 4),
    (kvjax.Periodic(evict=SnapKV(**SNAP), budget=7, interval=2), again_snapkv, {**SNAP, "again": 7}, 2),
    (kvjax.Periodic(evict=Knorm(budget=6), budget=9, interval=3), again_knorm, {"budget": 6, "again": 9}, 3),
    (kvjax.Periodic(evict=ExpectedAttention(**EXPECTED), interval=5), again_expectedattention, {**EXPECTED, "again": 12}, 5),
]


@functools.cache
def rows():
    return *random_tokens(3, len(LENGTHS), 2, 2, PROMPT + STEPS, DIM), frequencies(DIM)


@jax.jit
def positions(methods, q, k, v, inv_freq):
    """The positions that each method has after each of `STEPS` tokens, int32 [N, B, H, S], and the outputs."""
    spec = LayerSpec(
        layer=0, batch=len(LENGTHS), num_kv_heads=2, group_size=2, head_dim=DIM, dtype="float32", prompt_slots=PROMPT,
        max_new_tokens=STEPS,
    )  # fmt: skip
    lengths = jnp.asarray(LENGTHS, jnp.int32)

    def inputs(at, position, start=None):
        def pick(x):
            return jnp.take_along_axis(x, at.reshape(len(at), *(1,) * (x.ndim - 3), -1, 1), axis=-2)

        return Inputs(
            query=pick(q), key=pick(k), value=pick(v), position=position, tokens=at, inv_freq=inv_freq, shared=None,
            start=start,
        )  # fmt: skip

    whole = jnp.broadcast_to(jnp.arange(PROMPT, dtype=jnp.int32)[None], (len(LENGTHS), PROMPT))
    given = inputs(whole, jnp.where(whole < lengths[:, None], whole, EMPTY), 0)
    states = [method.finish(method.attend(method.init(spec), given)[1], spec) for method in methods]

    def step(states, index):
        at = (lengths + index)[:, None]
        found = [method.attend(state, inputs(at, at)) for method, state in zip(methods, states, strict=True)]
        return [state for _, state in found], [(state.cache.position, out[..., 0, :]) for out, state in found]

    return jax.lax.scan(step, states, jnp.arange(STEPS, dtype=jnp.int32))[1]


def test_what_is_kept_again_is_what_the_oracles_keep():
    """One program for all: each row counts its own tokens, and decodes while others are evicted."""
    methods = [method.for_layer(0, 2) for method, *_ in CASES] + [example("rkv").for_layer(0, 2)]
    found = positions(methods, *rows())
    for at, (position, outputs) in enumerate(found):
        evicted = 0
        for row, length in enumerate(LENGTHS.tolist()):
            want = wanted(at, row, length)
            for step, kept in enumerate(want.kept):
                got = [set(x[x >= 0].tolist()) for x in np.asarray(position[step, row])]
                assert got == kept, f"{methods[at]}: prompt of {length}, step {step}"
                np.testing.assert_allclose(outputs[step, row], want.outputs[step], atol=1e-4, rtol=0)
            evicted += sum(seen != kept for seen, kept in zip(want.attended, want.kept, strict=True))
        assert evicted > 3, "no eviction to compare"


def wanted(at, row, length):
    """The oracle's run of a row: of one of `CASES`, or behind them of RKV."""
    q, k, v = (x[row][..., : length + STEPS, :] for x in rows()[:3])
    inv_freq = rows()[3]
    if at == len(CASES):
        return rkv.run(q, k, v, length, inv_freq, **rkv.KNOBS)
    _, rule, knobs, interval = CASES[at]
    rotated = rotate_all(q, inv_freq), rotate_all(k, inv_freq)
    first, later = rule(q, k, v, *rotated, inv_freq, **knobs)
    kept = [first(h, list(range(length))) for h in range(len(k))]
    return keep_again(*rotated, np.asarray(v, np.float64), length, interval, kept, later)


# ---- memory -------------------------------------------------------------------------------------------------------

BOUNDED = [
    (kvjax.Periodic(evict=SnapKV(budget=12, obs_window=5), interval=4), 12 + 2 * 4 - 1),
    (kvjax.Periodic(evict=SnapKV(budget=12, obs_window=5), budget=7, interval=4), 12 + 2 * 4 - 1),
    (kvjax.Periodic(evict=Knorm(budget=7), budget=jnp.int32(9), capacity=12, interval=1), 12 + 1),
    (RKV(budget=12, interval=4), 12 + 2 * 4 - 1),
]


@pytest.mark.parametrize("method, slots", BOUNDED, ids=lambda x: type(x).__name__)
def test_storage_does_not_depend_on_how_many_tokens_follow(method, slots):
    """Ten thousand or a million: from shapes alone, after the prompt and after a decoding loop."""
    tiny = TinyModel()
    params = jax.eval_shape(tiny.random_params)
    tokens, length = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 64), (2,)))

    def after(room, decoded):
        def run(params, tokens, length):
            cache = run_prefill(params, tokens, length, method, model=tiny, max_new_tokens=room, chunk_size=32)
            if not decoded:
                return cache.layers
            nobody = jnp.zeros((2,), bool)
            sampler, eos = kvjax.sampling.Sampler(), jnp.zeros((0,), jnp.int32)
            end = run_decode(params, cache, sampler, None, eos, nobody, steps=room, stop_early=True)
            return end.cache.layers

        return jax.eval_shape(run, params, tokens, length)

    short, long = after(10_000, False), after(1_000_000, True)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), short) == jax.tree.map(lambda x: (x.shape, x.dtype), long)
    assert {stored(layer).num_slots for layer in short} == {slots}


def test_a_long_generation_keeps_its_bytes():
    """Budget and interval bound what is held at every call's end, however many tokens were generated."""
    tiny = TinyModel(num_layers=1, max_position_embeddings=1 << 16)
    params = tiny.random_params()
    method = kvjax.Periodic(evict=SnapKV(budget=9, obs_window=3), interval=4)
    cache = kvjax.prefill(params, [[5] * 20, [7] * 3], config=tiny, method=method, max_new_tokens=10_000, pad_multiple=1)
    arrays = [x.shape for x in jax.tree.leaves(cache.layers)]
    for _ in range(3):
        out = kvjax.generate(params, cache, max_new_tokens=203, eos_token_ids=())
        cache = out.cache
        held = np.asarray(stored(cache.layers[0]).valid.sum(axis=2))
        assert (held < 9 + 4).all() and (held >= 9).all()
        assert [x.shape for x in jax.tree.leaves(cache.layers)] == arrays
        assert (np.asarray(out.stats.attended) < 9 + 4).all()
    newest = np.asarray(stored(cache.layers[0]).position.max(axis=2))
    np.testing.assert_array_equal(newest, [[20 + 3 * 203 - 1] * 2, [3 + 3 * 203 - 1] * 2])


# ---- what wraps what ----------------------------------------------------------------------------------------------


def test_layers_have_the_budgets_of_their_method():
    method = kvjax.Periodic(evict=PyramidKV(budget=16, obs_window=4, beta=4), budget=10, interval=8)
    pyramid = PyramidKV(budget=10, obs_window=4, beta=4)
    for layer in range(3):
        made = method.for_layer(layer, 3)
        assert made.evict == method.evict.for_layer(layer, 3) and made.interval == 8
        assert made.budget == made.capacity == pyramid.for_layer(layer, 3).budget
    assert method.for_layer(0, 3).evict.budget > method.for_layer(2, 3).evict.budget


def test_rkv_is_periodic_by_itself():
    assert RKV(budget=16, interval=5).for_layer(0, 2) == kvjax.Periodic(evict=RKV(budget=16, interval=None), interval=5)
    once = RKV(budget=16, interval=None)
    assert once.for_layer(0, 2) is once
    kvjax.Stages(evict=once, retrieve=Quest())
    mixed = kvjax.PerLayer(layers={0: Full()}, default=kvjax.Periodic(evict=once, interval=5))
    assert mixed.for_layer(1, 2) == RKV(budget=16, interval=5).for_layer(1, 2)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: kvjax.Periodic(evict="snapkv"), "Periodic: evict must be a kvjax method, got the name 'snapkv'"),
        (lambda: kvjax.Periodic(evict=KeyDiff()), "evict must be a method that chooses cache slots .*, got KeyDiff"),
        (lambda: kvjax.Periodic(evict=Full()), "evict must discard tokens, but Full keeps every token"),
        (lambda: kvjax.Periodic(evict=Quest()), "evict must discard tokens, but Quest keeps every token"),
        (lambda: kvjax.Periodic(evict=kvjax.make("tova")), "but TOVA evicts while decoding itself"),
        (lambda: kvjax.Periodic(evict=RKV()), "but RKV evicts while decoding itself"),
        (lambda: kvjax.Periodic(evict=kvjax.Periodic(evict=SnapKV())), "but Periodic evicts while decoding itself"),
        (lambda: kvjax.Periodic(evict=ObservedAttention()), "ObservedAttention cannot be applied again to what it has kept"),
        (lambda: kvjax.Periodic(evict=AdaKV()), "AdaKV cannot be applied again .* equally many tokens in every head"),
        (lambda: kvjax.Periodic(evict=SnapKV(), budget=31), "SnapKV: budget must be .* at least 32 tokens .*, got 31"),
        (lambda: kvjax.Periodic(evict=SnapKV(), budget=99, capacity=64), "Periodic: budget must be at most capacity=64"),
        (lambda: kvjax.Periodic(evict=SnapKV(), capacity=64), "capacity is that of budget, .*, got capacity=64"),
        (lambda: kvjax.Periodic(evict=SnapKV(), interval=0), "Periodic: interval must be .* of at least 1, got 0"),
        (lambda: RKV(budget=7), "RKV: budget must be .* at least 8 tokens .the obs_window=8.*, got 7"),
        (lambda: kvjax.Stages(evict=kvjax.Periodic(evict=SnapKV()), retrieve=Quest()), "Periodic moves slots while decoding"),
        (lambda: kvjax.DenseBelow(length=9, method=kvjax.Periodic(evict=SnapKV())), "Periodic discards slots"),
    ],
)
def test_what_cannot_be_wrapped_is_refused_by_a_sentence(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_every_eviction_says_whether_it_can_be_applied_again():
    """What says so may not ask for what ends with the prompt; `Periodic` checks nothing else."""
    able = {name for name in registry.builtin() if kvjax.make(name).composable and kvjax.make(name).slots_again()}
    assert able == {"snapkv", "pyramidkv", "knorm", "expectedattention", "rkv"}
    for name in able:
        method = kvjax.make(name)
        assert not (method.observes_prompt or method.reads_tokens or method.observes_steps)
