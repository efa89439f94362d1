"""A step on a CPU holds little beside the cache: it copies no array of it, and its temporaries hardly grow with it.

The programs are compiled for shapes alone. Models differ in their number of layers, and a step's temporaries are those of one
layer at a time, so a bar for the built-in model's 8 layers is larger for the 2 layers compiled here.
"""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.api import programs
from kvjax.testing.model import TinyModel
from tests.harness import NAMES, example

MODEL = TinyModel(num_layers=2, head_dim=64, max_position_embeddings=1 << 17)
SIZES = 1024, 8192  # slots
LAYERS, SHARE = 8, 0.1  # at most this share of what the cache of a model of so many layers grows
BOUNDED = ("h2o", "keydiff", "rkv", "streamingllm", "tova", "triattention")  # storage grows with the budget alone
# RKV's eviction, once in an interval, multiplies with a copy of one layer's keys that has another order.
QUICK = {("full", 1), ("rkv", 1), ("selfextend", 1), ("streamingllm", 1), ("snapkv", 4)}  # by tokens


def compiled(name, slots, rows, tokens):
    """A step or an `extend` by ``tokens``: its program, the bytes of the cache, and the sizes of its arrays."""
    knobs = {"budget": slots} if name in BOUNDED else {"segment": 65536} if name == "mosaickv" else {}  # as published
    method = example(name, **knobs)
    length, room = (2 * slots, 64) if name in BOUNDED else (64, slots)

    def start(params, prompt, lengths):
        return kvjax.prefill(params, prompt, config=MODEL, method=method, lengths=lengths, max_new_tokens=room)

    params = jax.eval_shape(lambda: MODEL.random_params())
    cache = jax.eval_shape(start, params, jnp.ones((rows, length), jnp.int32), jnp.full((rows,), length))
    program = programs.step_program if tokens == 1 else programs.extend_program
    count = jax.ShapeDtypeStruct((rows, 1), bool) if tokens == 1 else jax.ShapeDtypeStruct((rows,), jnp.int32)
    inputs = jax.ShapeDtypeStruct((rows, tokens), jnp.int32), count
    leaves = jax.tree.leaves(cache)
    return (
        program.lower(params, cache, *inputs).compile(),
        sum(x.size * x.dtype.itemsize for x in leaves),
        {x.size for x in leaves},
    )


def copied(text):
    """The sizes of the arrays that a program copies."""
    return [math.prod(map(int, found.split(","))) for found in re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", text)]


def cases():
    for name, rows, tokens in itertools.product(NAMES, (1, 2), (1, 4)):
        quick = rows == 1 and (name, tokens) in QUICK
        yield pytest.param(name, rows, tokens, marks=() if quick else pytest.mark.thorough)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices have kernels, and other compilers")
@pytest.mark.parametrize(("name", "rows", "tokens"), list(cases()))
def test_temporaries_hardly_grow_with_the_cache(name, rows, tokens):
    (few, held_few, _), (many, held, sizes) = (compiled(name, slots, rows, tokens) for slots in SIZES)
    grown = many.memory_analysis().temp_size_in_bytes - few.memory_analysis().temp_size_in_bytes
    share = grown / (held - held_few)
    assert share <= SHARE * LAYERS / MODEL.num_layers, f"{share:.3f}"
    assert name == "rkv" or not [size for size in copied(many.as_text()) if size in sizes and size >= max(sizes) // 2]
