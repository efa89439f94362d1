"""Keys of fewer numbers, `tests.harness.SMALL`: the released code, bytes, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import kvjax
from kvjax.methods import ShadowKV, SnapKV, ThinK
from kvjax.protocol.method import LayerSpec
from kvjax.testing.layer import drive
from kvjax.wrappers import Stages
from models import shapes
from tests import goldens
from tests.harness import example

pytestmark = pytest.mark.usefixtures("quick_compile")
LLAMA = dataclasses.replace(shapes.llama31_8b(), dtype="bfloat16")
SPEC = LayerSpec(
    batch=1, num_kv_heads=8, group_size=4, head_dim=128, dtype="bfloat16", prompt_slots=4096, max_new_tokens=64
)  # fmt: skip


@pytest.mark.thorough
def test_the_released_code_of_shadowkv_attends_alike():
    golden = json.loads((goldens.FOLDER / "kvjax" / "shadowkv.json").read_text())
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


def holding(part, count):
    """The storage with its first slots in use."""
    at = np.arange(part.position.shape[2])
    position = np.broadcast_to(np.where(at < count, at, -1).astype(np.int32), part.position.shape)
    return dataclasses.replace(part, position=position)


def test_shadowkv_takes_72_bytes_per_token_and_kv_head():
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
    values, hidden = 32 * 8 * 131072 * 256, 131072 * LLAMA.hidden_size * 2
    waiting, rest = divmod(away.host - values - hidden, away.after // 32)  # layers' other arrays, until all are read
    assert 0 < waiting < 32 and rest == 0
    by_chunks = kvjax.memory_needed(ShadowKV(offload=True), LLAMA, **sizes, order="chunks")
    assert by_chunks.host == 2 * values  # as long as the prompt is read, keys too
    assert here.device < full.device and away.device < full.device / 5


def test_think_takes_420_bytes_per_token_and_kv_head():
    """160 + 256 bytes a token and KV head, and its position; alone, and after an eviction."""
    whole = 32 + 64
    state = state_of(ThinK()).cache
    assert size(state.older) == 8 * (4096 * (160 + 256 + 4) + 77 * 4) + 4
    assert size((state.key, state.value)) == 8 * whole * 512
    stages = Stages(evict=SnapKV(budget=1024), retrieve=ThinK())
    thinner = state_of(stages).cache
    assert size(thinner.older) == 8 * (1024 * (160 + 256 + 4) + 77 * 4) + 4
    sizes = {"batch": 1, "prompt_slots": 8192, "max_new_tokens": 64}
    full, thin = (kvjax.memory_needed(method, LLAMA, **sizes).after for method in (kvjax.methods.Full(), ThinK()))
    assert 0.8 * full < thin < 0.83 * full


def test_shadowkv_counts_tokens_values_and_factors():
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


def test_think_counts_the_channels_that_a_step_reads():
    """A token of the prompt counts with what is stored of its key, and a step reads the numbers of the channels."""
    method, rows = example("think"), 2

    spec = LayerSpec(
        batch=rows, num_kv_heads=2, group_size=2, head_dim=64, dtype="float32", prompt_slots=20, max_new_tokens=4
    )
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state_of(method, spec))
    cache = state.cache

    cache = dataclasses.replace(cache, older=holding(cache.older, 14), newer=holding(cache.newer, 6))
    found = jax.jit(method.cost)(dataclasses.replace(state, cache=cache), None)
    np.testing.assert_array_equal(found.attended, [20] * rows)
    np.testing.assert_array_equal(found.kv_bytes, [2 * 4 * (14 * (48 + 64) + 6 * 128)] * rows)
    np.testing.assert_array_equal(found.metadata_bytes, [2 * 39 * 4] * rows)
