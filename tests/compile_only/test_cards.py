"""Kernels on cards with less shared memory than an H100's, and plain JAX on a card before Ampere: compiled, never run.

As test_methods.py, which has the H100 and the TPU. By default one program per card runs; with ``--thorough``, all run.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest

from kvjax.cache.quantised import KV_DTYPES, has_groups
from pallas_kernels.formats.quantised import zeros
from pallas_kernels.formats.shapes import full, normal
from pallas_kernels.machine import assume_machine
from tests.compile_only import compiling
from tests.compile_only.test_methods import NAMES, PROMPT, STORE, decode_step, needs, prefill
from tests.compile_only.test_methods import arguments as arguments_of_prefill
from tests.pallas_kernels.operations import arguments, choose, public, sized

AMPERE = [card for card, capability in compiling.GPUS.items() if capability >= (8, 0)]
BY_DEFAULT = {("t4", "full"), ("a100", "full"), ("l4", "full")}


def methods(*cards):
    pairs = [(card, name) for card in cards for name in NAMES]
    return [pytest.param(*pair, marks=[] if pair in BY_DEFAULT else pytest.mark.thorough) for pair in pairs]


@pytest.mark.xdist_group("compile_only")
@pytest.mark.parametrize(("card", "name"), methods("a100", "l4"))
def test_decode_step_for_other_cards_uses_kernels(card, name):
    compiled = decode_step(needs(card), name, PROMPT)
    assert "triton" in compiled.as_text(), "no kernel of ours"
    assert compiled.memory_analysis().temp_size_in_bytes < STORE / 4


@pytest.mark.xdist_group("compile_only")
@pytest.mark.parametrize(("card", "name"), methods("t4"))
def test_before_ampere_everything_is_plain_jax(card, name):
    """Prompt and decode step, under every method."""
    machine = needs(card)
    assert "triton" not in decode_step(machine, name, 1024).as_text()
    text = machine.compile(prefill(name, 512), *arguments_of_prefill(1024)).as_text()
    assert "triton" not in text and "__cudnn$fmha" not in text


# ---- shared memory ----------------------------------------------------------------------------------------------------


def cache(kv_dtype):
    """Keys and values as a cache in ``kv_dtype`` stores them, for an operation's arguments."""
    kinds, mixed = KV_DTYPES[kv_dtype]

    def fill(d, i):
        return zeros(d.along("B H S D"), d.dtype, kind=kinds[i], mixed=mixed, grouped=has_groups(kinds, i))

    return {name: functools.partial(fill, i=i) for i, name in enumerate(("key", "value"))}


def wide(dim):
    return {"query": normal(f"B H G {dim}"), "key": normal(f"B H S {dim}")}


DENSE, LISTED = {"S": 4096}, {"S": 4096, "L": 512}
CODES = {"S": 65568, "K": 6557, "first": 32, "room": 6558}
LISTS = {"S": 131136, "K": 400}
SPARSE = {"S": 4096, "T": 1024, "K": 64}
KERNELS = {  # an operation, and what differs from its declared shapes
    "dense_decode": ("dense_decode", DENSE),
    "dense_decode of 80": ("dense_decode", DENSE | wide(80)),
    "dense_decode of 240": ("dense_decode", DENSE | wide(240)),
    "dense_decode of int8": ("dense_decode", DENSE | {"kind": "int8"}),
    "dense_decode of float8": ("dense_decode", DENSE | {"kind": "float8_e4m3fn"}),
    "dense_decode of int4": ("dense_decode", DENSE | {"kind": "int4"}),
    "dense_decode of k8v4": ("dense_decode", DENSE | cache("k8v4")),
    "dense_decode of 8 queries": ("dense_decode", DENSE | {"T": 8}),
    "dense_decode of 4 queries": ("dense_decode", DENSE | {"T": 4}),
    "dense_decode of 8 queries in int8": ("dense_decode", DENSE | {"T": 8, "kind": "int8"}),
    "gather_attention": ("gather_attention", LISTED),
    "gather_attention pages": ("gather_attention", LISTED | {"P": 32}),
    "gather_attention of int8": ("gather_attention", LISTED | cache("int8")),
    "gather_attention of k8v4": ("gather_attention", LISTED | cache("k8v4")),
    "gather_attention of int4": ("gather_attention", LISTED | cache("int4")),
    "window_score": ("window_score", {"S": 4096}),
    "window_score of 64": ("window_score", {"S": 4096, "W": 64}),
    "token_vote": ("token_vote", {"S": 4096, "start": 16}),
    "column_mass": ("column_mass", {"S": 4096, "block": 512}),
    "column_mass of a prompt": ("column_mass", {"S": 4096, "T": 2048, "block": 512}),
    "newest_repeat": ("newest_repeat", {"S": 8192}),
    "newest_repeat of few": ("newest_repeat", {"S": 1152}),
    "cluster_rank": ("cluster_rank", {"S": 4160, "capacity": 150, "room": 64 * 150}),
    "cluster_rank of few": ("cluster_rank", {"S": 600, "capacity": 150, "room": 64 * 150}),
    "cluster_rank, half of them best": ("cluster_rank", {"S": 4160, "capacity": 2080, "room": 64 * 2080}),
    "cluster_estimate": ("cluster_estimate", {"S": 8320}),
    "code_select": ("code_select", CODES),
    "code_select, 13 bits": ("code_select", CODES | {"M": 1, "C": 8192}),
    "code_select, 16 rows": ("code_select", CODES | {"B": 16}),
    "store_ids": ("store_ids", {"S": 4096, "C": 64}),
    "match_select": ("match_select", {"S": 65568, "K": 8192, "R": 128}),
    "match_select, 16 rows": ("match_select", {"B": 16, "S": 65568, "K": 8192, "R": 128}),
    "sampled_bias": ("sampled_bias", {"S": 4096, "K": 1000, "first": 4}),
    "page_logits": ("page_logits", {"N": 4160, "held": full("B H N", True, bool)}),
    "kth_select of shares": ("kth_select_mask", {"S": 16384}),
    "kth_select of few shares": ("kth_select_mask", {"S": 4096}),
    "partial_score": ("partial_score", {"S": 131136}),
    "partial_select": ("partial_select", LISTS),
    "partial_select, short rows": ("partial_select", LISTS | {"S": 4096}),
    "store_partial": ("store_partial", {"S": 4096, "C": lambda n: n.D // 5}),
    "page_score": ("page_score", {"N": 4096, "page_size": 16, "newest": True}),
    "vector_score of tokens": ("vector_score", {"S": 4096, "first": 128}),
    "sparse_attention": ("sparse_attention", SPARSE),
    "sparse_attention of 128": ("sparse_attention", SPARSE | {"Q": 8, "block": 128}),
}
SHAPES = [(4, 128, "bfloat16"), (4, 256, "bfloat16"), (8, 128, "float32"), (64, 256, "float32"), (16, 256, "float16")]


def call(kernel, shape):
    """An operation and its sizes, with query heads of a KV head, channels and dtype from ``shape``."""
    name, sizes = KERNELS[kernel]
    return name, sizes | dict(zip(("G", "D", "dtype"), shape, strict=True))


@pytest.mark.xdist_group("compile_only")
@pytest.mark.thorough
@pytest.mark.parametrize("card", AMPERE)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_kernel_fits_the_shared_memory_or_is_refused_by_its_check(kernel, shape, card):
    machine = needs(card)
    machine = dataclasses.replace(machine, options={"xla_gpu_autotune_level": 0})  # large shapes may spill registers
    name, sizes = call(kernel, shape)
    with machine.assumed():
        if choose(name, **sizes) == "xla":
            return  # refused
    drawn = sized(name, **sizes)

    def run(arrays):
        return public(name)(**arrays, **drawn.options, implementation="pallas_triton")

    assert "triton" in machine.compile(run, arguments(drawn)).as_text()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)], ids=str)
def test_every_card_takes_the_shapes_of_8b_models(kernel, capability):
    if kernel == "dense_decode of float8" and capability < (8, 9):
        pytest.skip("the card does not convert float8")
    name, sizes = call(kernel, SHAPES[0])
    with assume_machine("gpu", capability):
        assert choose(name, **sizes) == "pallas_triton"


def test_what_no_block_fits_is_refused_with_its_bytes():
    name, sizes = call("window_score of 64", (8, 256, "float32"))
    with assume_machine("gpu", (9, 0)):
        assert choose(name, **sizes) == "xla"
        with pytest.raises(NotImplementedError, match=r"need 559,104 bytes of shared memory, expected at most 232,448"):
            choose(name, implementation="pallas_triton", **sizes)
