"""Kernels on cards with less shared memory than an H100's, and plain JAX on a card before Ampere: compiled, never run.

As test_methods.py, which has the H100 and the TPU. By default one program per card runs; with ``--thorough``, all run.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import pytest

from kvjax.cache.quantised import KV_DTYPES, has_groups
from pallas_kernels.attend.dense_decode import DENSE_DECODE
from pallas_kernels.attend.gather_attention import GATHER_ATTENTION
from pallas_kernels.attend.retroinfer.cluster_estimate import CLUSTER_ESTIMATE
from pallas_kernels.attend.sparse_attention import SPARSE_ATTENTION
from pallas_kernels.choose.infinigen.partial_select import PARTIAL_SELECT
from pallas_kernels.choose.kth_select import KTH_SELECT
from pallas_kernels.choose.magicpig.match_select import MATCH_SELECT
from pallas_kernels.choose.pqcache.code_select import CODE_SELECT
from pallas_kernels.choose.retroinfer.cluster_rank import CLUSTER_RANK
from pallas_kernels.formats import bit_codes
from pallas_kernels.formats.quantised import Quantised, zeros
from pallas_kernels.machine import assume_machine
from pallas_kernels.score.column_mass import COLUMN_MASS
from pallas_kernels.score.infinigen.partial_score import PARTIAL_SCORE
from pallas_kernels.score.magicpig.sampled_bias import SAMPLED_BIAS
from pallas_kernels.score.page_logits import PAGE_LOGITS
from pallas_kernels.score.page_score import PAGE_SCORE
from pallas_kernels.score.rkv.newest_repeat import NEWEST_REPEAT
from pallas_kernels.score.tokenselect.token_vote import TOKEN_VOTE
from pallas_kernels.score.vector_score import VECTOR_SCORE
from pallas_kernels.score.window_score import WINDOW_SCORE
from pallas_kernels.store.infinigen.store_partial import STORE_PARTIAL
from pallas_kernels.store.pqcache.store_ids import STORE_IDS
from tests.compile_only import compiling
from tests.compile_only.test_methods import NAMES, PROMPT, STORE, arguments, decode_step, needs, prefill

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
    text = machine.compile(prefill(name, 512), *arguments(1024)).as_text()
    assert "triton" not in text and "__cudnn$fmha" not in text


# ---- shared memory ----------------------------------------------------------------------------------------------------


def arrays(shapes, dtype):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def dense(group, dim, dtype, width=None):
    width = width or dim
    rows = arrays([(1, 2, group, width), (1, 2, 4096, width), (1, 2, 4096, dim)], dtype)
    where = {"position": arrays([(1, 2, 4096)], "int32")[0], "limit": arrays([(1,)], "int32")[0]}
    return DENSE_DECODE, (*rows,), where, {"scale": 0.1}


def dense_of_codes(group, dim, dtype, kind):
    (query,), scale = arrays([(1, 2, group, dim)], dtype), arrays([(1, 2, 4096)], "bfloat16")[0]
    packed = kind == "int4"
    codes = arrays([(1, 2, 4096, dim // 2 if packed else dim)], "int8" if packed else kind)[0]
    stored = Quantised(codes=codes, scale=scale, of=dtype, packed=packed)
    where = {"position": arrays([(1, 2, 4096)], "int32")[0], "limit": arrays([(1,)], "int32")[0]}
    return DENSE_DECODE, (query, stored, stored), where, {"scale": 0.1}


def dense_of_queries(group, dim, dtype, queries=8, kind=None):
    """Several queries of a row at once."""
    alone = dense(group, dim, dtype) if kind is None else dense_of_codes(group, dim, dtype, kind)
    operation, (_, *stored), where, static = alone
    query, asked = jax.ShapeDtypeStruct((1, 2, group, queries, dim), dtype), jax.ShapeDtypeStruct((1, queries), "int32")
    return operation, (query, *stored), {**where, "query_position": asked}, static


def gather(group, dim, dtype, page_size=1):
    rows = arrays([(1, 2, group, dim), (1, 2, 4096, dim), (1, 2, 4096, dim)], dtype)
    lists = (*arrays([(1, 2, 512 // page_size)], "int32"), *arrays([(1, 2, 512 // page_size)], bool))
    where = {"position": arrays([(1, 2, 4096)], "int32")[0]} if page_size > 1 else {}
    return GATHER_ATTENTION, (*rows, *lists), where, {"scale": 0.1, "page_size": page_size}


def gather_codes(group, dim, dtype, kv_dtype):
    operation, (query, *_, slots, mask), where, static = gather(group, dim, dtype)
    return operation, (query, *codes_of(kv_dtype, dim, dtype), slots, mask), where, static


def dense_codes(group, dim, dtype, kv_dtype):
    operation, (query, *_), where, static = dense(group, dim, dtype)
    return operation, (query, *codes_of(kv_dtype, dim, dtype)), where, static


def codes_of(kv_dtype, dim, dtype):
    """Keys and values as a cache in ``kv_dtype`` stores them."""
    kinds, mixed = KV_DTYPES[kv_dtype]
    make = functools.partial(zeros, (1, 2, 4096, dim), dtype, mixed=mixed)
    return [
        jax.eval_shape(functools.partial(make, kind=kind, grouped=has_groups(kinds, i))) for i, kind in enumerate(kinds)
    ]


def window(group, dim, dtype, queries=32):
    rows = arrays([(1, 2, group, queries, dim), (1, 2, 4096, dim)], dtype)
    where = {"query_position": arrays([(1, queries)], "int32")[0], "key_position": arrays([(1, 2, 4096)], "int32")[0]}
    return WINDOW_SCORE, (*rows,), where, {"scale": 0.1, "axis": None}


def vote(group, dim, dtype):
    query = jax.ShapeDtypeStruct((1, 2, group, dim), "float32")
    return TOKEN_VOTE, (query, *arrays([(1, 2, 4096, dim)], dtype)), {"stop": arrays([(1,)], "int32")[0]}, {"start": 16}


def mass(group, dim, dtype, queries=1):
    rows = arrays([(1, 2, group, queries, dim), (1, 2, 4096, dim)], dtype)
    lse = arrays([(1, 2, group, queries)], "float32")
    where = {"query_position": arrays([(1, queries)], "int32")[0], "key_position": arrays([(1, 2, 4096)], "int32")[0]}
    return COLUMN_MASS, (*rows, *lse), where, {"scale": 0.1, "limit": None, "block": 512, "reduce": "sum"}


def repeat(group, dim, dtype, slots=8192):
    return NEWEST_REPEAT, (*arrays([(1, 2, slots, dim)], dtype), *arrays([(1, 2, slots)], bool)), {}, {"threshold": 0.5}


def cluster(group, dim, dtype, clusters=4160, capacity=150):
    shares = arrays([(), ()], "float32")
    args = (*arrays([(1, 2, group, dim), (1, 2, clusters, dim)], dtype), *arrays([(1, 2, clusters), (1,)], "int32"), *shares)
    return CLUSTER_RANK, args, {}, {"scale": 0.1, "capacity": capacity, "room": 64 * capacity}


def logits(group, dim, dtype, pages=4160):
    args = (*arrays([(1, 2, group, dim), (1, 2, pages, dim)], dtype), *arrays([(1,)], "int32"))
    return PAGE_LOGITS, (*args, *arrays([(1, 2, pages)], bool)), {}, {"scale": 0.1}


def share(group, dim, dtype, slots=16384):
    del dim, dtype
    scores, lse = arrays([(1, 2, group, slots), (1, 2, 33, group)], "float32")
    return KTH_SELECT, (scores,), {"lse": lse}, {"budget": 250, "capacity": 256}


def partial(group, dim, dtype, slots=131136):
    rows = arrays([(1, 2, group, dim // 5), (1, 2, dim // 5, slots)], dtype)
    where = arrays([(1, 2, slots), (1,)], "int32")
    return PARTIAL_SCORE, (*rows, *where, *arrays([()], "float32")), {}, {"scale": 0.1}


def partial_lists(group, dim, dtype, slots=131136):
    operation, args, where, static = partial(group, dim, dtype, slots)
    del operation
    static |= {"capacity": 401, "total": _alone, "query_heads": 2 * group}
    return PARTIAL_SELECT, (*args, *arrays([()], "int32")), where, static


def _alone(x):
    return x


def store_partial(group, dim, dtype):
    (key, stored, *queries) = arrays([(1, 2, 4096, dim), (1, 2, dim // 5, 4096), *[(1, 2, group, dim)] * 2], dtype)
    position, cursor, place = arrays([(1, 2, 4096), (1,), (1,)], "int32")
    matrix = arrays([(1, 2, dim, dim // 5)], "float32")
    return STORE_PARTIAL, (key, position, cursor, *matrix, queries[0], place, stored, queries[1]), {}, {}


def estimate(group, dim, dtype):
    args = (*arrays([(1, 2, group, 8320)], "float32"), *arrays([(1, 2, 8320)] * 2, bool), *arrays([(1, 2, 8320)], "int32"))
    return CLUSTER_ESTIMATE, (*args, *arrays([(1, 2, 8320, dim)], dtype)), {}, {}


def code(group, dim, dtype, parts=2, count=64, rows=1):
    args = arrays([(rows, 2, group, dim)], dtype) + arrays([(rows, 2, parts, count, dim // parts)], "float32")
    size = bit_codes.together(parts * bit_codes.bits_of(count))[1]
    args = (*args, *arrays([(rows, 2, 65568, size)], "uint8"), *arrays([(rows,)] * 3, "int32"))
    return CODE_SELECT, args, {}, {"first": 32, "capacity": 6557, "room": 6558}


def new_code(group, dim, dtype, parts=2, count=64):
    size = bit_codes.together(parts * bit_codes.bits_of(count))[1]
    args = (*arrays([(1, 2, 4096, dim)], dtype), *arrays([(1, 1), (1,)], "int32"))
    args = (*args, *arrays([(1, 2, parts, count, dim // parts)], "float32"), *arrays([(1, 2, 2048, size)], "uint8"))
    return STORE_IDS, args, {}, {}


def match(group, dim, dtype, rows=1):
    args = (*arrays([(rows, 2, group, 150), (rows, 2, 150, 65568)], "uint16"), *arrays([(rows,)] * 2, "int32"))
    return MATCH_SELECT, args, {}, {"first": 4, "capacity": 8192, "room": 128, "num_bits": 10}


def sampled(group, dim, dtype):
    vectors = (*arrays([(1, 2, group, dim), (1, 2, 4096, dim)], dtype), *arrays([(1, 2, dim)], "float32"))
    args = (*vectors, *arrays([(1, 2, 1000)], "int32"), *arrays([(1, 2, group, 1000)], bool), *arrays([(1,)], "int32"))
    return SAMPLED_BIAS, args, {}, {"first": 4, "num_tables": 150, "num_bits": 10}


def token_score(group, dim, dtype):
    """Scores of tokens between two slots, of each query head."""
    args = (*arrays([(1, 2, group, dim), (1, 2, 4096, dim)], dtype), *arrays([(1,)], "int32"))
    options = {"added": None, "reduce": "each", "first": 128}
    return VECTOR_SCORE, args, {"position": arrays([(1, 2, 4096)], "int32")[0]}, options


def bounds(group, dim, dtype):
    args = (*arrays([(1, 2, group, dim), (1, 2, 4096, dim), (1, 2, 4096, dim)], dtype), *arrays([(1,)], "int32"))
    return PAGE_SCORE, args, {}, {"page_size": 16, "reduce": "max", "newest": True}


def sparse(group, dim, dtype, block=64):
    rows = arrays([(1, 2, group, 1024, dim), (1, 2, 4096, dim), (1, 2, 4096, dim)], dtype)
    sizes = {"distances": 64, "first": 1024 // block, "count": 1024 // block, "columns": 1000}
    where = {name: jax.ShapeDtypeStruct((1, 2, group, size), "int32") for name, size in sizes.items()}
    last = zip(("num_columns", "start", "length"), arrays([(1, 2, group), (), (1,)], "int32"), strict=True)
    return SPARSE_ATTENTION, (*rows,), where | dict(last), {"block": block, "scale": 0.1}


KERNELS = {
    "dense_decode": dense,
    "dense_decode of 80": functools.partial(dense, width=80),
    "dense_decode of 240": functools.partial(dense, width=240),
    "dense_decode of int8": functools.partial(dense_of_codes, kind="int8"),
    "dense_decode of float8": functools.partial(dense_of_codes, kind="float8_e4m3fn"),
    "dense_decode of int4": functools.partial(dense_of_codes, kind="int4"),
    "dense_decode of k8v4": functools.partial(dense_codes, kv_dtype="k8v4"),
    "dense_decode of 8 queries": dense_of_queries,
    "dense_decode of 4 queries": functools.partial(dense_of_queries, queries=4),
    "dense_decode of 8 queries in int8": functools.partial(dense_of_queries, kind="int8"),
    "gather_attention": gather,
    "gather_attention pages": functools.partial(gather, page_size=32),
    "gather_attention of int8": functools.partial(gather_codes, kv_dtype="int8"),
    "gather_attention of k8v4": functools.partial(gather_codes, kv_dtype="k8v4"),
    "gather_attention of int4": functools.partial(gather_codes, kv_dtype="int4"),
    "window_score": window,
    "window_score of 64": functools.partial(window, queries=64),
    "token_vote": vote,
    "column_mass": mass,
    "column_mass of a prompt": functools.partial(mass, queries=2048),
    "newest_repeat": repeat,
    "newest_repeat of few": functools.partial(repeat, slots=1152),
    "cluster_rank": cluster,
    "cluster_rank of few": functools.partial(cluster, clusters=600),
    "cluster_rank, half of them best": functools.partial(cluster, capacity=2080),
    "cluster_estimate": estimate,
    "code_select": code,
    "code_select, 13 bits": functools.partial(code, parts=1, count=8192),
    "code_select, 16 rows": functools.partial(code, rows=16),
    "store_ids": new_code,
    "match_select": match,
    "match_select, 16 rows": functools.partial(match, rows=16),
    "sampled_bias": sampled,
    "page_logits": logits,
    "kth_select of shares": share,
    "kth_select of few shares": functools.partial(share, slots=4096),
    "partial_score": partial,
    "partial_select": partial_lists,
    "partial_select, short rows": functools.partial(partial_lists, slots=4096),
    "store_partial": store_partial,
    "page_score": bounds,
    "vector_score of tokens": token_score,
    "sparse_attention": sparse,
    "sparse_attention of 128": functools.partial(sparse, block=128),
}
SHAPES = [(4, 128, "bfloat16"), (4, 256, "bfloat16"), (8, 128, "float32"), (64, 256, "float32"), (16, 256, "float16")]


def chosen(make, shape, machine):
    operation, args, where, static = make(*shape)
    with machine:
        return operation.resolve(*args, **where, **static)


@pytest.mark.xdist_group("compile_only")
@pytest.mark.thorough
@pytest.mark.parametrize("card", AMPERE)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_kernel_fits_the_shared_memory_or_is_refused_by_its_check(kernel, shape, card):
    machine = needs(card)
    machine = dataclasses.replace(machine, options={"xla_gpu_autotune_level": 0})  # large shapes may spill registers
    operation, args, where, static = KERNELS[kernel](*shape)
    if chosen(KERNELS[kernel], shape, machine.assumed()) == "xla":
        return  # refused
    names = list(where)

    def run(*given):
        values = dict(zip(names, given[len(args) :], strict=True))
        return operation.run(*given[: len(args)], **values, **static, implementation="pallas_triton")

    assert "triton" in machine.compile(run, *args, *where.values()).as_text()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)], ids=str)
def test_every_card_takes_the_shapes_of_8b_models(kernel, capability):
    if kernel == "dense_decode of float8" and capability < (8, 9):
        pytest.skip("the card does not convert float8")
    assert chosen(KERNELS[kernel], SHAPES[0], assume_machine("gpu", capability)) == "pallas_triton"


def test_what_no_block_fits_is_refused_with_its_bytes():
    largest = KERNELS["window_score of 64"](8, 256, "float32")
    operation, args, where, static = largest
    with assume_machine("gpu", (9, 0)):
        assert operation.resolve(*args, **where, **static) == "xla"
        with pytest.raises(NotImplementedError, match=r"need 559,104 bytes of shared memory, expected at most 232,448"):
            operation.resolve(*args, **where, **static, implementation="pallas_triton")
