"""`Periodic`: evictions that are applied again while decoding, beside float64 loops; what bounds its memory; refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import registry
from kvjax.decoding.decode import run_step
from kvjax.decoding.prefill import run_prefill
from kvjax.decoding.settle import settle_due
from kvjax.methods import RKV, AdaKV, ExpectedAttention, Full, HeadKV, Knorm, PyramidKV, Quest, SnapKV
from kvjax.protocol.method import LayerSpec
from kvjax.protocol.typing import EMPTY
from kvjax.testing.layer import stored
from kvjax.testing.model import TinyModel
from kvjax.wrappers import Periodic, PerLayer, Stages
from tests.harness import example, frequencies, oracle, random_tokens, small
from tests.kvjax.cases import layer_inputs
from tests.oracles import adakv, expectedattention, headkv, snapkv
from tests.oracles.plain import best, keep_again, rotate_all, softmax

pytestmark = pytest.mark.usefixtures("quick_compile")

LENGTHS = np.array([40, 13, 6, 1])
PROMPT, STEPS, DIM = 40, 14, 8
ACTIVE = np.arange(STEPS)[:, None] % [STEPS + 1, 3, 5, 4] != 2  # [N, B], whether a row gets a token in a step
SNAP = {"budget": 12, "obs_window": 5, "kernel": 3}
HEADS = {**SNAP, "budget": 9, "beta": 1.25, "scores": ((1.0, 4.0), (2.0, 1.0))}
ADA = {**SNAP, "budget": 9, "head_factor": 1.4, "safeguard": 0.5}
EXPECTED = {"budget": 12, "num_sink": 2, "num_future": 7}


class Row:
    """A row's tokens for the rules: float64, un-rotated and rotated."""

    def __init__(self, q, k, v, inv_freq):
        self.q, self.k, self.v = (np.asarray(x, np.float64) for x in (q, k, v))
        self.rotated_q, self.rotated_k, self.inv_freq = rotate_all(q, inv_freq), rotate_all(k, inv_freq), inv_freq


def snapkv_rule(row, tokens, t, budget, **knobs):
    """What SnapKV does to a prompt, done to the tokens of each head, as if these were a prompt."""
    kept = []
    for h, own in enumerate(tokens):
        chosen = snapkv.keep(row.rotated_q[:, :, own], row.rotated_k[:, own], h, len(own), budget, **knobs)
        kept.append({own[at] for at in chosen})
    return kept


def knorm_rule(row, tokens, t, budget):
    norms = [{i: -float(np.sum(np.square(row.k[h, i]))) for i in own} for h, own in enumerate(tokens)]
    return [best(own, budget) for own in norms]


def expectedattention_rule(row, tokens, t, **knobs):
    """The moments cover all queries; the shares are among the tokens that are left."""
    given = row.q, row.rotated_k, row.v
    return [expectedattention.keep(*given, h, own, t + 1, row.inv_freq, **knobs) for h, own in enumerate(tokens)]


def adakv_rule(row, tokens, t, budget, head_factor, safeguard, **window):
    return adakv.keep(window_scores(row, tokens, t, **window), budget, head_factor, safeguard)


def headkv_rule(row, tokens, t, budget, beta, scores, **window):
    found = window_scores(row, tokens, t, **window)
    sizes = [headkv.budget_of(0, h, budget, window["obs_window"], beta, scores) for h in range(len(tokens))]
    return [best(own, size) for own, size in zip(found, sizes, strict=True)]


def window_scores(row, tokens, t, obs_window, kernel, interval):
    """Tokens since the last eviction stand behind the longest head, so a shorter head has empty slots before them."""
    longest = max(map(len, tokens))
    full = []
    for h, own in enumerate(tokens):
        old = len(own) - interval
        slots = own if old < 0 else [*own[:old], *[None] * (longest - len(own)), *own[old:]]
        received = np.zeros((row.q.shape[1], len(slots)))
        for asked in range(max(t + 1 - obs_window, 0), t + 1):
            seen = [at for at, i in enumerate(slots) if i is not None and i <= asked]
            for g in range(len(received)):
                query, keys = row.rotated_q[h, g, asked], row.rotated_k[h]
                weight = softmax([float(query @ keys[slots[at]]) / np.sqrt(len(query)) for at in seen])
                for at, share in zip(seen, weight, strict=True):
                    received[g, at] += share * (slots[at] <= t - obs_window)
        pooled = received.mean(axis=0)
        around = [pooled[max(at - kernel // 2, 0) : at + kernel // 2 + 1].sum() / kernel for at in range(len(slots))]
        full.append({i: np.inf if i > t - obs_window else around[at] for at, i in enumerate(slots) if i is not None})
    return full


# Method, its rule, the rule's knobs, those that differ while decoding, and the interval.
CASES = [
    (Periodic(evict=SnapKV(**SNAP), interval=4), snapkv_rule, SNAP, {}, 4),
    (Periodic(evict=SnapKV(**SNAP), budget=7, interval=2), snapkv_rule, SNAP, {"budget": 7}, 2),
    (Periodic(evict=Knorm(budget=6), budget=9, interval=3), knorm_rule, {"budget": 6}, {"budget": 9}, 3),
    (Periodic(evict=small(ExpectedAttention, **EXPECTED), interval=5), expectedattention_rule, EXPECTED, {}, 5),
    (Periodic(evict=small(AdaKV, **ADA), interval=3), adakv_rule, {**ADA, "interval": 0}, {"interval": 3}, 3),
    (Periodic(evict=small(HeadKV, **HEADS), interval=3), headkv_rule, {**HEADS, "interval": 0}, {"interval": 3}, 3),
]
ALONE = ("rkv", "triattention")  # are periodic by themselves


@functools.cache
def rows():
    return *random_tokens(3, len(LENGTHS), 2, 2, PROMPT + STEPS, DIM), frequencies(DIM)


@jax.jit
def positions(methods, q, k, v, inv_freq):
    """The positions that each method has after each of `STEPS` steps, int32 [N, B, H, S], and the outputs."""
    spec = LayerSpec(
        batch=len(LENGTHS), num_kv_heads=2, group_size=2, head_dim=DIM, dtype="float32", prompt_slots=PROMPT,
        max_new_tokens=STEPS,
    )  # fmt: skip
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    inputs = functools.partial(layer_inputs, (q, k, v, inv_freq))

    whole = jnp.broadcast_to(jnp.arange(PROMPT, dtype=jnp.int32)[None], (len(LENGTHS), PROMPT))
    given = inputs(whole, jnp.where(whole < lengths[:, None], whole, EMPTY), 0)
    states = [method.finish(method.attend(method.init(spec), given)[1], spec) for method in methods]

    def step(states, given):
        active, before = given
        at = (lengths + before)[:, None]
        token = inputs(at, jnp.where(active[:, None], at, EMPTY))
        found = [method.attend(state, token) for method, state in zip(methods, states, strict=True)]
        states = settle_due(methods, tuple(state for _, state in found))
        return list(states), [(state.cache.position, out[..., 0, :]) for state, (out, _) in zip(states, found, strict=True)]

    before = jnp.asarray(np.cumsum(ACTIVE, axis=0) - ACTIVE, jnp.int32)
    return jax.lax.scan(step, states, (jnp.asarray(ACTIVE), before))[1]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [ALONE, pytest.param(range(len(CASES)), marks=pytest.mark.thorough)])
def test_what_is_kept_again_is_what_the_oracles_keep(cases):
    """Each row counts its own tokens, and continues while other rows are evicted. By default, the cases in `ALONE` run."""
    methods = [example(at) if at in ALONE else CASES[at][0] for at in cases]
    found = positions([method.for_layer(0, 2) for method in methods], *rows())
    for at, method, (position, outputs) in zip(cases, methods, found, strict=True):
        evicted = 0
        for row, length in enumerate(LENGTHS.tolist()):
            want = wanted(at, row, length)
            assert ACTIVE[:, row].sum() == len(want.kept)
            for step, kept in zip(np.flatnonzero(ACTIVE[:, row]), want.kept, strict=True):
                got = [set(x[x >= 0].tolist()) for x in np.asarray(position[step, row])]
                assert got == kept, f"{method}: prompt of {length}, step {step}"
                output = want.outputs[ACTIVE[:step, row].sum()]
                np.testing.assert_allclose(outputs[step, row], output, atol=1e-4, rtol=0)
            evicted += sum(seen != kept for seen, kept in zip(want.attended, want.kept, strict=True))
        assert evicted > 3, "no eviction to compare"


def wanted(at, row, length):
    """The oracle's run of a row: of one of `CASES`, or of `ALONE`."""
    q, k, v = (x[row][..., : length + ACTIVE[:, row].sum(), :] for x in rows()[:3])
    inv_freq = rows()[3]
    if at in ALONE:
        return oracle(at).run(q, k, v, length, inv_freq, **oracle(at).KNOBS)
    _, rule, knobs, later, interval = CASES[at]
    given = Row(q, k, v, inv_freq)
    kept = rule(given, [list(range(length))] * len(k), length - 1, **knobs)
    again = functools.partial(rule, given, **{**knobs, **later})
    return keep_again(given.rotated_q, given.rotated_k, given.v, length, interval, kept, again)


# ---- memory -------------------------------------------------------------------------------------------------------

BOUNDED = [
    (Periodic(evict=SnapKV(budget=12, obs_window=5), budget=7, interval=4), 12 + 2 * 4 - 1),
    (Periodic(evict=Knorm(budget=7), budget=jnp.int32(9), capacity=12, interval=1), 12 + 1),
    (Periodic(evict=AdaKV(budget=12, obs_window=5, head_factor=1.5), interval=4), 18 + 2 * 4 - 1),
    (RKV(budget=12, interval=4), 12 + 2 * 4 - 1),
]


@pytest.mark.parametrize("method, slots", BOUNDED, ids=lambda x: type(x).__name__)
def test_storage_does_not_depend_on_how_many_tokens_follow(method, slots):
    """Ten thousand or a million: from shapes alone. A decoding loop cannot change them."""
    tiny = TinyModel(num_layers=1)
    params = jax.eval_shape(tiny.random_params)
    tokens, length = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 32), (2,)))

    def after(room):
        read = functools.partial(run_prefill, method=method, model=tiny, max_new_tokens=room, chunk_size=32)
        return jax.eval_shape(read, params, tokens, length).layers

    short, long = after(10_000), after(1_000_000)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), short) == jax.tree.map(lambda x: (x.shape, x.dtype), long)
    assert stored(short).num_slots == slots


@pytest.mark.parametrize(
    "evict",
    [
        Knorm(budget=7),
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in (AdaKV(budget=9, obs_window=3), small(ExpectedAttention, **EXPECTED))
        ),
    ],
)
def test_a_ratio_keeps_a_share_of_what_each_row_has_seen(evict):
    """Of its prompt, and of prompt and answer after every interval; beyond the room, no more than its share."""
    tiny, interval, ratio, rooms, steps = TinyModel(num_layers=1), 4, 0.3, 16, 40
    lengths = jnp.array([40, 13, 6, 1], jnp.int32)
    method = Periodic(evict=evict, interval=interval, ratio=ratio)

    @jax.jit
    def run(params):
        tokens = jnp.full((4, 40), 5, jnp.int32)
        cache = run_prefill(params, tokens, lengths, method, model=tiny, max_new_tokens=rooms, chunk_size=40)
        first = stored(cache.layers[0]).valid.sum(axis=2)

        def step(cache, _):
            cache = run_step(params, cache, jnp.full((4, 1), 7, jnp.int32), jnp.ones((4, 1), bool))
            return cache, stored(cache.layers[0]).valid.sum(axis=2)

        return first, jax.lax.scan(step, cache, None, length=steps)[1]

    first, held = (np.asarray(x).mean(axis=-1) for x in run(tiny.random_params()))
    least = max(evict.obs_window, 1 + getattr(evict, "num_sink", 0))

    def share(seen):
        kept = np.clip(np.round(ratio * seen), least, np.ceil(ratio * (40 + rooms)))
        return np.minimum(kept, seen)

    np.testing.assert_array_equal(first, share(np.asarray(lengths)))
    for at in range(interval, steps + 1, interval):
        np.testing.assert_array_equal(held[at - 1], share(np.asarray(lengths) + at), err_msg=f"after {at} tokens")
    assert held[-1][0] == np.ceil(ratio * (40 + rooms)) and (np.diff(held, axis=0) <= 1).all()


def test_a_ratio_of_layers_is_in_proportion_to_their_budgets():
    pyramid = PyramidKV(budget=100, obs_window=8)
    layers = [Periodic(evict=pyramid, ratio=0.25).for_layer(layer, 4) for layer in range(4)]
    np.testing.assert_allclose(np.mean([x.ratio for x in layers]), 0.25, atol=0.002)
    assert [x.ratio for x in layers] == [0.25 * pyramid.for_layer(layer, 4).budget / 100 for layer in range(4)]
    with pytest.raises(ValueError, match="ratio needs one budget"):
        Periodic(evict=small(HeadKV, **HEADS), ratio=0.5).for_layer(0, 2)
    for wrong in ({"ratio": 0.5, "budget": 9}, {"ratio": 0.0}, {"ratio": 1.5}):
        with pytest.raises(ValueError, match="ratio"):
            Periodic(evict=Knorm(), **wrong)
    assert kvjax.make("periodic(knorm, ratio=1/4)").ratio == 0.25


def test_a_step_asks_once_whether_rows_are_due():
    """A condition in each layer would copy the layer's cache in every step, and may wait for the host there."""
    tiny = TinyModel(num_layers=3)
    params, tokens, length = jax.eval_shape(tiny.random_params), *(jnp.zeros(n, jnp.int32) for n in ((1, 64), (1,)))
    loops = []
    for method in (SnapKV(budget=40), Periodic(evict=SnapKV(budget=40), interval=16)):
        read = functools.partial(run_prefill, method=method, model=tiny, max_new_tokens=31, chunk_size=64)
        cache = jax.eval_shape(read, params, tokens, length)
        step = jax.make_jaxpr(run_step)(params, cache, tokens[:, :1], jnp.ones((1, 1), bool)).jaxpr
        # Not what is inside a loop. A loop with a derivative of its own is in a call of its own.
        inner = [equation.params["call_jaxpr"].eqns for equation in step.eqns if equation.primitive.name == "custom_jvp_call"]
        names = [equation.primitive.name for equations in (step.eqns, *inner) for equation in equations]
        assert "cond" not in names
        loops.append(names.count("while"))
    assert loops[1] == loops[0] + 1


# ---- what wraps what ----------------------------------------------------------------------------------------------


def test_rkv_is_periodic_by_itself():
    assert RKV(budget=16, interval=5).for_layer(0, 2) == Periodic(evict=RKV(budget=16, interval=None), interval=5)
    once = RKV(budget=16, interval=None)
    assert once.for_layer(0, 2) is once
    Stages(evict=once, retrieve=Quest())
    mixed = PerLayer(layers={0: Full()}, default=Periodic(evict=once, interval=5))
    assert mixed.for_layer(1, 2) == RKV(budget=16, interval=5).for_layer(1, 2)


def test_every_eviction_says_whether_it_can_be_applied_again():
    """What says so may not ask for what ends with the prompt; `Periodic` checks nothing else."""
    able = {name for name in registry.builtin() if kvjax.make(name).composable and kvjax.make(name).slots_again()}
    assert able == {"snapkv", "pyramidkv", "adakv", "headkv", "knorm", "expectedattention", "rkv", "tovaonce", "triattention"}
    for name in able:
        method = kvjax.make(name)
        assert not (method.reads.mass or method.reads.tokens or method.observes)
