"""`kvjax.memory_needed` beside the compiled prefill: results and temporaries, within a tenth, for every method.

The shape is one in which the cache is most of it: long prompts, large heads and small chunks.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import kvjax
from experiments.speed import uneven_scores
from kvjax.accounting.temporaries import most_bytes
from kvjax.api import programs
from kvjax.registry import without_text
from kvjax.testing.model import TinyModel
from models.shapes import llama31_8b
from pallas_kernels.machine import assume_machine
from tests.harness import NAMES

MODEL = TinyModel(num_layers=8, head_dim=128, hidden_size=64, max_position_embeddings=1 << 20)
TOKENS, CHUNK, ROOM = 1 << 17, 512, 64
KNOBS = {
    "chess": {"trigger": "fixed"},
    "duoattention": {"scores": uneven_scores(MODEL)},
    "headkv": {"scores": uneven_scores(MODEL)},
    "keydiff": {"budget": TOKENS // 2},
    "streamingllm": {"budget": TOKENS // 2},
}
QUICK = {("full", 2, None), ("snapkv", 1, None)}


def compiled(method, rows, order, kv_dtype, tokens, params):
    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    static = {"model": MODEL, "max_new_tokens": ROOM, "chunk_size": CHUNK, "plan": None, "kv_dtype": kv_dtype}
    lowered = programs.prefill_program.lower(params, ints(rows, tokens), ints(rows), (method,), order=order, **static)
    memory = lowered.compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def cases():
    every = [(name, 1, None) for name in NAMES]
    every += [(name, rows, None) for name in ("full", "quest", "snapkv", "keydiff", "mosaickv") for rows in (2, 3)]
    every += [(name, 1, "chunks") for name in ("snapkv", "mosaickv", "think")] + [("full", 1, "layers")]
    for case in every:
        yield pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices have kernels, and other compilers")
@pytest.mark.parametrize(("name", "rows", "order"), list(cases()))
def test_what_is_needed_is_what_the_program_takes(name, rows, order, kv_dtype=None):
    method = without_text(kvjax.make(name, **KNOBS.get(name, {})), MODEL.vocab_size)
    params = jax.eval_shape(MODEL.random_params)
    sizes = {"batch": rows, "prompt_slots": TOKENS, "max_new_tokens": ROOM, "chunk_size": CHUNK, "kv_dtype": kv_dtype}
    needed = kvjax.memory_needed(method, MODEL, **sizes, params=params, order=order)
    took = compiled(method, rows, order, kv_dtype, TOKENS, params)
    assert abs(needed.peak / took - 1) <= 0.1, f"{needed.peak / took:.3f} of {took}: {needed}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kv_dtype"), [("full", "int8"), ("snapkv", "int8")])
def test_codes_are_counted(name, kv_dtype):
    test_what_is_needed_is_what_the_program_takes(name, 1, None, kv_dtype)


@pytest.mark.slow
def test_an_offloaded_prompt_needs_little_more_than_decoding():
    """512K of an 8B under ParisKV; what the program takes, compiled for an H100: docs/notebook/prompts.md."""
    config, method = dataclasses.replace(llama31_8b(), max_position_embeddings=1 << 20), kvjax.make("pariskv", offload=True)
    needed = kvjax.memory_needed(method, config, batch=1, prompt_slots=1 << 19, max_new_tokens=ROOM)
    assert needed.after <= needed.peak <= 1.05 * needed.after


def test_axes_of_one_row_are_moved_without_a_copy_on_a_gpu():
    keys = jax.ShapeDtypeStruct((1, 4, 1024, 128), jnp.float32)

    def run(keys):
        return jax.lax.map(lambda key: key @ key[0].T, keys.swapaxes(0, 1)[:, 0])

    copied = most_bytes(run, keys)
    with assume_machine("gpu", (9, 0)):
        assert most_bytes(lambda keys: run(keys), keys) == copied - 4 * keys.size
