"""Hooks of several layers in one program: each is traced once for alike layers, and every layer gets what is its own."""

import dataclasses
import functools
import pydoc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.decoding.decode import run_step
from kvjax.decoding.prefill import run_prefill
from kvjax.decoding.settle import settle_due
from kvjax.methods import InfLLM, SnapKV
from kvjax.protocol.families import Eviction
from kvjax.protocol.method import LayerSpec, Step
from kvjax.protocol.typing import pytree
from kvjax.testing.model import TinyModel
from tests.harness import small

pytestmark = pytest.mark.usefixtures("quick_compile")

METHOD = small(InfLLM, budget=8, num_sink=2, num_local=6, block_size=4, num_repr=2, chunk=6)


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
    assert calls == ["finish", "attend", "finish"]  # first for the order of reading, which needs the size of what is kept
    calls.clear()
    jax.eval_shape(run_step, params, cache, shape((1, 1), jnp.int32), shape((1, 1), bool))
    counts = {name: calls.count(name) for name in hooks}
    assert counts["attend"] == counts["rework"] == counts["settle"] == 1 and counts["excerpt"] < 8, counts


def test_every_layer_is_settled_as_alone():
    """Layers of two kinds in turn, and one layer of which no row is due."""
    other = dataclasses.replace(METHOD, block_size=6)
    methods = METHOD, other, METHOD, other, METHOD
    spec = LayerSpec(batch=2, num_kv_heads=2, head_dim=8, dtype=jnp.float32, group_size=2, prompt_slots=40, max_new_tokens=8)

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


def test_a_wrong_score_and_a_forgotten_decorator_are_named():
    """`score` returns one number too many, or whole numbers, or nothing; a class is not decorated with `pytree`."""
    tiny = TinyModel(num_layers=1)
    params = jax.eval_shape(tiny.random_params)

    def run(returned):
        @pytree
        class Odd(Eviction):
            def score(self, cache, prompt):
                assert prompt.length.shape == (2,) and prompt.length.dtype == jnp.int32
                return returned(cache)

        where = {"config": tiny, "method": Odd(budget=4), "max_new_tokens": 4, "pad_multiple": 1}
        return jax.eval_shape(lambda params: kvjax.prefill(params, [[1] * 9, [2] * 7], **where), params)

    assert run(lambda cache: cache.key[..., 0]).length.shape == (2,)
    for returned, got in (
        (lambda cache: cache.key[..., :1], r"float32 \[2, 2, 9, 1\]"),
        (lambda cache: cache.position, r"int32 \[2, 2, 9\]"),
        (lambda cache: None, "NoneType"),
    ):
        with pytest.raises(ValueError, match=rf"Odd.score must return float32 \[B, H, S\], here \[2, 2, 9\], got {got}"):
            run(returned)

    class Bare(SnapKV):
        pass

    with pytest.raises(TypeError, match="Bare must be decorated with kvjax.protocol.typing.pytree"):
        Bare(budget=64)


@pytest.mark.parametrize(
    "cls, told",
    [
        (SnapKV, "``obs_window`` (static, default 32): last prompt tokens, which vote and are always kept"),
        (Step, "``position`` (traced): int32 [B, T], EMPTY for padding"),
        (kvjax.Stats, "``host_bytes`` (static, default 0): the part of"),
    ],
)
def test_help_lists_the_fields(cls, told):
    assert told in pydoc.plain(pydoc.render_doc(cls))
