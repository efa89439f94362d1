"""Keys of fewer numbers, `tests.harness.SMALL`: by default each meets its oracle here, in a small program."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.method import LayerSpec
from kvjax.methods import Quest, ShadowKV, SnapKV, ThinK
from kvjax.testing.layer import drive
from models import ModelConfig
from tests.harness import SMALL, example, frequencies, oracle, random_tokens
from tests.kvjax.cases import compare

pytestmark = pytest.mark.usefixtures("quick_compile")
LLAMA = dataclasses.replace(ModelConfig.llama31_8b(), dtype="bfloat16")
SPEC = LayerSpec(
    layer=0, batch=1, num_kv_heads=8, group_size=4, head_dim=128, dtype="bfloat16", prompt_slots=4096, max_new_tokens=64
)  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_steps_are_those_of_the_oracle(name):
    """NaN in empty slots; rows shorter than everything that stays whole."""
    lengths, steps, dim = np.array([1, 7, 18, 30]), 3, 8
    q, k, v = random_tokens(3, len(lengths), 2, 2, int(lengths.max()) + steps, dim)
    got = drive(example(name), q, k, v, lengths, prompt=int(lengths.max()), inv_freq=frequencies(dim), poison=True)
    assert compare(name, oracle(name).KNOBS, q, k, v, lengths, frequencies(dim), got) == len(lengths) * steps


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
    """154 + 256 bytes a token and KV head; alone, and after an eviction."""
    whole = 32 + 64
    state = state_of(ThinK()).cache
    assert size(state.older) == 8 * (4096 * (154 + 256) + 77 * 4)
    assert size((state.key, state.value)) == 8 * whole * 512
    stages = kvjax.Stages(evict=SnapKV(budget=1024), retrieve=ThinK())
    thinner = state_of(stages).cache
    assert size(thinner.older) == 8 * (1024 * (154 + 256) + 77 * 4)
    sizes = {"batch": 1, "prompt_slots": 8192, "max_new_tokens": 64}
    full, thin = (kvjax.memory_needed(method, LLAMA, **sizes).device for method in (kvjax.methods.Full(), ThinK()))
    assert 0.8 * full < thin < 0.83 * full


def test_what_think_costs():
    """A token of the prompt counts with the channels that are left of its key, and a step reads their numbers."""
    method, rows = example("think"), 2

    spec = LayerSpec(
        layer=0, batch=rows, num_kv_heads=2, group_size=2, head_dim=8, dtype="float32", prompt_slots=20, max_new_tokens=4
    )
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state_of(method, spec))
    at = np.arange(state.cache.num_slots)
    position = np.where((at < 14) | ((at >= 20) & (at < 26)), at, -1).astype(np.int32)
    position = np.broadcast_to(position, state.cache.position.shape)
    found = jax.jit(method.cost)(dataclasses.replace(state, cache=dataclasses.replace(state.cache, position=position)), None)
    np.testing.assert_array_equal(found.attended, [20] * rows)
    np.testing.assert_array_equal(found.kv_bytes, [2 * 4 * (14 * (5 + 8) + 6 * 16)] * rows)
    np.testing.assert_array_equal(found.metadata_bytes, [2 * 5 * 4] * rows)


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
