"""What every kernel does alike: rows of a batch, mapped calls, numbers mapped alone, copies of an offloaded cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels import cases
from tests.pallas_kernels.operations import PLACES, arguments, public, small, table

SIZES = {  # of kernels that take no smaller ones
    ("gather_attention", "pallas_tpu"): {"P": 16},
    ("collision", "pallas_triton"): {"D": 32, "M": 4},
    ("add_norm", cases.MOSAIC): {"D": 256},
    ("rerank", "pallas_triton"): {"D": 32, "C": 16, "M": 4},
    **{("choice", back_end): {"D": 32, "C": 16, "M": 4} for back_end in ("pallas_triton", cases.MOSAIC)},
    ("low_rank_attention", "pallas_triton"): {"D": 32},
    ("pack_token", cases.MOSAIC): {"D": 64},
    **{(name, cases.MOSAIC): {"D": 32} for name in ("packed_attention", "packed_score", "project_query")},
}
ROWS = {"add_norm": "T", "coded_product": "V", "merge_splits": "H"}  # the axis of rows, where it is not B
# Kernels that are fast to interpret, and between them have every kind of argument; the others run thoroughly.
QUICK = {"gather_attention", "merge_splits", "store_token", "widen_page"}
# Numbers that a sweep maps alone: budgets, thresholds, shares.
NUMBERS = {
    "bucket_score": ["temperature"], "cluster_rank": ["best", "considered"], "evict_alike": ["budget"],
    "evict_token": ["budget"], "kth_select": ["budget"], "newest_repeat": ["threshold"], "partial_score": ["alpha"],
    "partial_select": ["alpha", "budget"], "rerank": ["budget"], "choice": ["budget"], "sentence_cut": ["budget"],
    "step_query": ["budget", "theta"], "token_list": ["budget"],
}  # fmt: skip


def kernels(names, quick):
    """Names and back ends of the kernels of operations, and how each runs: interpreted, or on a GPU."""
    made = []
    for name in sorted(names):
        for back_end in table(name).implementations:
            marks = [] if name in quick and back_end == "pallas_triton" else cases.thorough
            if back_end in ("pallas_triton", "pallas_tpu"):
                made.append(pytest.param(name, back_end, "interpreted", marks=marks))
            if back_end == "pallas_triton":
                made.append(pytest.param(name, back_end, back_end, marks=cases.NEEDS_GPU))
            if back_end == cases.MOSAIC:
                made.append(pytest.param(name, back_end, back_end, marks=[cases.NEEDS_GPU, cases.ON_HOPPER]))
    return pytest.mark.parametrize(("name", "back_end", "body"), made)


def operation(name, back_end, body, shape):
    """A function of the arrays of a shape: the part of an operation's result that is defined."""
    run = cases.on_hopper(public(name))[body] if body == cases.MOSAIC else cases.implementations(name, back_end)[body]

    def defined(arrays):
        result = run(**shape.options | arrays)
        return shape.timed.defined(vars(result) if dataclasses.is_dataclass(result) else result, shape.sizes)

    return defined


@kernels(PLACES, QUICK)
def test_a_row_is_what_it_is_alone_and_mapped(name, back_end, body):
    rows = ROWS.get(name, "B")
    sizes = SIZES.get((name, back_end), {})
    shape, one = (small(name, wide=back_end == "pallas_tpu", **sizes, **{rows: size}) for size in (3, 1))
    arrays, structure = jax.tree.flatten(shape.draw(jax.random.key(0)))
    own = [x.shape != y.shape for x, y in zip(arrays, jax.tree.leaves(arguments(one)), strict=True)]
    together, alone = operation(name, back_end, body, shape), operation(name, back_end, body, one)

    def apart(*arrays):
        return alone(jax.tree.unflatten(structure, [x[None] if y else x for x, y in zip(arrays, own, strict=True)]))

    mapped = jax.vmap(apart, [0 if x else None for x in own])
    whole, each = jax.jit(lambda x: (together(jax.tree.unflatten(structure, x)), mapped(*x)))(arrays)
    each = jax.tree.map(lambda x: x[:, 0], each)
    cases.alike(whole, each, rtol=shape.timed.tolerance, atol=shape.timed.tolerance)


@kernels(NUMBERS, {"evict_token", "kth_select"})
def test_numbers_mapped_alone_equal_calls_in_a_loop(name, back_end, body):
    shape = small(name, **SIZES.get((name, back_end), {}))
    arrays = shape.draw(jax.random.key(0)) | {
        at: jnp.asarray(shape.options[at]) for at in NUMBERS[name] if at in shape.options
    }
    numbers = {at: jnp.stack([arrays[at], (arrays[at] / 2).astype(arrays[at].dtype)]) for at in NUMBERS[name]}
    run = operation(name, back_end, body, shape)

    def one(numbers):
        return run(arrays | numbers)

    mapped, looped = jax.jit(lambda x: (jax.vmap(one)(x), jax.lax.map(one, x)))(numbers)
    cases.alike(mapped, looped, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@cases.every_body
@pytest.mark.parametrize(
    "stores", ["sentence_add", "store_buckets", "store_codes", "store_ids", "store_partial", "widen_page"]
)
def test_copies_of_an_offloaded_cache_do_as_well(name, stores):
    """Keys and values have different numbers of copies."""
    shape = small(stores, B=3, dtype="float32")
    cursor = jnp.asarray([16, 12, 9], jnp.int32)
    arrays = {**shape.draw(jax.random.key(0)), "cursor": cursor}
    if "active" in arrays:
        arrays["active"] = cursor[:, None] - 1
    copies = {x: cases.near(arrays[x], cursor, size) for x, size in (("key", 6), ("value", 9)) if x in arrays}
    run = operation(stores, "pallas_triton", name, shape)
    got = jax.jit(lambda arrays, rows: run({**arrays, "rows": rows}))({**arrays, **copies}, cases.offloaded(cursor))
    want = jax.jit(operation(stores, "pallas_triton", "xla", shape))(arrays)
    np.testing.assert_equal(len(jax.tree.leaves(got)), len(jax.tree.leaves(want)))
    cases.alike(got, want, rtol=2e-5, atol=2e-5)
