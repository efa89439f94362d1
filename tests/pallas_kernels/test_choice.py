"""Which implementation a call takes, by platform, sizes and dtype alone, and which calls are refused.

A row has the operation, and what differs from its shapes (`operations.sized`). Nothing is computed.
"""

import contextlib
import functools
import importlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_kernels import dispatch
from pallas_kernels._triton.jax_triton_call import launch
from pallas_kernels.attend.dense_decode import DENSE_DECODE, Rotation
from pallas_kernels.attend.gather_attention import GATHER_ATTENTION
from pallas_kernels.choose.pariskv.collision import Part
from pallas_kernels.choose.pariskv.rerank import Regions
from pallas_kernels.dispatch import XLA
from pallas_kernels.formats.coded_matrix import CodedMatrix
from pallas_kernels.formats.quantised import Quantised
from pallas_kernels.formats.shapes import counted, full, integers, normal, packed
from pallas_kernels.host import Rows
from pallas_kernels.layer.coded_product import MOST_VECTORS
from pallas_kernels.machine import PALLAS_TRITON, assume_machine
from pallas_kernels.store.evict_token import pallas_triton as evict_kernel
from pallas_kernels.store.store_token import STORE_TOKEN
from tests.pallas_kernels.operations import PLACES, arguments, choose, chooser, every_operation, named, public, small, table

TRITON, LANGUAGE, TPU, CUDNN = "pallas_triton", "jax_triton", "pallas_tpu", "cudnn"
MOSAIC = "pallas_mosaic_gpu"
PLATFORM = {TRITON: "gpu", LANGUAGE: "gpu", CUDNN: "gpu", TPU: "tpu"}


FIRST = {"coded_product": {"bits": 8, "V": 1}, "dense_attention": {"T": 5, "S": 9}}  # of shapes that have no sizes in common


def left_out(d):
    """The fill of an optional argument that is not given."""


def rows(*cases):
    return [pytest.param(*case, id=" ".join([case[0], *map(named, case[2:])])[:80]) for case in cases]


SUMS = {"reduce": "sum", "first": 0, "position": left_out}  # of vector_score
PAGES = {"S": 512, "K": 8, "P": 16, "slots": full("B F K", 0)}  # of gather_attention
PARTS = {"partials": lambda d: (normal("B H G D", jnp.float32)(d), normal("B H G", jnp.float32)(d))}
PART = Part(begin=jnp.int32(0), number=jnp.int32(0), every=lambda x: x[None])
BUCKETS = {"query": integers("B H G L", 8, jnp.uint8), "ids": integers("B H L S", 8, jnp.uint8)}
FEW_BUCKETS = {"query": integers("B H G P", 8, jnp.uint8), "ids": integers("B H P S", 8, jnp.uint8)}


def gates(d):
    return CodedMatrix(codes=full("2 N K", 0, jnp.int8)(d), scales=full("2 N 1", 1, jnp.float32)(d))


GATES = {"bits": 8, "N": 40, "K": 128, "gated": True, "matrix": gates}
CHOICES = [
    ("causal_attention", "cpu", {"D": 64}, XLA),
    ("causal_attention", "tpu", {"D": 64}, XLA),
    ("causal_attention", "gpu", {"D": 64}, CUDNN),
    ("causal_attention", "gpu", {"D": 80}, CUDNN),
    ("dense_attention", "gpu", {"D": 64, "T": 5, "S": 50}, CUDNN),
    ("dense_attention", "cpu", {"D": 64, "T": 5, "S": 50}, XLA),
    ("dense_attention", "gpu", {"D": 64, "T": 1, "S": 50}, XLA),
    ("dense_attention", "gpu", {"D": 64, "T": 5, "S": 50, "dtype": "float32"}, XLA),
    ("dense_attention", "gpu", {"D": 136, "T": 5, "S": 50}, XLA),
    *[
        (name, platform, {"D": 32, "T": 16, "dtype": dtype}, expected)
        for name in ("past_attention", "prefix_attention")
        for platform, dtype, expected in (("gpu", "bfloat16", CUDNN), ("gpu", "float32", XLA), ("cpu", "bfloat16", XLA))
    ],
    ("dense_decode", "cpu", {"D": 64, "S": 32}, XLA),
    ("dense_decode", "tpu", {"D": 128, "S": 32}, TPU),
    ("dense_decode", "tpu", {"D": 256, "S": 8, "dtype": "float32"}, TPU),
    ("dense_decode", "gpu", {"D": 64, "S": 32}, TRITON),
    ("dense_decode", "gpu", {"D": 64, "S": 32, "dtype": "float32"}, TRITON),
    ("dense_decode", "gpu", {"D": 64, "S": 8}, MOSAIC),
    ("dense_decode", "gpu", {"S": 64, "G": 4, "T": 8}, TRITON),
    ("dense_decode", "gpu", {"S": 64, "G": 8, "T": 8}, TRITON),
    ("gather_attention", "cpu", {"D": 64}, XLA),
    ("gather_attention", "tpu", {"D": 64}, XLA),
    ("gather_attention", "gpu", {"D": 64}, TRITON),
    ("gather_attention", "gpu", {"D": 64, "dtype": "float32"}, TRITON),
    ("gather_attention", "tpu", PAGES, TPU),
    ("gather_attention", "tpu", PAGES | {"dtype": "float32", "P": 8}, TPU),
    ("gather_attention", "tpu", PAGES | {"P": 32, "S": 1000}, TPU),
    ("gather_attention", "tpu", PAGES | {"P": 256}, TPU),
    ("low_rank_attention", "cpu", {}, XLA),
    ("low_rank_attention", "tpu", {}, XLA),
    ("low_rank_attention", "gpu", {}, TRITON),
    ("low_rank_attention", "gpu", {"D": 64, "R": 48, "dtype": "float32"}, TRITON),
    ("low_rank_attention", "gpu", {"D": 96}, XLA),
    ("low_rank_attention", "gpu", {"D": 16}, XLA),
    ("low_rank_attention", "gpu", {"R": 12}, XLA),
    ("low_rank_attention", "gpu", {"D": 256, "R": 1024, "dtype": "float32"}, XLA),  # a megabyte of the right factor
    ("merge_splits", "gpu", {"N": 2000, "H": 1, "G": 1, "D": 64}, XLA),
    ("packed_attention", "gpu", {}, MOSAIC),
    ("packed_score", "gpu", {}, MOSAIC),
    ("cluster_rank", "gpu", {"S": 2**14}, TRITON),
    ("cluster_rank", "gpu", {"S": 2**14 + 1}, XLA),
    ("code_select", "gpu", {"C": 64}, TRITON),
    ("code_select", "gpu", {"C": 64, "G": 16}, TRITON),
    ("code_select", "gpu", {"C": 64, "G": 17}, XLA),
    ("code_select", "gpu", {"C": 128}, XLA),
    ("collision", "gpu", {}, TRITON),
    ("collision", "gpu", {"part": PART}, TRITON),
    ("collision", "gpu", {"D": 16}, XLA),
    ("collision", "gpu", {"B": 320, "S": 1 << 20, "D": 32}, XLA),  # offsets into bytes between 2 and 4 GiB wrap
    ("compact", "cpu", {}, XLA),
    ("kth_select", "gpu", {"S": 1 << 20, "K": 8192}, TRITON),
    ("kth_select", "gpu", {"S": 1 << 14, "K": 8193}, TRITON),
    ("kth_select_mask", "gpu", {"S": 1 << 14, "G": 16}, TRITON),
    ("kth_select_mask", "gpu", {"S": 1 << 14, "G": 17}, XLA),
    *[
        (name, "gpu", {"S": 1 << 17, tables: 150, "num_bits": 10} | sizes, expected)
        for name, tables, few in (("match_select", "L", BUCKETS), ("bucket_matches", "P", FEW_BUCKETS))
        for sizes, expected in (
            ({}, TRITON),
            ({"num_bits": 14}, TRITON),
            ({"G": 8}, TRITON),
            ({"num_bits": 8, **few}, XLA),
            ({"num_bits": 15}, XLA),
            ({"G": 9}, XLA),
            ({tables: 3000}, XLA),
            ({"H": 8, "B": 16}, XLA),  # more than 2**31 buckets
        )
    ],
    ("partial_select", "gpu", {"C": 5}, TRITON),
    ("partial_select", "gpu", {"C": 257}, XLA),
    ("partial_score", "gpu", {"G": 4, "C": 25}, TRITON),
    ("partial_score", "gpu", {"G": 32, "C": 256}, TRITON),
    ("partial_score", "gpu", {"G": 4, "C": 257}, XLA),
    ("partial_score", "gpu", {"G": 33, "C": 25}, XLA),
    ("rerank", "gpu", {}, TRITON),
    ("rerank", "gpu", {"D": 16}, XLA),
    ("estimates", "gpu", {}, TRITON),
    ("rerank", "gpu", {"S": 48, "regions": Regions(sinks=3, best=30, tail=20, size=60)}, XLA),
    ("add_norm", "gpu", {"T": 1, "D": 4096}, TRITON),
    ("add_norm", "gpu", {"T": 1, "D": 32768}, XLA),
    ("coded_product", "gpu", {"bits": 8, "V": 1, "N": 40, "K": 128}, TRITON),
    ("coded_product", "gpu", {"bits": 8, "V": 16, "N": 40, "K": 128}, TRITON),
    ("coded_product", "gpu", {"bits": 8, "V": 17, "N": 40, "K": 128}, XLA),
    ("coded_product", "gpu", {"bits": 8, "V": 1, "N": 40, "K": 128, "dtype": "float32"}, XLA),
    ("coded_product", "gpu", {"bits": 8, "V": 1, "N": 40, "K": 96}, XLA),
    ("coded_product", "gpu", GATES | {"V": MOST_VECTORS}, TRITON),
    ("coded_product", "gpu", GATES | {"V": MOST_VECTORS + 1}, XLA),
    ("bucket_score", "gpu", {}, TRITON),
    ("bucket_score", "gpu", {"D": 48}, XLA),
    ("bucket_score", "gpu", {"P": 1}, XLA),
    ("bucket_score", "gpu", {"P": 10, "ids": integers("B H N R", 8, jnp.uint16)}, XLA),
    ("bucket_score", "gpu", {"H": 8, "B": 40}, XLA),  # offsets into bytes between 2 and 4 GiB wrap
    ("page_logits", "gpu", {"N": 16384}, TRITON),
    ("page_logits", "gpu", {"N": 16384, "D": 96}, XLA),
    ("page_logits", "gpu", {"N": 0}, XLA),
    ("page_score", "tpu", {"N": 48, "page_size": 16, "newest": True}, TPU),
    ("page_score", "tpu", {"N": 50, "page_size": 16, "newest": True}, XLA),
    ("page_score", "tpu", {"N": 48, "D": 64, "page_size": 16, "newest": True}, XLA),
    ("vector_score", "tpu", {"S": 48, **SUMS}, TPU),
    ("vector_score", "tpu", {"S": 50, **SUMS}, XLA),
    ("token_vote", "gpu", {}, TRITON),
    ("token_vote", "tpu", {}, XLA),
    ("pack_token", "gpu", {"D": 64}, MOSAIC),
    ("pack_token", "cpu", {}, XLA),
    ("store_buckets", "gpu", {}, TRITON),
    ("store_buckets", "gpu", {"active": full("B 2", 0)}, XLA),
    ("store_buckets", "gpu", {"D": 12}, XLA),
    ("store_codes", "gpu", {}, TRITON),
    ("store_codes", "gpu", {"active": full("B 3", 0)}, XLA),
    ("store_ids", "gpu", {}, TRITON),
    ("store_ids", "gpu", {"active": full("B 3", 0)}, XLA),
    ("store_partial", "gpu", {}, TRITON),
    ("store_partial", "gpu", {"D": 24}, XLA),
]


def on_ampere():
    """The machine of these tests wherever they run: a GPU with kernels, but not those in Mosaic GPU."""
    return assume_machine("gpu", (8, 0))


@pytest.mark.parametrize(("name", "platform", "sizes", "expected"), rows(*CHOICES))
def test_sizes_and_dtypes_choose_the_implementation(name, platform, sizes, expected):
    with on_ampere() if platform == "gpu" else contextlib.nullcontext():
        assert choose(name, platform=platform, **sizes) == expected


def test_a_kernel_comes_first_where_it_is_faster():
    with assume_machine("gpu", (9, 0)):
        found = [choose("gather_attention", D=64, B=rows) for rows in (63, 64)]
        found += [choose("kth_select", B=rows, S=size) for rows, size in ((8, 2**15), (8, 2**15 + 1), (9, 2**14), (9, 2**15))]
        rotation = Rotation(jnp.ones(32), jnp.zeros((64, 2), jnp.int32), 4)
        found += [choose("dense_decode", D=64, S=64, B=64, rotation=x) for x in (None, rotation)]
        found += [choose("choice", B=rows, S=2**15) for rows in (1, 64)]
    assert found == [TRITON, MOSAIC, *(MOSAIC, TRITON) * 2, *(TRITON, MOSAIC) * 2]


@pytest.mark.parametrize("name", ["choice", "low_rank_attention", "store_codes"])
def test_plain_jax_that_is_named_calls_no_kernel(name):
    """Its code calls other operations, and unnamed it may take their kernels."""
    shape = small(name)
    with assume_machine("gpu", (9, 0)):
        for implementation in (None, XLA):
            run = functools.partial(public(name), **shape.options, implementation=implementation)
            traced = str(jax.make_jaxpr(run)(**arguments(shape)))
            assert ("pallas_call" in traced) == (implementation is None)


def test_a_named_platform_goes_before_an_assumed_machine():
    with assume_machine("gpu", (9, 0)):
        assert [choose("prefix_attention", platform=platform) for platform in (None, "cpu")] == [MOSAIC, XLA]


WIDE = {"query": normal("B H G 256"), "key": normal("B H S 256")}
IMPOSSIBLE = [
    ("causal_attention", CUDNN, {"D": 192}, "head_dim 192"),
    ("causal_attention", CUDNN, {"D": 64, "dtype": "float32"}, "'float32'"),
    ("dense_attention", CUDNN, {"D": 64, "T": 5, "S": 50, "value": normal("B H S 32")}, "keys of 64 numbers"),
    ("dense_attention", CUDNN, {"B": 2, "G": 1, "T": 1 << 16, "S": 1025, "D": 8}, "268697600 numbers in a bias"),
    ("dense_decode", TRITON, {"D": 24}, "head_dim 24"),
    ("dense_decode", LANGUAGE, {"D": 24}, "head_dim 24"),  # it never runs where the first cannot
    ("dense_decode", TPU, {"D": 32}, "head_dim 32"),
    ("dense_decode", TPU, {"S": 75}, "75 slots"),
    ("dense_decode", TPU, {"dtype": "float16"}, "'float16'"),
    ("dense_decode", TPU, {"D": 32, **WIDE}, "keys of 256 numbers"),
    ("dense_decode", LANGUAGE, {"D": 32, **WIDE}, "keys of 256 numbers"),
    ("dense_decode", TRITON, {"D": 32, "query": normal("B H G 24"), "key": normal("B H S 24")}, "keys of 24 numbers"),
    ("dense_decode", TPU, {"H": 128, "S": 8, "dtype": "float32"}, "8,388,608 bytes in 128 slots"),
    ("dense_decode", TPU, {"kind": "int8"}, "int8 codes"),
    ("dense_decode", TPU, {"T": 5}, "5 queries per head"),
    ("dense_decode", LANGUAGE, {"T": 5}, "5 queries per head"),
    ("dense_decode", TRITON, {"T": 5, "G": 15}, "5 queries of 15 query heads"),
    ("gather_attention", TRITON, {"D": 24}, "head_dim 24"),
    ("gather_attention", LANGUAGE, {"D": 24}, "head_dim 24"),
    ("gather_attention", TRITON, {"dtype": "int8"}, "dtypes"),
    ("gather_attention", TRITON, {"D": 16, "rotate": True}, "head_dim 16"),
    ("gather_attention", LANGUAGE, {"bias": full("B F K", 0, jnp.float32)}, "bias"),
    ("gather_attention", TPU, PAGES | {"D": 64}, "head_dim 64"),
    ("gather_attention", TPU, PAGES | {"S": 1001}, "1001 slots"),
    ("gather_attention", TPU, PAGES | {"P": 8}, "page_size 8"),
    ("gather_attention", TPU, PAGES | {"P": 48}, "page_size 48"),
    ("gather_attention", TPU, PAGES | {"P": 1024, "S": 4096}, "page_size 1024"),
    ("gather_attention", TPU, PAGES | {"P": 1, "position": counted("B H S")}, "page_size 1"),
    ("gather_attention", TPU, PAGES | {"dtype": "float16"}, "'float16'"),
    ("gather_attention", TPU, PAGES | {"position": left_out}, "position=None"),
    ("gather_attention", TPU, PAGES | {"K": 1 << 17}, "1,048,576 bytes of page numbers"),
    ("gather_attention", TPU, PAGES | {"kind": "int8"}, "int8 codes"),
    ("sparse_attention", TRITON, {"S": 1024, "T": 24, "Q": 1, "block": 24}, "blocks of 24"),
    ("kth_select", TRITON, {"S": 20_000, "K": 8193}, "capacity 8193"),
    ("kth_select", LANGUAGE, {"S": 20_000, "K": 9000}, "capacity 9000"),
    ("kth_select_mask", LANGUAGE, {"S": 1 << 14}, "logits of query heads"),
    ("sentence_cut", TRITON, {"S": 20_000}, "20000 slots"),
    ("add_norm", TRITON, {"T": 8192, "D": 64}, "8192 rows"),
    ("column_mass", TRITON, {"D": 48, "S": 21}, "head_dim 48"),
    ("dissimilarity", TRITON, {"D": 8}, "head_dim 8"),
    ("newest_repeat", TRITON, {"D": 8}, "head_dim 8"),
    ("page_score", TRITON, {"D": 24}, "head_dim 24"),
    ("vector_score", TRITON, {"D": 24}, "head_dim 24"),
    ("vector_score", TPU, {"S": 48}, "each"),
    ("token_vote", TRITON, {"D": 24}, "head_dim 24"),
    ("token_vote", TRITON, {"key": full("B H S D", 0, jnp.int8)}, "key int8"),
    ("window_score", TRITON, {"G": 2, "W": 300}, "2 heads of 300 queries"),
    ("evict_alike", TRITON, {"D": 8}, "head_dim 8"),
    ("evict_alike", TRITON, {"S": 16385}, "16385 slots"),
    ("evict_token", TRITON, {"D": 24}, "head_dim 24"),
    ("sentence_add", TRITON, {"G": 3}, "3 query heads"),
    ("store_token", TRITON, {"D": 24}, "head_dim 24"),
    ("widen_page", TRITON, {"D": 12}, "head_dim 12"),
]


@pytest.mark.parametrize(("name", "implementation", "sizes", "words"), rows(*IMPOSSIBLE))
def test_a_named_implementation_that_cannot_run_says_why(name, implementation, sizes, words):
    """Nor does a call that names none take it."""
    chosen, platform = chooser(name, **sizes), PLATFORM[implementation]
    with pytest.raises(NotImplementedError, match=f"'{implementation}' cannot run: .*{words}"):
        chosen(platform, implementation)
    assert chosen(platform) != implementation


@every_operation
def test_unknown_implementations_and_those_of_other_platforms_are_refused(name):
    chosen = chooser(name, **FIRST.get(name, {}))
    with pytest.raises(ValueError, match="implementation='fast' is unknown"):
        chosen("gpu", "fast")
    for kernel in {*table(name).implementations} - {XLA}:
        with pytest.raises(NotImplementedError, match="needs a platform in"):
            chosen("cpu", kernel)


@pytest.mark.parametrize("name", sorted(x for x in PLACES if LANGUAGE in table(x).implementations))
def test_a_missing_package_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    with pytest.raises(NotImplementedError, match=r"needs the package jax_triton \(pip install kvjax\[triton\]\)"):
        choose(name, platform="gpu", implementation=LANGUAGE, **FIRST.get(name, {}))


@pytest.fixture
def package(monkeypatch):
    """A stand-in for jax-triton, and no Triton back end of Pallas: as if a release of JAX had none."""
    twice = Primitive("twice")  # without a batching rule, as the package's own
    twice.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(twice, mlir.lower_fun(lambda x, **_: 2 * x, multiple_results=False))

    def triton_call(*operands, kernel, out_type, grid, ROWS, MAPPED):
        read = [x if MAPPED >> i & 1 else jnp.tile(x, (grid[0] // ROWS, 1)) for i, x in enumerate(operands)]
        return (twice.bind(sum(read)),)

    monkeypatch.setitem(sys.modules, "jax_triton", types.SimpleNamespace(triton_call=triton_call))
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace())
    for module in [x for name, x in sys.modules.items() if name.startswith("pallas_kernels.") and hasattr(x, "plt")]:
        monkeypatch.setattr(module, "plt", None)
    monkeypatch.setattr(dispatch, "why_missing", lambda module: "it is gone" if module == PALLAS_TRITON else None)


@pytest.mark.parametrize("name", sorted(x for x in PLACES if LANGUAGE in table(x).implementations))
def test_where_pallas_has_no_triton_jax_triton_still_runs(name, package):
    sizes = FIRST.get(name, {}) | ({"dtype": "bfloat16", "N": 40, "K": 128} if name == "coded_product" else {})
    with on_ampere():
        first = next(x for x in table(name).implementations if x in (LANGUAGE, MOSAIC))
        assert choose(name, platform="gpu", **sizes) == (
            LANGUAGE if name == "kth_select" else first
        )  # searched on Hopper alone
        assert choose(name, platform="gpu", implementation=LANGUAGE, **sizes) == LANGUAGE
        with pytest.raises(NotImplementedError, match=f"needs {PALLAS_TRITON}, got it is gone"):
            choose(name, platform="gpu", implementation=TRITON, **sizes)
    if name in ("dense_decode", "gather_attention"):
        with assume_machine("gpu", (8, 9)):  # heads of Gemma, whose ring no card with 99 KiB of shared memory holds
            assert choose(name, platform="gpu", D=256) == LANGUAGE


def test_a_kernel_of_jax_triton_is_mapped(package):
    """One launch has the rows of all members; an operand without the mapped axis is not repeated."""

    def run(x, y):
        return launch(None, (x, y), (x,), grid=(2,))[0]

    x, y = jnp.arange(24.0).reshape(4, 2, 3), 100 * jnp.arange(30.0).reshape(5, 2, 3)
    one = jax.jit(jax.vmap(run, (0, None)))
    np.testing.assert_array_equal(one(x, y[0]), 2 * (x + y[:1]))
    assert str(jax.make_jaxpr(one)(x, y[0])).count("= twice") == 1
    each = jax.jit(jax.vmap(lambda x: jax.vmap(run, (None, 0))(x, y)))  # an axis of each operand
    np.testing.assert_array_equal(each(x), 2 * (x[:, None] + y[None]))
    both = jax.jit(jax.vmap(jax.vmap(run), (0, None)))(jnp.stack([x, 1 - x]), y[:4])  # one operand has both
    np.testing.assert_array_equal(both, [2 * (x + y[:4]), 2 * (1 - x + y[:4])])


# What arguments must be beyond what `test_signature.py` alters.
REFUSED = [
    ("dense_decode", "query", {"T": 5, "query": normal("B H G D")}),
    ("dense_decode", "query_position", {"T": 5, "query_position": full("B 4", 0)}),
    ("dense_decode", "partials", {"T": 5, **PARTS}),
    ("gather_attention", "page_size", {"page_size": 8, "bias": full("B F K", 0, jnp.float32)}),
    ("gather_attention", "page_size", {"page_size": 8, "logits": True}),
    ("gather_attention", "inv_freq", {"place": counted("B F K")}),
    ("low_rank_attention", "pages", {"K": 0}),
    ("prefix_attention", "key", {"S": 2, "T": 5}),
    ("sparse_attention", "columns", {"C": 0}),
    ("kth_select", "budget", {"budget": full("3", 1)}),
    ("kth_select", "budget", {"budget": full("", 3, jnp.float32)}),
    ("kth_select_mask", "lse", {"lse": normal("B H G", jnp.float32)}),
    ("sampled_bias", "own", {"slots": None}),
    ("token_list", "miss", {"chosen": counted("B K")}),
    ("project_query", "dtype", {"dtype": "int32"}),
    ("vector_score", "first", {"reduce": "sum"}),
    ("bucket_score", "ids", {"N": 1}),
    ("coded_product", "matrix", {"x": normal("V 64")}),
    ("coded_product", "residual", {"residual": normal("V K")}),
    ("coded_product", "matrix", {"gated": True}),
    ("pack_token", "store", {"store": lambda d: packed("B H S", "R")(d) * 2}),
    ("evict_token", "gain", {"score": None, "gain": full("B H S", 0, jnp.float32)}),
    ("store_token", "inv_freq", {"query": left_out}),
]


@pytest.mark.parametrize(("name", "argument", "sizes"), rows(*REFUSED))
def test_arguments_that_disagree_are_refused_by_name(name, argument, sizes):
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        choose(name, **{**FIRST.get(name, {}), **sizes})


CONFIGS = [
    ("dense_decode", TRITON, {"block": 8}),
    ("dense_decode", TRITON, {"splits": 0}),
    ("dense_decode", TPU, {"block": 100}),
    ("gather_attention", TRITON, {"block": 24}),
    ("gather_attention", TRITON, {"splits": 0}),
    ("gather_attention", TPU, {"block": 100}),
    ("gather_attention", TPU, {"buffers": 1}),
    ("code_select", TRITON, {"block": 100}),
    ("collision", TRITON, {"block": 96}),
    ("compact", TRITON, {"tile": 8}),
    ("kth_select", TRITON, {"tile": 48}),
    ("rerank", TRITON, {"part": 24}),
    ("rerank", TRITON, {"chunk": 3}),
    ("bucket_matches", TRITON, {"num_warps": 3}),
    ("bucket_score", TRITON, {"blocks": 1, "num_warps": 2}),
    ("token_vote", TRITON, {"block": 8}),
    ("token_vote", TRITON, {"splits": 3}),
    ("token_vote", TRITON, {"merge_block": 0}),
    ("encode", TRITON, {"part": 12}),
]


@pytest.mark.parametrize(("name", "kernel", "values"), rows(*CONFIGS))
def test_configurations_of_kernels_are_checked(name, kernel, values):
    with pytest.raises(ValueError, match=f"{[*values][-1]}.*expected"):
        importlib.import_module(f"{PLACES[name]}.{kernel}").Config(**values)


def codes(kind, slots, held=None, rows=1, heads=8, dim=128, **more):
    """Stand-ins for codes in ``held`` of the slots."""
    shape = functools.partial(jax.ShapeDtypeStruct, (rows, heads, slots if held is None else held, dim))
    return Quantised(codes=shape(kind), scale=jax.ShapeDtypeStruct((rows, heads, slots), "bfloat16"), of="bfloat16", **more)


def test_kernels_that_rotate_keys_leave_mixed_codes_to_plain_jax():
    shape = jax.ShapeDtypeStruct
    query, lists = shape((1, 2, 4, 64), "bfloat16"), (shape((1, 2, 8), "int32"), shape((1, 2, 8), bool))
    rest = {"position": shape((1, 2, 32), "int32"), "limit": shape((1,), "int32"), "scale": 0.1}
    rotation = Rotation(shape((32,), "float32"), shape((1, 2), "int32"), 4)
    placed = {"place": lists[0], "inv_freq": shape((32,), "float32"), "scale": 0.1}
    for mixed, expected in ((True, "xla"), (False, "pallas_triton")):
        key = codes("int8", 32, heads=2, dim=32, packed=True, mixed=mixed)
        with assume_machine("gpu", (9, 0)):
            assert DENSE_DECODE.resolve(query, key, key, **rest, rotation=rotation) == expected
            assert GATHER_ATTENTION.resolve(query, key, key, *lists, **placed) == expected


def test_gpus_without_float8_read_float8_codes_by_xla():
    shape = jax.ShapeDtypeStruct
    query, rest = shape((1, 8, 4, 128), "bfloat16"), {"position": shape((1, 8, 32), "int32"), "limit": shape((1,), "int32")}

    def taken(kind, implementation=None):
        key = codes(kind, 32)
        return DENSE_DECODE.resolve(query, key, key, **rest, scale=0.1, implementation=implementation)

    with assume_machine("gpu", (8, 0)):
        assert (taken("int8"), taken("float8_e4m3fn")) == ("pallas_triton", "xla")
        with pytest.raises(NotImplementedError, match="got int8 codes, expected bfloat16"):
            taken("int8", "jax_triton")
    with assume_machine("gpu", (9, 0)):
        assert taken("float8_e4m3fn") == "pallas_triton"


def test_offsets_into_codes_of_2_to_4_gib_wrap():
    """Rows in host memory have a key and a value, so they are as large in half of the slots."""
    shape = jax.ShapeDtypeStruct
    query, new, one = shape((1, 8, 4, 128), "bfloat16"), shape((1, 8, 128), "bfloat16"), shape((1,), "int32")

    def resident(slots):
        store, position = codes("int8", slots), shape((1, 8, slots), "int32")
        cache = {"cache_key": store, "cache_value": store, "cache_position": position, "cursor": one}
        yield DENSE_DECODE.resolve(query, store, store, position=position, limit=one, scale=0.1)
        yield STORE_TOKEN.resolve(new, new, one, **cache, query=None, inv_freq=None)

    def hosted(slots):
        rows = Rows(host=shape((1, 8, slots, 256), "int8"), newest=one, sinks=4)
        lists = shape((1, 8, 64), "int32"), shape((1, 8, 64), bool)
        yield GATHER_ATTENTION.resolve(query, *[codes("int8", slots, 128)] * 2, *lists, scale=0.1, rows=rows)

    with assume_machine("gpu", (9, 0)):
        for taken, slots in ((resident, 1 << 21), (hosted, 1 << 20)):
            assert set(taken(slots - 1)) == set(taken(2 * slots + 1)) == {"pallas_triton"}
            assert set(taken(slots)) == set(taken(2 * slots)) == {"xla"}
        many = codes("int8", 4096, rows=512)
        with pytest.raises(NotImplementedError, match="got 2147483648 bytes of int8, expected below 2 GiB or above 4 GiB"):
            evict_kernel.check(many, many, shape((512, 8, 4096), "int32"), shape((512,), "int32"), None, budget=5)
