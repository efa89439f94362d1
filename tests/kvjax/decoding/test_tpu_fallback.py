"""Decode steps on a TPU, traced without one: kernels where they can take the cache, plain JAX everywhere else."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.decoding.decode import run_step
from kvjax.decoding.prefill import run_prefill
from kvjax.methods import Chess, FreeKV, Full, Quest
from kvjax.wrappers import Stages
from models import ModelConfig, param_shapes
from pallas_kernels.attend.gather_attention import gather_attention
from pallas_kernels.machine import assume_machine

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=64, intermediate_size=48, num_layers=3, num_q_heads=4, num_kv_heads=2, head_dim=128,
    max_position_embeddings=4096,
)  # fmt: skip
METHODS = {
    "full": Full(),
    "quest": Quest(budget=64),
    "chess": Chess(trigger="fixed"),
    "freekv": FreeKV(budget=64),
    # 428 slots are kept, which no kernel takes.
    "stages": Stages(evict=kvjax.methods.SnapKV(budget=300, capacity=300), retrieve=Quest(budget=64)),
}


def kernels(method, dim, room):
    """The number of kernels for TPUs in a step behind 512 tokens of a prompt, in a cache of 512 + ``room`` slots."""
    model = dataclasses.replace(CONFIG, head_dim=dim)
    sizes = {"model": model, "max_new_tokens": room, "chunk_size": 512}
    rows = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 512), (1,), (1, 1))]
    with assume_machine("tpu"):
        cache = jax.eval_shape(lambda *given: run_prefill(*given, method, **sizes), param_shapes(model), *rows[:2])
        step = jax.make_jaxpr(lambda *given: run_step(*given, jnp.ones((1, 1), bool)))
        return str(step(param_shapes(model), cache, rows[2])).count("pallas_call[")


@pytest.mark.parametrize(
    ("name", "dim", "room", "some"),
    [
        ("quest", 128, 128, True),
        ("quest", 64, 128, False),  # narrow heads
        ("full", 128, 125, False),  # 637 slots
        *(
            pytest.param(name, *rest, marks=pytest.mark.thorough)
            for name in METHODS
            for rest in ((128, 128, name != "stages"), (64, 128, False), (80, 7, False))
            if name != "quest" or rest[0] == 80
        ),
        *(pytest.param(name, 128, 125, False, marks=pytest.mark.thorough) for name in ("chess", "freekv")),
        pytest.param("quest", 128, 125, True, marks=pytest.mark.thorough),  # its 40 pages still have bounds in whole tiles
    ],
)
def test_a_step_falls_back_by_itself(name, dim, room, some):
    assert bool(kernels(METHODS[name], dim, room)) == some


@pytest.mark.parametrize(
    ("dim", "room", "said"),
    [
        (64, 128, "got head_dim 64, expected a multiple of 128, the length of a tile's rows"),
        pytest.param(128, 125, "got 637 slots, expected a multiple of 8, the rows of a tile", marks=pytest.mark.thorough),
    ],
)
def test_a_kernel_that_is_asked_for_says_what_it_cannot_take(dim, room, said):
    """And nothing else runs in its place."""
    row = jax.ShapeDtypeStruct((1, 2, 512 + room, dim), jnp.float32)
    query, page = jax.ShapeDtypeStruct((1, 2, 2, dim), jnp.float32), jnp.zeros((1, 2, 8), jnp.int32)
    where = {"page_size": 16, "position": jnp.zeros(row.shape[:3], jnp.int32), "implementation": "pallas_tpu", "scale": 1.0}
    with (
        assume_machine("tpu"),
        pytest.raises(NotImplementedError, match=f"gather_attention: 'pallas_tpu' cannot run: {said}"),
    ):
        jax.eval_shape(lambda q, k: gather_attention(q, k, k, page, page >= 0, **where), query, row)
