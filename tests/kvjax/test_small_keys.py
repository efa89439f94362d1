"""Keys of fewer numbers, `tests.harness.SMALL`: by default they meet their oracles here, both in one program."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache import LayerCache
from kvjax.method import Inputs, LayerSpec, Prompt
from kvjax.methods import Quest, ShadowKV, SnapKV, ThinK
from kvjax.methods.shadowkv.method import ShadowState
from kvjax.slots import SlotState
from kvjax.testing.layer import drive
from models import ModelConfig
from tests.harness import SMALL, example, frequencies, oracle, random_tokens
from tests.oracles.plain import rotate_all

pytestmark = pytest.mark.usefixtures("quick_compile")
LLAMA = dataclasses.replace(ModelConfig.llama31_8b(), dtype="bfloat16")
SPEC = LayerSpec(
    layer=0, batch=1, num_kv_heads=8, group_size=4, head_dim=128, dtype="bfloat16", prompt_slots=4096, max_new_tokens=64
)  # fmt: skip


PROMPT, STEPS, DIM = 30, 3, 8
LENGTHS = np.array([1, 7, 18, PROMPT], np.int32)
INV_FREQ = frequencies(DIM)


@jax.jit
def decode(states, q, k, v):
    """Steps after the prompts of ``states``: by the method's name, outputs, positions attended to, and the last state."""
    spec = LayerSpec(
        layer=0, batch=len(LENGTHS), num_kv_heads=2, group_size=2, head_dim=DIM, dtype="float32", prompt_slots=PROMPT,
        max_new_tokens=STEPS,
    )  # fmt: skip

    def run(name, state):
        method = example(name)

        def step(state, number):
            at = (LENGTHS + number)[:, None]
            query, key, value = (
                jnp.take_along_axis(x, at.reshape(-1, *(1,) * (x.ndim - 1)), axis=-2) for x in (q, k, v)
            )
            given = Inputs(query=query, key=key, value=value, position=at, tokens=at, inv_freq=INV_FREQ, shared=None)
            attended = method.chosen(state, given)
            out, state = method.attend(state, given)
            return state, (out[..., 0, :], attended)

        state = method.finish(state, spec)
        state, found = jax.lax.scan(step, state, jnp.arange(STEPS, dtype=jnp.int32))
        return *found, state

    return {name: run(name, state) for name, state in states.items()}


def test_steps_are_those_of_the_oracles():
    """NaN in empty slots; rows shorter than everything that stays whole; test_oracles.py also reads prompts."""
    q, k, v = random_tokens(3, len(LENGTHS), 2, 2, PROMPT + STEPS, DIM)
    at = np.arange(PROMPT + STEPS)
    held = np.broadcast_to(at < LENGTHS[:, None, None], k.shape[:3])

    def stored(key):
        key, value = (np.where(held[..., None], x, np.nan) for x in (key, v))
        return LayerCache(key=key, value=value, position=np.where(held, at, -1).astype(np.int32), cursor=LENGTHS)

    window = LENGTHS[:, None] - oracle("think").KNOBS["obs_window"] + np.arange(oracle("think").KNOBS["obs_window"])
    turned = rotate_all(q, INV_FREQ).astype(np.float32)
    last = np.take_along_axis(turned, np.maximum(window, 0)[:, None, None, :, None], axis=3)
    none = np.zeros((len(k), 0), np.int32)
    prompt = Prompt(
        query=last, query_position=np.maximum(window, -1).astype(np.int32), mass=np.zeros((*k.shape[:2], 0), np.float32),
        tokens=none,
    )  # fmt: skip
    states = {
        "shadowkv": ShadowState(cache=stored(k), inv_freq=np.tile(INV_FREQ, (len(k), 1))),
        "think": SlotState(cache=stored(rotate_all(k, INV_FREQ).astype(np.float32)), prompt=prompt),
    }
    assert tuple(states) == SMALL
    for name, (outs, positions, state) in decode(states, q, k, v).items():
        module = oracle(name)
        for row, length in enumerate(LENGTHS.tolist()):
            parts = (x[row, ..., : length + STEPS, :] for x in (q, k, v))
            given = {field: np.asarray(getattr(state, field)[row]) for field in vars(module).get("STATE", ())}
            want = module.run(*parts, length, INV_FREQ, **module.KNOBS, **given)
            for step in range(STEPS):
                got = [x[x >= 0].tolist() for x in np.asarray(positions[step, row])]
                assert [sorted(x) for x in got] == [sorted(x) for x in want.attended[step]], f"{name}, row {row}, step {step}"
                np.testing.assert_allclose(outs[step, row], want.outputs[step], atol=1e-4, rtol=0, err_msg=name)


@pytest.mark.thorough
def test_the_released_code_of_shadowkv_attends_alike():
    golden = json.loads((pathlib.Path(__file__).parent / "goldens" / "shadowkv.json").read_text())
    heads, group, total, dim = golden["sizes"]
    rng, prompt = np.random.default_rng(golden["seed"]), golden["prompt"]
    q, k, v = (rng.normal(size=(1, n, total, dim)).astype(np.float32) for n in (heads * group, heads, heads))
    inv_freq = (golden["base"] ** (-np.arange(0, dim, 2) / dim)).astype(np.float32)
    method = ShadowKV(**golden["knobs"])
    got = drive(method, q.reshape(1, heads, group, total, dim), k, v, [prompt], prompt=prompt, inv_freq=inv_freq)
    for step, (chosen, out) in enumerate(zip(golden["chosen"], golden["outputs"], strict=True)):
        np.testing.assert_array_equal(got.chosen[step, 0, :, -len(chosen[0]) :], chosen)
        np.testing.assert_allclose(got.outputs[step, 0], out, atol=1e-4, rtol=0)


def state_of(method, spec=SPEC):
    return jax.eval_shape(lambda: method.finish(method.init(spec), spec))


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_bytes_of_shadowkv():
    """Of a layer of Llama-3.1-8B: 40 + 32 bytes a token and KV head for keys and landmarks; values on the host."""
    shadow, tokens = state_of(ShadowKV()).shadow, 4096
    assert size(shadow.left) == tokens * 160 * 2 == tokens * 8 * 40
    assert size((shadow.landmark, shadow.right)) == 8 * (tokens * 32 + 160 * 128 * 2)
    unchanged = state_of(ShadowKV()).cache
    assert unchanged.num_slots == 48 * 8 + 5 * 8 - 1 + 64
    sizes = {"batch": 1, "prompt_slots": 131072, "max_new_tokens": 64}
    full, here, away = (
        kvjax.memory_needed(method, LLAMA, **sizes) for method in (kvjax.methods.Full(), ShadowKV(), ShadowKV(offload=True))
    )
    values = 32 * 8 * 131072 * 256
    assert away.host == 2 * values  # as long as the prompt is read, keys too
    assert here.device < full.device and away.device < full.device / 5


def test_bytes_of_think():
    """160 + 256 bytes a token and KV head, and its position; alone, and after an eviction."""
    whole = 32 + 64
    state = state_of(ThinK()).cache
    assert size(state.older) == 8 * (4096 * (160 + 256 + 4) + 77 * 4) + 4
    assert size((state.key, state.value)) == 8 * whole * 512
    stages = kvjax.Stages(evict=SnapKV(budget=1024), retrieve=ThinK())
    thinner = state_of(stages).cache
    assert size(thinner.older) == 8 * (1024 * (160 + 256 + 4) + 77 * 4) + 4
    sizes = {"batch": 1, "prompt_slots": 8192, "max_new_tokens": 64}
    full, thin = (kvjax.memory_needed(method, LLAMA, **sizes).device for method in (kvjax.methods.Full(), ThinK()))
    assert 0.8 * full < thin < 0.83 * full


def test_what_shadowkv_costs():
    """Unchanged tokens, the chosen tokens' values and rows of A, all of B. Landmarks and flags of chunks are metadata."""
    method = ShadowKV(budget=32, rank=12)
    spec = dataclasses.replace(SPEC, prompt_slots=1024)
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state_of(method, spec))
    unchanged = np.where(np.arange(state.cache.num_slots) < 100, 0, -1).astype(np.int32)
    cache = dataclasses.replace(state.cache, position=np.broadcast_to(unchanged, state.cache.position.shape))
    cost = jax.jit(method.cost, static_argnums=1)
    for free, found in ((70, 32), (3, 24)):
        can_be = np.broadcast_to(np.arange(128) < free, state.shadow.open.shape)
        shadow = dataclasses.replace(state.shadow, open=can_be, chunks=np.array([118], np.int32))
        got = cost(dataclasses.replace(state, cache=cache, shadow=shadow), None)
        np.testing.assert_array_equal(got.attended, [100 + found])
        np.testing.assert_array_equal(got.kv_bytes, [8 * (100 * 512 + found * (256 + 24) + 12 * 256)])
        np.testing.assert_array_equal(got.metadata_bytes, [8 * 118 * 257])
        np.testing.assert_array_equal(got.bus_bytes, [0])


def test_what_think_costs():
    """A token of the prompt counts with what is stored of its key, and a step reads the numbers of the channels."""
    method, rows = example("think"), 2

    spec = LayerSpec(
        layer=0, batch=rows, num_kv_heads=2, group_size=2, head_dim=64, dtype="float32", prompt_slots=20, max_new_tokens=4
    )
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state_of(method, spec))
    cache = state.cache

    def holding(part, count):
        at = np.arange(part.position.shape[2])
        position = np.broadcast_to(np.where(at < count, at, -1).astype(np.int32), part.position.shape)
        return dataclasses.replace(part, position=position)

    cache = dataclasses.replace(cache, older=holding(cache.older, 14), newer=holding(cache.newer, 6))
    found = jax.jit(method.cost)(dataclasses.replace(state, cache=cache), None)
    np.testing.assert_array_equal(found.attended, [20] * rows)
    np.testing.assert_array_equal(found.kv_bytes, [2 * 4 * (14 * (48 + 64) + 6 * 128)] * rows)
    np.testing.assert_array_equal(found.metadata_bytes, [2 * 39 * 4] * rows)


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: kvjax.Stages(evict=ThinK(), retrieve=Quest()), "some channels .* from which Quest cannot choose"),
        (lambda: kvjax.DenseBelow(length=9, method=ThinK()), "ThinK drops channels .*, which cannot be undone"),
        (lambda: kvjax.Twilight(method=ThinK()), "ThinK attends to all that it keeps"),
        (lambda: kvjax.Periodic(evict=ThinK()), "evict must discard tokens, but ThinK keeps every token"),
        (lambda: kvjax.Stages(evict=SnapKV(), retrieve=ShadowKV()), "must be a method that chooses cache slots"),
        (lambda: ShadowKV(budget=7), r"budget must be .* at least 8 tokens \(one chunk of chunk_size=8\), got 7"),
        (lambda: ThinK(channels=0.0), "channels must be .* above 0"),
    ],
)
def test_what_does_not_fit_is_refused(make, told):
    with pytest.raises(ValueError, match=told):
        make()
