"""`Reuse`: what layers and later tokens attend to under another layer's or an older list, beside float64 loops."""

import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax.decoding.checks import check_sizes
from kvjax.methods import SOCKET, Quest, RetrievalAttention
from kvjax.protocol.method import num_bytes
from kvjax.testing.layer import random_tokens
from kvjax.testing.model import TinyModel
from kvjax.wrappers import Pattern, Prefill, Reuse, Stages
from tests import tape
from tests.harness import SMALL_PATTERNS, repeated
from tests.oracles import quest
from tests.oracles.plain import attend_to, rotate_all

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("reuse")]
LAYERS, LENGTHS, STEPS = 5, (5, 13, 40), 7
TOTAL = max(LENGTHS) + STEPS
INNER = Quest(budget=12, page_size=4, num_dense_layers=1)
HEADS = ((0, 0), (0, 1), (1, 0), (0, 1), (1, 1))
# Knobs, and the layer whose list each layer takes; layer 0 is dense.
SETTINGS = {
    "every": ({"every": 2}, (None, 1, 1, 3, 3)),
    "heads": ({"every": 2, "steps": 3, "head_map": HEADS}, (None, 1, 1, 3, 3)),
    "anchors": ({"anchors": (2, 3)}, (None, 1, 2, 3, 3)),
    "steps": ({"every": 1, "steps": 3}, (None, 1, 2, 3, 4)),
    "both": ({"every": 4, "steps": 6}, (None, 1, 1, 1, 1)),
    "join": ({"every": 2, "join": True}, (None, 1, 1, 3, 3)),
}


@functools.cache
def recording():
    """A tape and its parameters: a row for each length."""
    rows = len(LENGTHS)
    q, k, v = (x.reshape(LAYERS, rows, *x.shape[1:]) for x in random_tokens(1, LAYERS * rows, 2, 2, TOTAL, 8))
    logits = np.zeros((rows, TOTAL, TOTAL))
    return tape.record(*(np.asarray(x, np.float32) for x in (q, k, v, logits)))


@pytest.mark.parametrize("name", repeated([pytest.param(x) for x in SETTINGS], but=("heads",)))
def test_layers_and_later_tokens_attend_as_the_loops_say(name):
    (knobs, sources), (player, params) = SETTINGS[name], recording()
    cache = tape.read(player, params, LENGTHS, Reuse(method=INNER, **knobs), STEPS)
    outputs = np.asarray(tape.decode(params, cache, np.ones((STEPS, len(LENGTHS)), bool))[1])
    q, k = (rotate_all(np.asarray(params[name]), player.inv_freq) for name in ("q", "k"))
    v = np.asarray(params["v"], np.float64)
    for row, layer in np.ndindex(len(LENGTHS), LAYERS):
        for step in range(STEPS):
            t, source = LENGTHS[row] + step, sources[layer]
            made = t - step % knobs.get("steps", 1)
            chosen = [sorted(range(t + 1))] * 2
            if source is not None:
                own = HEADS[layer] if "head_map" in knobs and source != layer else (0, 1)
                lists = [quest.pick(q[source, row], k[source, row], h, made, 12, 4) for h in own]
                if "join" in knobs and source != layer:
                    lists = [lists[0] | lists[1]] * 2
                chosen = [sorted(x | set(range(made + 1, t + 1))) for x in lists]
            want = attend_to(q[layer, row], k[layer, row], v[layer, row], t, chosen)
            np.testing.assert_allclose(outputs[step, layer, row], want, atol=1e-4, err_msg=f"{row} {layer} {step}")


@pytest.mark.slow
@pytest.mark.parametrize("inner", [INNER, *(pytest.param(x, marks=pytest.mark.thorough) for x in (
    RetrievalAttention(budget=6, num_sink=2, num_local=5), SOCKET(budget=6, num_sink=2, num_local=4, num_tables=8),
))], ids=lambda x: type(x).__name__)  # fmt: skip
def test_every_layer_for_itself_and_for_one_token_is_the_method(inner):
    player, params = recording()
    active = np.ones((STEPS, len(LENGTHS)), bool)
    caches = [tape.read(player, params, LENGTHS, x, STEPS) for x in (inner, Reuse(method=inner, every=1))]
    one, other = (tape.decode(params, cache, active) for cache in caches)
    np.testing.assert_array_equal(one[1], other[1])
    costs = [jax.jit(kvjax.accounting.stats.step_cost)(cache) for cache, *_ in (one, other)]
    np.testing.assert_array_equal(*(cost.attended for cost in costs))
    np.testing.assert_array_equal(*(cost.metadata_bytes for cost in costs))


@pytest.mark.slow
def test_followers_hold_and_read_no_metadata():
    player, params = recording()
    reused, plain = (tape.read(player, params, LENGTHS, x, STEPS) for x in (Reuse(method=INNER, every=4), INNER))
    assert [num_bytes(x.aux) > 0 for x in reused.layers] == [False, True, False, False, False]
    reused, plain = (tape.decode(params, x, np.ones((2, len(LENGTHS)), bool))[0] for x in (reused, plain))
    costs = [jax.jit(kvjax.accounting.stats.step_cost)(x) for x in (reused, plain)]
    np.testing.assert_array_equal(4 * costs[0].metadata_bytes, costs[1].metadata_bytes)
    np.testing.assert_array_equal(costs[0].attended, costs[1].attended)


@pytest.mark.thorough
def test_a_sparse_prompt_goes_around_it():
    tiny = TinyModel(num_layers=4)
    params, prompt = tiny.random_params(0), np.random.default_rng(0).integers(0, 60, (1, 40)).astype(np.int32)
    inner = Reuse(method=Quest(budget=8, page_size=4, num_dense_layers=0), every=2)
    dense = Prefill(method=inner, pattern=Pattern(diagonals=60), **{**SMALL_PATTERNS, "chunk": 64})
    tokens = [
        kvjax.generate(
            params, kvjax.prefill(params, prompt, config=tiny, method=x, max_new_tokens=8, pad_multiple=1), max_new_tokens=8
        ).tokens
        for x in (inner, dense)
    ]
    np.testing.assert_array_equal(*tokens)


def test_what_does_not_fit_the_model_is_refused():
    tiny = TinyModel(num_layers=4)
    for told, knobs in (
        ("anchors .*below 4, got .*7", {"anchors": (0, 7)}),
        ("head_map .*2 KV heads .*4 layers, got 1 rows", {"head_map": ((0, 1),)}),
        ("head_map .*entries up to 5", {"head_map": ((0, 5),) * 4}),
    ):
        with pytest.raises(ValueError, match=told):
            check_sizes(Reuse(method=INNER, **knobs), tiny)
    Reuse(method=Stages(evict=kvjax.methods.SnapKV(), retrieve=INNER), every=1, steps=4)
    alone = Reuse(method=INNER, every=2)
    assert alone.on_layers((0,), 4) == alone, "no layer selects, so there is no anchor"
