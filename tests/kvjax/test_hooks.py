"""Hooks of several layers in one program: each is traced once for alike layers, and every layer gets what is its own."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.decoding.decode import run_step
from kvjax.decoding.prefill import run_prefill
from kvjax.method import LayerSpec, settle_due
from kvjax.methods import InfLLM
from kvjax.testing.model import TinyModel

pytestmark = pytest.mark.usefixtures("quick_compile")

METHOD = InfLLM(budget=8, num_sink=2, num_local=6, block_size=4, num_repr=2, chunk=6)


def test_alike_layers_are_traced_once(monkeypatch):
    """The programs of a prompt and of a step have four layers. No other test has this room for tokens."""
    model = TinyModel(num_layers=4)
    params = jax.eval_shape(lambda: model.random_params(0))
    shape = jax.ShapeDtypeStruct
    prompt = shape((1, 64), jnp.int32), shape((1,), jnp.int32)
    read = functools.partial(run_prefill, method=METHOD, model=model, max_new_tokens=29, chunk_size=64)
    cache = jax.eval_shape(read, params, *prompt)
    calls = []

    def counted(name):
        hook = getattr(InfLLM, name)

        def run(*args):
            calls.append(name)
            return hook(*args)

        return run

    hooks = "attend", "finish", "excerpt", "rework", "settle"
    for name in hooks:
        monkeypatch.setattr(InfLLM, name, counted(name))
    jax.eval_shape(functools.partial(read, max_new_tokens=31), params, *prompt)
    assert calls == ["attend", "finish"]
    calls.clear()
    jax.eval_shape(run_step, params, cache, shape((1, 1), jnp.int32), shape((1, 1), bool))
    counts = {name: calls.count(name) for name in hooks}
    assert counts["attend"] == counts["rework"] == counts["settle"] == 1 and counts["excerpt"] < 8, counts


def test_every_layer_is_settled_as_alone():
    """Layers of two kinds in turn, and one layer of which no row is due."""
    other = dataclasses.replace(METHOD, block_size=6)
    methods = METHOD, other, METHOD, other, METHOD
    spec = LayerSpec(
        batch=2, num_kv_heads=2, head_dim=8, dtype=jnp.float32, group_size=2, prompt_slots=40, max_new_tokens=8
    )

    def state(method, seed, due):
        empty, keys = method.init(spec), jax.random.split(jax.random.key(seed), 3)
        key, representative, received = (
            jax.random.normal(k, x.shape, x.dtype)
            for k, x in zip(keys, (empty.cache.key, empty.representative, empty.received_ring), strict=True)
        )
        cursor = jnp.asarray([2 + 6 + 12, 2 + 6 + 24], jnp.int32)  # whole blocks of 4 tokens, and of 6
        cache = dataclasses.replace(empty.cache, key=key, cursor=cursor)
        return dataclasses.replace(
            empty, cache=cache, representative=representative, received_ring=received, due=jnp.asarray(due)
        )

    due = [True, False], [True, True], [False, False], [False, True], [True, True]
    before = tuple(state(method, seed, rows) for seed, (method, rows) in enumerate(zip(methods, due, strict=True)))
    settle = jax.jit(settle_due)
    after = settle(methods, before)
    for method, old, new, rows in zip(methods, before, after, due, strict=True):
        (alone,) = settle((method,), (old,))
        jax.tree.map(np.testing.assert_array_equal, new, alone)
        changed = (np.asarray(new.representative) != np.asarray(old.representative)).any(axis=(1, 2, 3, 4))
        assert changed.tolist() == rows and not new.due.any()
