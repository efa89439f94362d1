"""Kernels for TPUs compile for a v5e, which need not be here, and leave no copy of a cache in a decode step.

As test_methods.py. Heads are as in Llama-3.1-8B.
"""

from __future__ import annotations

import functools
import math
import re

import jax
import pytest

from pallas_kernels.attend.dense_decode import dense_decode
from pallas_kernels.attend.gather_attention import gather_attention
from pallas_kernels.score.page_score import page_score
from pallas_kernels.score.vector_score import vector_score
from tests.compile_only.test_methods import CONFIG, PROMPT, STORE, decode_step, needs

thorough = pytest.mark.thorough
STEPS = {  # the kernels of a decode step, one for each of two layers
    "full": ["dense_decode"],
    "quest": ["gather_attention", "page_score"],
    "chess": ["gather_attention"],
}


def kernels(compiled):
    """How often each kernel for TPUs is in a program."""
    names = re.findall(r'%(\w+?)(?:\.\d+)? = .* custom-call\(.*custom_call_target="tpu_custom_call"', compiled.as_text())
    return {name: names.count(name) for name in names}


def moved(compiled, elements):
    """Instructions that make an array of at least so many elements, other than writes in place."""
    in_place = {"parameter", "get-tuple-element", "tuple", "bitcast", "dynamic-update-slice", "conditional", "while"}
    found = []
    for line in compiled.as_text().splitlines():
        made = re.match(r"\s*(?:ROOT )?%\S+ = \(?\w+\[([\d,]+)\].*? ([a-z][a-z-]*)\(", line)
        if made and math.prod(map(int, made[1].split(","))) >= elements and made[2] not in in_place:
            found.append(line.strip()[:200])
    return found


@pytest.mark.xdist_group("compile_only")
@pytest.mark.parametrize("prompt", [4 * PROMPT + 64, *(pytest.param(x, marks=thorough) for x in (PROMPT, PROMPT + 64))])
@pytest.mark.parametrize("name", ["full", *(pytest.param(x, marks=thorough) for x in ("quest", "chess"))])
def test_a_decode_step_uses_kernels_and_copies_no_cache(name, prompt):
    compiled = decode_step(needs("tpu_v5e"), name, prompt)
    expected = dict.fromkeys(STEPS[name], CONFIG.num_layers)
    if prompt == PROMPT:  # the number of pages is not a multiple of 8
        expected.pop("page_score", None)
    assert kernels(compiled) == expected
    assert not moved(compiled, prompt * CONFIG.num_kv_heads * CONFIG.head_dim)
    assert compiled.memory_analysis().temp_size_in_bytes < STORE / 16


def arrays(dtype, *shapes):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def dense(group, dim, dtype, heads, slots):
    rows = arrays(dtype, (2, heads, group, dim), *[(2, heads, slots, dim)] * 2)
    return dense_decode, [*rows, *arrays("int32", (2, heads, slots), (2,))], ("position", "limit"), {"scale": 0.1}


def pages(group, dim, dtype, heads, slots, page_size=16):
    rows = arrays(dtype, (2, heads, group, dim), *[(2, heads, slots, dim)] * 2)
    lists = [*arrays("int32", (2, heads, 96)), *arrays(bool, (2, heads, 96)), *arrays("int32", (2, heads, slots))]
    return gather_attention, [*rows, *lists], ("position",), {"scale": 0.1, "page_size": page_size}


def score(group, dim, dtype, heads, slots):
    rows = arrays(dtype, (2, heads, group, dim), *[(2, heads, slots, dim)] * 2)
    return page_score, [*rows, *arrays("int32", (2,))], (), {"page_size": 16, "newest": True}


def summed(group, dim, dtype, heads, slots):
    rows = arrays(dtype, (2, heads, group, dim), (2, heads, slots, dim))
    return vector_score, [*rows, *arrays("int32", (2,))], (), {}


KERNELS = {
    "dense_decode": dense,
    "pages of 16": pages,
    "pages of 32": functools.partial(pages, page_size=32),
    "pages of 128": functools.partial(pages, page_size=128),
    "bounds": score,
    "sums over the group": summed,
}
SHAPES = [  # group, head_dim, dtype, KV heads, slots or pages
    (4, 128, "bfloat16", 8, 4096),
    (1, 128, "bfloat16", 1, 4104),
    (8, 128, "float32", 2, 4160),
    (8, 256, "bfloat16", 4, 1000),
    (1, 128, "float32", 32, 520),
    (7, 128, "bfloat16", 3, 2048),
    (1, 128, "bfloat16", 64, 1024),
]


@pytest.mark.xdist_group("compile_only")
@thorough
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_a_check_takes_compiles_and_is_read_where_it_is(kernel, shape):
    run, args, names, static = KERNELS[kernel](*shape)
    plain = len(args) - len(names)

    def call(*given):
        return run(*given[:plain], **dict(zip(names, given[plain:], strict=True)), **static, implementation="pallas_tpu")

    compiled = needs("tpu_v5e").compile(call, *args)
    assert sum(kernels(compiled).values()) == 1
    group, dim, _, heads, slots = shape
    assert not moved(compiled, heads * slots * dim)
