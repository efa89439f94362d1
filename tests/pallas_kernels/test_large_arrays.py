"""A row of arrays beyond 2**31 elements is what it is alone, on a GPU; elsewhere such calls are traced for one, not run.

The other rows are zeros, so a read or a write at an offset that has wrapped around finds or leaves zeros. Every operation
that reads or writes slots is here, but for those whose check refuses such arrays: `bucket_matches`, `cluster_tokens`,
`compact` and `match_select`.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.formats.quantised import quantise
from pallas_kernels.formats.shapes import full, normal
from pallas_kernels.host import Rows
from pallas_kernels.machine import assume_machine
from tests.pallas_kernels.cases import MOSAIC, ON_GPU, ON_HOPPER, implementations, on_hopper, thorough
from tests.pallas_kernels.operations import arguments, named, public, sized, table, timed

MOST = 2**31
# Elements of the largest array, where another one must be beyond `MOST`, or beyond 4 GiB of bytes, or may not be.
LEAST = {"encode": 2**32, "pack_token": 2**32, "store_buckets": 2**31 + 2**28, "store_codes": 2**32}
LEAST |= {"sentence_cut": 2**30, "token_list": 2**30}
QUICK = {"page_score", "store_token"}
SLOTS = {"S": 65536}
FEW = {"S": 16384}  # as many as one program holds


def codes(d):
    """Keys or values in 8 bits."""
    return quantise(normal("B H S D")(d), "int8")


def rows(d):
    """The rows of an offloaded cache, whose copies on the device are of 64 slots."""
    return Rows(host=normal(f"B H S {2 * d.D}")(d), newest=full("B", "S")(d), sinks=4)


COPIES = {"key": normal("B H 64 D"), "value": normal("B H 64 D"), "rows": rows}
TABLES = {"ids": full("B H N R", 0, jnp.uint8), "planes": normal("60 4 D", jnp.float32)}
CASES = [
    ("bucket_score", SLOTS),
    ("causal_attention", {"T": 4096}),
    ("choice", SLOTS),
    ("cluster_estimate", SLOTS),
    ("cluster_rank", FEW),
    ("code_select", {"S": 2**20}),
    ("coded_product", {"bits": 8, "V": 1}),
    ("coded_product", {"bits": 8, "V": 16}),
    ("coded_product", {"bits": 4, "V": 1}),
    ("coded_product", {"bits": 4, "V": 16}),
    ("collision", SLOTS),
    ("column_mass", SLOTS),
    ("dense_decode", SLOTS),
    ("dense_decode", SLOTS | {"T": 4}),
    ("dense_decode", SLOTS | {"kind": "int8"}),
    ("dissimilarity", {"S": 4096}),
    ("encode", SLOTS),
    ("evict_alike", FEW),
    ("evict_alike", FEW | {"key": codes, "value": codes}),
    ("evict_token", FEW),
    ("evict_token", FEW | {"key": codes, "value": codes}),
    ("gather_attention", SLOTS),
    ("gather_attention", SLOTS | {"P": 16}),
    ("gather_attention", SLOTS | {"kind": "int8"}),
    ("gather_attention", SLOTS | {"F": 1, "rotate": True}),
    ("gather_attention", SLOTS | COPIES),
    ("kth_select", {"S": 2**20}),
    ("low_rank_attention", SLOTS),
    ("newest_repeat", FEW),
    ("pack_token", SLOTS | {"D": 64, "R": 32}),
    ("packed_attention", SLOTS),
    ("packed_score", {"N": 65536}),
    ("page_logits", {"N": 65536}),
    ("page_score", {"N": 65536}),
    ("partial_score", SLOTS),
    ("partial_select", SLOTS),
    ("past_attention", SLOTS | {"T": 64}),
    ("prefix_attention", {"P": 65472, "T": 64}),
    ("rerank", SLOTS),
    ("rotated_rows", SLOTS),
    ("rotated_rows", SLOTS | {"key": codes, "value": codes}),
    ("sampled_bias", SLOTS),
    ("sentence_add", SLOTS),
    ("sentence_cut", FEW),
    ("sparse_attention", SLOTS | {"T": 128}),
    ("store_buckets", SLOTS | {"D": 32, "N": 4096, "R": 960} | TABLES),
    ("store_codes", SLOTS | {"P": 16}),
    ("store_ids", SLOTS),
    ("store_partial", SLOTS),
    ("store_token", SLOTS),
    ("store_token", SLOTS | {"cache_key": codes, "cache_value": codes}),
    ("token_list", {"S": 4096, "K": 2048}),
    ("token_vote", SLOTS),
    ("vector_score", SLOTS),
    ("widen_page", SLOTS | {"P": 16384}),
    ("window_score", SLOTS),
]


def at(name, sizes, size):
    """A shape of an operation with so many rows: of a batch, or of a matrix."""
    return sized(name, **{"H": 8, "D": 128, **sizes, **({"N": 64 * size} if name == "coded_product" else {"B": size})})


def large(name, sizes, back_end):
    """Make a function of a key that tells of each array of a result whether its last row is what it is alone.

    Return the elements of the largest array, too.
    """
    one, two = at(name, sizes, 1), at(name, sizes, 2)
    leaves = jax.tree.leaves(arguments(one))
    own = [x.shape != y.shape for x, y in zip(leaves, jax.tree.leaves(arguments(two)), strict=True)]
    # Of bytes kernels take no array from 2 to 4 GiB: see `check_bytes`.
    most = max((x for x, y in zip(leaves, own, strict=True) if y), key=lambda x: x.size * x.dtype.itemsize)
    count = LEAST.get(name, 2 * MOST if most.dtype.itemsize == 1 else MOST) // most.size + 2
    many, row = at(name, sizes, count), 64 if name == "coded_product" else 1
    tolerance = timed(name).tolerance if timed(name) else 0.02
    run = on_hopper(public(name))[MOSAIC] if back_end == MOSAIC else implementations(name)["pallas_triton"]

    def part(result):
        result = vars(result) if dataclasses.is_dataclass(result) else result
        result = jax.tree.map(lambda x: x[:, -row:] if name == "coded_product" else x[-row:], result)
        return one.timed.defined(result, one.sizes)

    def equal(one, other):
        if not jnp.issubdtype(one.dtype, jnp.inexact):
            return jnp.all(one == other)
        return jnp.all(jnp.isclose(*(x.astype(jnp.float32) for x in (one, other)), tolerance, tolerance, equal_nan=True))

    def widened(x):
        if x.ndim == 1:  # a row's cursor and lengths: with a cursor of zero kernels store before slot 0
            return jnp.repeat(x, count, axis=0)
        return jnp.zeros((count * len(x), *x.shape[1:]), x.dtype).at[-row:].set(x)

    def tried(key):
        arrays = one.draw(key)
        flat, structure = jax.tree.flatten(arrays)
        wide = [widened(x) if y else x for x, y in zip(flat, own, strict=True)]
        wide = jax.tree.unflatten(structure, wide)
        return jax.tree.leaves(jax.tree.map(equal, part(run(**many.options | wide)), part(run(**one.options | arrays))))

    return tried, count * most.size


def tried_here():
    for name, sizes in CASES:
        for back_end, marks in (("pallas_triton", () if ON_GPU or name in QUICK else thorough), (MOSAIC, ON_HOPPER)):
            if back_end in table(name).implementations and (ON_GPU or back_end != MOSAIC):
                yield pytest.param(name, sizes, back_end, marks=marks, id=f"{name} {named(sizes)}"[:60] + f" {back_end}")


@pytest.mark.parametrize(("name", "sizes", "back_end"), [*tried_here()])
def test_a_row_of_large_arrays_is_what_it_is_alone(name, sizes, back_end):
    with contextlib.nullcontext() if ON_GPU else assume_machine("gpu", (9, 0)):
        tried, most = large(name, sizes, back_end)
        found = (jax.jit(tried) if ON_GPU else functools.partial(jax.eval_shape, tried))(jax.random.key(0))
    assert found and most >= LEAST.get(name, MOST)
    assert not ON_GPU or all(found), [bool(x) for x in found]
