"""Kernels on cards with less shared memory than an H100's: compiled, never run; their choice by default, all thoroughly."""

import dataclasses
import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from kvjax.cache.quantised import KV_DTYPES, has_groups
from pallas_kernels.formats.quantised import zeros
from pallas_kernels.formats.shapes import full, normal
from pallas_kernels.machine import assume_machine
from tests.compile_only import compiling
from tests.compile_only.test_methods import needs
from tests.pallas_kernels.operations import PLACES, arguments, choose, chooser, named, public, sized, table, timed
from tests.pallas_kernels.test_mosaic_gpu import OPERATIONS, problem

pytestmark = pytest.mark.xdist_group("compile_only")  # one worker has the compilers and their memory

AMPERE = [card for card, capability in compiling.GPUS.items() if (8, 0) <= capability < (10, 0)]


def cache(kv_dtype):
    """Keys and values as a cache in ``kv_dtype`` stores them, for an operation's arguments."""
    kinds, mixed = KV_DTYPES[kv_dtype]

    def fill(d, i):
        return zeros(d.along("B H S D"), d.dtype, kind=kinds[i], mixed=mixed, grouped=has_groups(kinds, i))

    return {name: functools.partial(fill, i=i) for i, name in enumerate(("key", "value"))}


def wide(dim):
    return {"query": normal(f"B H G {dim}"), "key": normal(f"B H S {dim}")}


MORE = {  # sizes that no timed shape has, or of operations without timed shapes
    "dense_decode": [wide(80), wide(240), {"kind": "int4"}, cache("k8v4"), {"T": 8}, {"T": 4}, {"T": 8, "kind": "int8"}],
    "gather_attention": [cache("k8v4"), cache("int4"), cache("int8")],
    "window_score": [{"W": 64}],
    "column_mass": [{"S": 4096, "T": 2048, "block": 512}],
    "newest_repeat": [{"S": 8192}, {"S": 1152}],
    "cluster_rank": [
        {"S": size, "capacity": best, "room": 64 * best} for size, best in ((4160, 150), (600, 150), (4160, 2080))
    ],
    "cluster_estimate": [{"S": 8320}],
    "code_select": [{"M": 1, "C": 8192}, {"B": 16}],
    "store_ids": [{"S": 4096, "C": 64}],
    "match_select": [{"B": 16, "S": 65568, "K": 8192, "R": 128}],
    "page_logits": [{"N": 4160, "held": full("B H N", True, bool)}],
    "kth_select_mask": [{"S": 16384}, {"S": 4096}],
    "partial_select": [{"S": 4096, "K": 400}],
    "store_partial": [{"S": 4096, "C": lambda n: n.D // 5}],
    "sparse_attention": [{"S": 4096, "T": 1024, "K": 64, "Q": 8, "block": 128}],
}
TIMED = {
    name: timed(name).shapes for name in sorted(PLACES) if timed(name) and "pallas_triton" in table(name).implementations
}
KERNELS = [(name, sizes) for each in (TIMED, MORE) for name, shapes in each.items() for sizes in shapes]
SHAPES = [(4, 128, "bfloat16"), (4, 256, "bfloat16"), (8, 128, "float32"), (64, 256, "float32"), (16, 256, "float16")]
every_kernel = pytest.mark.parametrize(
    ("name", "sizes"), [pytest.param(name, sizes, id=f"{name} {named(sizes)}"[:80]) for name, sizes in KERNELS]
)


def with_heads(sizes, shape):
    """Sizes with query heads of a KV head, channels and dtype from ``shape``."""
    return sizes | dict(zip(("G", "D", "dtype"), shape, strict=True))


@pytest.mark.thorough
@every_kernel
@pytest.mark.parametrize("card", AMPERE)
def test_a_kernel_fits_the_shared_memory_or_is_refused_by_its_check(name, sizes, card):
    machine = needs(card)
    machine = dataclasses.replace(machine, options={"xla_gpu_autotune_level": 0})  # large shapes may spill registers
    for shape in SHAPES:
        given = with_heads(sizes, shape)
        with machine.assumed():
            if choose(name, **given) == "xla":
                continue  # refused
        drawn = sized(name, **given)
        run = functools.partial(public(name), **drawn.options, implementation="pallas_triton")
        assert "triton" in machine.compile(lambda arrays, run=run: run(**arrays), arguments(drawn)).as_text(), shape


def assemble(card):
    """Compile decode attention in Mosaic GPU for a card."""
    shapes = [(4, 128, "bfloat16"), (8, 64, "bfloat16"), (16, 256, "float16")][: 2 if card == "l4" else 3]  # L4: 99 KiB
    code = "int8" if compiling.GPUS[card] < (9, 0) else "float8_e4m3fn"  # which older cards do not convert
    dense, listed = ({}, {"T": 3}, {"kind": "int8"}), ({}, {"P": 16}, {"kind": code})
    for name, sizes in [("dense_decode", x) for x in dense] + [("gather_attention", x) for x in listed]:
        for shape in shapes:
            drawn = sized(name, **with_heads(sizes, shape))
            run = functools.partial(public(name), **drawn.options, implementation="pallas_mosaic_gpu")
            compiled = needs(card).compile(lambda arrays, run=run: run(**arrays), arguments(drawn))
            assert "mosaic_gpu" in compiled.as_text(), (name, sizes, shape)


@pytest.mark.thorough
@pytest.mark.parametrize("card", [*AMPERE, "b200"])
def test_decode_attention_in_mosaic_gpu_assembles(card):
    """In a process for each card: Mosaic assembles all programs of a process for the first card."""
    needs(card)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        process.submit(assemble, card).result()


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPERATIONS)
def test_another_operation_in_mosaic_gpu_assembles(name):
    shape, run = problem(name)
    assert "mosaic_gpu" in needs("h100").compile(run, arguments(shape)).as_text()


@every_kernel
def test_every_card_takes_the_shapes_of_8b_models(name, sizes):
    chosen = chooser(name, **with_heads(sizes, SHAPES[0]))
    for capability in ((8, 0), (8, 9), (9, 0)):
        if sizes.get("kind") != "float8_e4m3fn" or capability >= (8, 9):  # an older card does not convert float8
            with assume_machine("gpu", capability):
                assert chosen() in ("pallas_triton", "pallas_mosaic_gpu"), capability


def test_what_no_block_fits_is_refused_with_its_bytes():
    sizes = with_heads({"W": 64}, (8, 256, "float32"))
    with assume_machine("gpu", (9, 0)):
        assert choose("window_score", **sizes) == "xla"
        with pytest.raises(NotImplementedError, match=r"need 559,104 bytes of shared memory, expected at most 232,448"):
            choose("window_score", implementation="pallas_triton", **sizes)
