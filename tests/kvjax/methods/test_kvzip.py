"""KVzip: its second reading of a prompt, against the oracle on recorded q, k and v, against kvpress, and on models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import registry
from kvjax.cache import PlainCache
from kvjax.decoding.checks import check_fits
from kvjax.decoding.layers import check_divisible
from kvjax.methods import H2O, KVgrad, KVzip, Quest, SnapKV
from kvjax.methods.kvgrad import _behind
from kvjax.protocol.typing import pytree
from kvjax.rope import rotate
from kvjax.testing.layer import random_tokens, stored
from kvjax.testing.model import TinyModel
from kvjax.wrappers import Periodic, PerLayer, Stages
from models import ModelConfig
from pallas_kernels.soft_cap import soft_cap
from tests import tape
from tests.harness import example, repeated, small
from tests.kvjax.test_prompt_eviction import compressed, golden, model
from tests.oracles import kvgrad
from tests.oracles import kvzip as oracle
from tests.tiny_models import vivid_params

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("kvzip")]
STEPS = 3
ROWS, TOTAL = len(oracle.LENGTHS), max(oracle.LENGTHS) + 10
SETTINGS = {
    "as it is": {},
    "layer by layer": {"layerwise": True},
    "without being asked": {"ask": (), "ask_later": (), "answer": (), "overlap": 0},
    "at once, and a bound for each layer": {"chunk": 50, "head_factor": (0.75, 1.5)},
    "in tokens": {"chunk": 1, "overlap": 8},
    "no first tokens": {"num_sink": 0, "budget": 9, "head_factor": 1.0},
}


def probed(rng, layers, rows, total, heads, group, dim, width=12):
    """What a tape needs for nudges: float32 arrays."""
    shapes = {
        "hidden": (layers, rows, total, width),
        "gain": (layers, rows, total, width),
        "base": (rows, total, width),
        "kernel": (layers, heads, group, dim, width),
    }
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("method", [KVzip, KVgrad], ids=["KVzip+", "KVgrad"])
def test_weights_count_what_values_write_and_what_depends_on_them(method):
    player, params = recording()
    params = {**params, **probed(np.random.default_rng(7), 2, ROWS, TOTAL, 2, 2, 8)}
    knobs = {**(oracle if method is KVzip else kvgrad).KNOBS}
    plus = {"plus": True} if method is KVzip else {}
    cache = tape.read(player, params, oracle.LENGTHS, small(method, **knobs, **plus), STEPS)
    held = [np.asarray(stored(layer).position) for layer in cache.layers]
    hidden, gain, base, kernel = (np.asarray(params[x], np.float64) for x in ("hidden", "gain", "base", "kernel"))
    # The stream is base + gain * nudge, whose squares have the gradient 2 * base * gain where nudges are 0.
    factor = 1 / np.linalg.norm(hidden, axis=3) if method is KVzip else np.linalg.norm(2 * base[None] * gain, axis=3)
    q, k, v = (np.asarray(params[name]) for name in ("q", "k", "v"))
    for row, length in enumerate(oracle.LENGTHS):
        parts = q[:, row], k[:, row], v[:, row], length, player.inv_freq
        want = oracle.kept(*parts, **knobs, factor=factor[:, row], kernel=kernel)
        assert [[set(x[x >= 0].tolist()) for x in layer[row]] for layer in held] == want, f"prompt of {length}"
    assert want != oracle.kept(*parts, **knobs)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_attention_behind_a_prompt_has_the_gradient_of_its_softmax(cap):
    rng, real, stored = np.random.default_rng(5), np.array([70, 66]), np.array([20, 7])
    shapes = [(2, 2, 2, 70, 8)] * 2 + [(2, 2, 70, 8)] * 2 + [(2, 2, 20, 8)] * 2 + [(2, 2)]
    query, to, key, value, past, held, sinks = (jnp.asarray(rng.normal(size=x), jnp.float32) for x in shapes)
    at = np.where(np.arange(70) < real[:, None], np.arange(20, 90), -1)
    to *= (at >= 0).astype(np.float32)[:, None, None, :, None]
    seen = np.broadcast_to(np.arange(20) < stored[:, None, None], (2, 70, 20)), np.tri(70) * (at >= 0)[:, None]
    seen = np.concatenate(seen, axis=2).astype(np.float32)[:, None, None]

    def plain(query, key, value):
        logits = jnp.einsum("bhgtd,bhsd->bhgts", query, jnp.concatenate([past, key], 2)) / np.sqrt(8)
        share = jnp.exp(logits if cap is None else cap * jnp.tanh(logits / cap)) * seen
        share /= share.sum(axis=4, keepdims=True) + jnp.exp(sinks)[None, :, :, None, None]
        return jnp.sum(jnp.einsum("bhgts,bhsd->bhgtd", share, jnp.concatenate([held, value], 2)) * to)

    def behind(*given):
        empty = jnp.zeros((2, 2, 20), jnp.int32)
        cache = PlainCache(key=past, value=held, position=empty, cursor=jnp.asarray(stored, jnp.int32))
        return jnp.sum(_behind(*given, cache, jnp.asarray(at, jnp.int32), sinks)[0] * to)

    with soft_cap(cap):
        got, want = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(query, key, value) for f in (behind, plain))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


@functools.cache
def recording(ties=False):
    """A tape and its parameters: two layers of two KV heads, a row for each length."""
    q, k, v = (x.reshape(2, ROWS, *x.shape[1:]) for x in random_tokens(1, 2 * ROWS, 2, 2, TOTAL, 8))
    if ties:  # whole numbers, and no rotation
        rng = np.random.default_rng(3)
        q, k = (rng.integers(-1, 2, x.shape) for x in (q, k))
    logits = np.random.default_rng(2).normal(size=(ROWS, TOTAL, TOTAL))
    arrays = (np.asarray(x, np.float32) for x in (q, k, v, logits))
    return tape.record(*arrays, **({"rope_scaling": tape.Still()} if ties else {}))


def compare(knobs, ties=False, steps=0, **options):
    """Every row is what the oracle says: the positions that each head of each layer keeps, and the first ``steps``."""
    player, params = recording(ties)
    cache = tape.read(player, params, oracle.LENGTHS, small(KVzip, **knobs), STEPS, **options)
    held = [np.asarray(stored(layer).position) for layer in cache.layers]
    outputs = np.asarray(tape.decode(params, cache, np.ones((steps, ROWS), bool))[1]) if steps else None
    q, k, v = (np.asarray(params[name]) for name in ("q", "k", "v"))
    for row, length in enumerate(oracle.LENGTHS):
        parts = q[:, row], k[:, row], v[:, row], length, player.inv_freq
        got = [[set(x[x >= 0].tolist()) for x in layer[row]] for layer in held]
        assert got == oracle.kept(*parts, **knobs), f"prompt of {length}"
        for layer, trace in enumerate(oracle.run(*parts, **knobs) if steps else ()):
            np.testing.assert_allclose(outputs[:, layer, row], trace.outputs[:steps], atol=1e-4)


@pytest.mark.parametrize("name", repeated([pytest.param(name) for name in SETTINGS], but=["as it is"]))
def test_ragged_rows_are_as_the_oracle_says(name):
    compare({**oracle.KNOBS, **SETTINGS[name]})


@pytest.mark.thorough
def test_chunks_of_the_first_reading_change_nothing_and_later_tokens_see_what_is_kept():
    compare(oracle.KNOBS, steps=STEPS, chunk_size=9)


@pytest.mark.thorough
@pytest.mark.parametrize("layerwise", [False, True])
def test_ties_go_where_the_oracle_puts_them(layerwise):
    compare({**oracle.KNOBS, "layerwise": layerwise}, ties=True)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["kvzip", "kvzip layerwise"])
def test_kvpress_keeps_the_same_tokens_and_has_the_same_logits(name, tmp_path_factory):
    params, _ = model(tmp_path_factory.getbasetemp())
    knobs = {"budget": 24, "head_factor": 3.0, "layerwise": name != "kvzip", "num_sink": 4, "chunk": 20}
    cache = compressed(small(KVzip, **knobs, ask=(5, 9, 11), ask_later=(7, 2), answer=(3, 8)), tmp_path_factory.getbasetemp())
    want = golden()["twice"][name]
    for layer, heads in enumerate(want["kept"]):
        position = np.asarray(stored(cache.layers[layer]).position[0])
        assert [sorted(x[x >= 0].tolist()) for x in position] == heads, f"layer {layer}"
    for token, logits in zip(golden()["tokens"][golden()["prompt"] :], want["logits"], strict=True):
        cache = kvjax.decode_step(params, cache, np.array([token]))
        np.testing.assert_allclose(cache.logits[0], logits, atol=2e-4, rtol=0)


# ---- a model ------------------------------------------------------------------------------------------------------


def dense(params, config, tokens):
    """Rotated q and k of each layer, from one dense pass over all ``tokens``."""
    found = []
    at = jnp.arange(len(tokens), dtype=jnp.int32)

    def attend(layer, state, q, k, v):
        q, k = (rotate(x, at.reshape((1,) * (x.ndim - 2) + (-1,)), config.inv_freq) for x in (q, k))
        found.append((np.asarray(q[0], np.float64), np.asarray(k[0], np.float64)))
        window = config.windows[layer] or len(tokens)
        seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - window)
        logits = jnp.einsum("bhgtd,bhsd->bhgts", q, k, precision="highest") / np.sqrt(q.shape[-1])
        weight = jax.nn.softmax(jnp.where(seen[None, None, None], logits, -jnp.inf), axis=-1)
        return jnp.einsum("bhgts,bhsd->bhgtd", weight, v, precision="highest"), state

    config.apply(params, jnp.asarray(tokens)[None], attend, (None,) * config.num_layers)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("windows", [(None, None, None), (None, 8, None)])
def test_the_second_reading_is_a_pass_behind_the_prompt(windows):
    """A dense pass over the prompt and what is read behind it has the queries and keys of that reading."""
    config = ModelConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=3, num_q_heads=4, num_kv_heads=2, head_dim=8,
        max_position_embeddings=160, windows=windows,
    )  # fmt: skip
    object.__setattr__(config, "inv_freq", kvjax.rope.inverse_frequencies(8, config.rope_theta, None))
    params, prompt = vivid_params(config, 4), np.random.default_rng(5).integers(0, 60, 40).tolist()
    free = [layer for layer, window in enumerate(windows) if window is None]
    score = [[dict.fromkeys(range(2), np.inf) for _ in range(2)] for _ in free]
    names = ("num_sink", "chunk", "overlap", "ask", "ask_later", "answer")
    for part, overlap, first, last in oracle.readings(40, **{name: oracle.KNOBS[name] for name in names}):
        ids = [*first, *[prompt[i] for i in overlap], *last, *[prompt[i] for i in part]]
        layers = dense(params, config, prompt + ids)
        for at, layer in enumerate(free):
            q, k = layers[layer]
            for head in range(2):
                most = oracle.received(q[head, :, 40:], k[head, [0, 1, *part]], k[head, 40:], len(part))
                score[at][head] |= dict(zip(part, most, strict=True))
    want = oracle.keep(score, *(oracle.KNOBS[name] for name in ("budget", "head_factor", "layerwise")))
    cache = kvjax.prefill(params, [prompt], config=config, method=example("kvzip"), max_new_tokens=4, pad_multiple=1)
    for at, layer in enumerate(free):
        position = np.asarray(stored(cache.layers[layer]).position[0])
        assert [set(x[x >= 0].tolist()) for x in position] == want[at], f"layer {layer}"


def test_all_layers_are_whole_until_the_second_reading_ends():
    sizes = {"batch": 1, "prompt_slots": 1024, "max_new_tokens": 5}
    tiny = TinyModel(num_layers=8)
    layer = 1024 * tiny.num_kv_heads * (2 * tiny.head_dim * 4 + 4)
    assert kvjax.memory_needed(SnapKV(budget=40), tiny, **sizes).device < 3 * layer
    assert kvjax.memory_needed(KVzip(budget=40), tiny, **sizes).device > 8 * layer


# ---- what it takes ------------------------------------------------------------------------------------------------


class Words:
    """A tokenizer whose ids are the lengths of words."""

    def get_vocab(self):
        return {"a": 30}

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [len(word) for word in text.split(" ")]


def test_a_tokenizer_gives_what_asks_the_model():
    method = registry.make("kvzip", Words(), 31, ask_later=(1, 2))
    assert (method.ask, method.ask_later, method.answer) == ((8, 3, 8, 7, 8), (1, 2), (1,))
    assert registry.parse_knobs("kvzip", ["ask=5,9", "layerwise=true"]) == {"ask": (5, 9), "layerwise": True}
    assert KVzip().ask == ()


@pytree
class Across(Quest):
    """A method that would read a prompt again under a wrapper that does not."""

    spans_layers = True


def test_what_it_cannot_do_is_refused():
    tiny, stages = TinyModel(vocab_size=61, max_position_embeddings=160), Stages(evict=KVzip(), retrieve=Quest())
    for told, call in (
        ("PerLayer: KVzip", lambda: PerLayer(layers={}, default=KVzip())),
        ("PerLayer: Stages", lambda: PerLayer(layers={0: H2O()}, default=stages)),
        ("Periodic: KVzip", lambda: Periodic(evict=KVzip(), interval=8)),
        ("KVzip .* 'slots'", lambda: check_divisible(KVzip())),
        ("Stages: retrieve .*Across", lambda: Stages(evict=SnapKV(), retrieve=Across())),
        ("ask.*vocab_size=61", lambda: kvjax.decoding.checks.check_sizes(KVzip(ask=(5, 61)), tiny)),
        ("max_position_embeddings=160", lambda: check_fits(jnp.array([3, 100]), 20, tiny, KVzip(ask=(1,) * 11))),
    ):
        with pytest.raises(ValueError, match=told):
            call()
    check_fits(jnp.array([3, 100]), 20, tiny, KVzip(ask=(1,) * 11, chunk=40))
