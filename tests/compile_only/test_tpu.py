"""Kernels for TPUs compile for a v5e, which need not be here, and leave no copy of a cache in a decode step.

As test_methods.py. Heads are as in Llama-3.1-8B.
"""

import math
import re

import pytest

from pallas_kernels.formats.shapes import full
from tests.compile_only.test_methods import CONFIG, PROMPT, STORE, decode_step, needs
from tests.pallas_kernels.operations import arguments, public, sized

pytestmark = pytest.mark.xdist_group("compile_only")  # one worker has the compilers and their memory

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


LISTED = {"K": 96, "slots": full("B F K", 0)}  # maybe more pages than a row has: nothing is drawn
KERNELS = {  # an operation, what differs from its declared shapes, and the axis of slots or pages
    "dense_decode": ("dense_decode", {}, "S"),
    "pages of 16": ("gather_attention", LISTED | {"P": 16}, "S"),
    "pages of 32": ("gather_attention", LISTED | {"P": 32}, "S"),
    "pages of 128": ("gather_attention", LISTED | {"P": 128}, "S"),
    "bounds": ("page_score", {"page_size": 16, "newest": True}, "N"),
    "sums over query heads": ("vector_score", {"reduce": "sum", "first": 0, "position": lambda d: None}, "S"),
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


@thorough
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_a_check_takes_compiles_and_is_read_where_it_is(kernel, shape):
    group, dim, dtype, heads, slots = shape
    name, sizes, axis = KERNELS[kernel]
    drawn = sized(name, **sizes, **{axis: slots}, B=2, H=heads, G=group, D=dim, dtype=dtype)

    def run(arrays):
        return public(name)(**arrays, **drawn.options, implementation="pallas_tpu")

    compiled = needs("tpu_v5e").compile(run, arguments(drawn))
    assert sum(kernels(compiled).values()) == 1
    assert not moved(compiled, heads * slots * dim)
