"""Projected queries, scores and attention over packed vectors: every implementation against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._mosaic_gpu import packed
from pallas_kernels.attend.mosaickv.packed_attention import packed_attention, pallas_mosaic_gpu
from pallas_kernels.formats.packed_vectors import split_terms, words_of
from pallas_kernels.query.mosaickv.project_query import project_query
from pallas_kernels.score.mosaickv.packed_score import packed_score
from pallas_kernels.score.mosaickv.packed_score import pallas_mosaic_gpu as scores
from tests.pallas_kernels.cases import TOLERANCE, compiled, every_body_and_dtype, on_gpu, on_mosaic_alone, thorough
from tests.pallas_kernels.warp import Number, Warp

SCALE = 0.2
PROJECT, ATTEND, SCORE = map(on_mosaic_alone, (project_query, packed_attention, packed_score))


def vectors(rng, lead, dim, rank, dtype, hidden=None):
    """Random packed vectors and their unpacked form, float64 [..., D]; where ``hidden`` the values are NaN."""
    order = np.argsort(rng.random((*lead, dim)), axis=-1)
    kept = order < rng.integers(1, rank + 1, (*lead, 1))  # fewer bits than values, too
    full = np.asarray(jnp.asarray(rng.normal(size=(*lead, dim)), dtype), np.float32) * kept
    values = np.take_along_axis(full, np.argsort(~kept, axis=-1, kind="stable"), axis=-1)[..., :rank]
    if hidden is not None:
        values = np.where(hidden[..., None], np.nan, values)
    bitmap = words_of(jnp.asarray(np.packbits(kept, axis=-1, bitorder="little")))
    return (jnp.asarray(values, dtype), bitmap), full.astype(np.float64)


def problem(seed, *, rows=2, heads=2, group=4, dim=64, rank=16, blocks=30, granule=8, segments=3, listed=9, table=False,
            dtype="float32"):  # fmt: skip
    """Everything the operations take, and float64 twins; whatever may not be read is NaN."""
    rng = np.random.default_rng(seed)
    span = -(-blocks // segments)
    basis_key, basis_value = (
        np.linalg.qr(rng.normal(size=(rows, heads, segments, dim, dim)))[0].astype(np.float32) for _ in range(2)
    )
    last = rng.integers(0, segments, rows).astype(np.int32)
    last[0] = segments - 1
    owner = np.minimum(np.arange(blocks)[None] // span, last[:, None])
    if table:
        owner = np.sort(rng.integers(0, segments, (rows, blocks)), axis=1)
    count = rng.integers(listed, blocks, rows)
    number = rng.integers(0, listed + 1, (rows, heads))
    number[0, 0], number[-1, -1] = listed, 0
    chosen = np.full((rows, heads, listed), -(2**30))
    unread = np.ones((rows, heads, blocks), bool)
    for r, h in np.ndindex(rows, heads):
        chosen[r, h, : number[r, h]] = np.sort(rng.permutation(count[r])[: number[r, h]])
        unread[r, h, chosen[r, h, : number[r, h]]] = False
    behind = np.broadcast_to((np.arange(blocks)[None] >= count[:, None])[:, None], unread.shape)
    hidden = np.repeat(unread, granule, axis=2)
    position = rng.integers(-4, 9, (rows, heads, 20))
    recent = rng.normal(size=(2, rows, heads, 20, dim)).astype(np.float32)
    recent[:, position < 0] = np.nan
    query = jnp.asarray(rng.normal(size=(rows, heads, group, dim)), dtype)
    block, block_full = vectors(rng, (rows, heads, blocks), dim, rank, dtype, behind)
    key, key_full = vectors(rng, (rows, heads, blocks * granule), dim, rank, dtype, hidden)
    value, value_full = vectors(rng, (rows, heads, blocks * granule), dim, rank, dtype, hidden)
    recent = [jnp.asarray(x, dtype) for x in recent]
    inputs = {
        "query": query, "basis_key": jnp.asarray(basis_key), "basis_value": jnp.asarray(basis_value), "block": block,
        "key": key, "value": value, "recent": (*recent, jnp.asarray(position, jnp.int32)),
        "blocks": jnp.asarray(chosen, jnp.int32), "number": jnp.asarray(number, jnp.int32),
        "count": jnp.asarray(count, jnp.int32), "last": jnp.asarray(last),
        "owner": jnp.asarray(owner, jnp.int32) if table else None, "span": span, "granule": granule,
    }  # fmt: skip
    exact = {
        "query": np.asarray(query, np.float64), "basis_key": basis_key.astype(np.float64), "owner": owner,
        "basis_value": basis_value.astype(np.float64), "block": block_full, "key": key_full, "value": value_full,
        "recent": [np.asarray(x.astype(jnp.float32), np.float64) for x in recent], "position": position,
        "chosen": chosen, "number": number, "count": count, "granule": granule,
    }  # fmt: skip
    return inputs, exact


def want_scores(x):
    """Float64 [B, H, G, P]."""
    rows, heads, group, _ = x["query"].shape
    out = np.full((rows, heads, group, x["block"].shape[2]), -np.inf)
    for r, h in np.ndindex(rows, heads):
        for p in range(x["count"][r]):
            out[r, h, :, p] = (x["query"][r, h] @ x["basis_key"][r, h, x["owner"][r, p]].T) @ x["block"][r, h, p]
    return out


def want_attention(x):
    """Float64 [B, H, G, D]: every vector is projected back onto the model's basis; then plain attention."""
    out = np.zeros(x["query"].shape)
    for r, h in np.ndindex(*x["query"].shape[:2]):
        keys, values = [], []
        for p in x["chosen"][r, h, : x["number"][r, h]]:
            for slot in range(p * x["granule"], (p + 1) * x["granule"]):
                keys.append(x["key"][r, h, slot] @ x["basis_key"][r, h, x["owner"][r, p]])
                values.append(x["value"][r, h, slot] @ x["basis_value"][r, h, x["owner"][r, p]])
        for slot in np.flatnonzero(x["position"][r, h] >= 0):
            keys.append(x["recent"][0][r, h, slot])
            values.append(x["recent"][1][r, h, slot])
        if keys:
            logits = SCALE * x["query"][r, h] @ np.stack(keys).T
            weight = np.exp(logits - logits.max(axis=1, keepdims=True))
            out[r, h] = weight / weight.sum(axis=1, keepdims=True) @ np.stack(values)
    return out


SHAPES = [
    {"dim": 32, "rank": 8, "blocks": 20, "listed": 8},
    pytest.param(  # programs share lists
        {"dim": 32, "rank": 8, "blocks": 440, "listed": 70, "granule": 4, "rows": 3, "group": 1}, marks=thorough
    ),
    {"table": True, "granule": 5, "blocks": 20, "rows": 1, "group": 3, "dim": 32, "rank": 8},
    pytest.param({"listed": 8}, marks=thorough),
    pytest.param(
        {"rows": 1, "heads": 1, "group": 1, "dim": 128, "rank": 32, "segments": 1, "blocks": 9, "granule": 32, "listed": 3},
        marks=thorough,
    ),
]


def run_attention(run, inputs, parts, span=None, granule=None):
    return run(
        parts, inputs["query"], inputs["key"], inputs["value"], inputs["basis_value"], inputs["blocks"], inputs["number"],
        inputs["last"], inputs["recent"],
        scale=SCALE, granule=granule or inputs["granule"], span=span or inputs["span"], owner=inputs["owner"],
    )  # fmt: skip


@every_body_and_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_projection_scores_and_attention_equal_float64(name, dtype, shape, monkeypatch):
    """A float32 query meets bfloat16 vectors without rounding, so scores are as good as in float32."""
    for module in (pallas_mosaic_gpu, scores):
        monkeypatch.setattr(module, "PROGRAMS", 1)
    inputs, exact = problem(len(str(shape)), dtype=dtype, **shape)
    parts = compiled(PROJECT[name], dtype=dtype)(inputs["query"], inputs["basis_key"])
    projected = np.einsum("bhgd,bhmed->bhmge", exact["query"], exact["basis_key"])
    np.testing.assert_allclose(np.asarray(parts, np.float64).sum(axis=4), projected, atol=1e-5, rtol=0)
    every, tokens = want_scores(exact), inputs["count"] * inputs["granule"] + 1
    common = {"span": inputs["span"], "unit": inputs["granule"]}
    reduced = {None: every, "max": every.max(axis=2), "mean": every.mean(axis=2)}
    for reduce in ("mean",) if shape.get("table") else (None, "max"):
        want = reduced[reduce]
        score_now = compiled(SCORE[name], reduce=reduce, **common)
        got = score_now(parts, *inputs["block"], tokens, inputs["last"], owner=inputs["owner"])
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
        np.testing.assert_allclose(got, want, atol=3e-5, rtol=0)
    run = jax.jit(functools.partial(run_attention, ATTEND[name]), static_argnums=(2, 3))
    arrays = {k: v for k, v in inputs.items() if k not in ("span", "granule")}
    out = run(arrays, parts, inputs["span"], inputs["granule"])
    assert out.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), want_attention(exact), atol=TOLERANCE[dtype], rtol=0)
    np.testing.assert_array_equal(out, run(arrays, parts, inputs["span"], inputs["granule"]))


@on_gpu
def test_nothing_to_attend_to_is_zero(name):
    inputs, _ = problem(1, rows=1, heads=1, dim=32, rank=8, blocks=16, listed=4, dtype="bfloat16")
    inputs["number"] = jnp.zeros_like(inputs["number"])
    key, value, position = inputs["recent"]
    inputs["recent"] = key, value, jnp.full_like(position, -1)
    parts = compiled(PROJECT[name], dtype="bfloat16")(inputs["query"], inputs["basis_key"])
    run = jax.jit(lambda arrays, parts: run_attention(ATTEND[name], {**inputs, **arrays}, parts))
    arrays = {k: v for k, v in inputs.items() if k not in ("span", "granule", "owner")}
    assert not np.any(run(arrays, parts))


@pytest.mark.parametrize(
    ("dim", "rank", "group", "dtype"),
    [(128, 32, 4, "bfloat16"), (128, 48, 7, "bfloat16"), (32, 8, 3, "float16"), (256, 64, 4, "bfloat16")],
)
def test_a_step_of_a_warp_equals_float64(dim, rank, group, dtype, monkeypatch):
    """Two steps on the same 16 keys and values, two of which are hidden and hold NaN."""
    rng, warp = np.random.default_rng(dim + rank), Warp(1 << 15)
    warp.memory[:] = 0xFF  # NaN
    for name in "tw":
        monkeypatch.setattr(packed, name, warp)
    n = packed.Vectors(dim=dim, rank=rank, group=group, stored=4, terms=2, dtype=jnp.dtype(dtype))
    query = rng.normal(size=(group, dim)).astype(np.float32)
    terms = np.array(split_terms(jnp.asarray(query), n.dtype)).view(np.int16)
    row, quarter, hidden = np.arange(32) // 4, np.arange(32) % 4, np.isin(np.arange(16), [3, 9])
    stored, want = zip(*(vectors(rng, (16,), dim, rank, dtype, hidden) for _ in range(2)), strict=True)

    def words(x):  # of this lane's quarter of a row
        return [Number(np.int64(y)) for y in np.ascontiguousarray(x.reshape(32, -1)).view(np.int32).T]

    def of_lane(x, rows):
        return x.reshape(*x.shape[:-1], 4, -1)[rows, quarter]

    head = [np.minimum((row >> 1) + 4 * g, group - 1) for g in range(n.groups)]
    asked = [x for h in head for x in words(of_lane(terms[h, row & 1].reshape(32, dim), np.arange(32)))]
    loaded = []
    for values, bitmap in stored:
        values, bits = (
            np.array(values).view(np.int16),
            np.unpackbits(np.array(bitmap).view(np.uint8), axis=-1, bitorder="little"),
        )
        chunks, one = values.reshape(16, -1, 8), []
        for at in (row, row + 8):
            for load in range(n.loads):
                one += words(chunks[at, np.minimum(quarter + 4 * load, rank // 8 - 1)])
            mine = of_lane(bits, at).reshape(32, n.bits, -1).astype(np.int64)
            mine = np.where(hidden[at, None], 0, (mine << np.arange(mine.shape[-1])).sum(axis=-1))
            one += [Number(x) for x in mine.T]
        loaded.append(one)
    seen = [Number(~hidden[at]) for at in (row, row + 8)]
    maximum, total = ([warp.float_number(x)] * n.groups for x in (-np.inf, 0.0))
    sums = [warp.float_number(0.0)] * n.channels

    def pieces(x, lay):
        return packed.unpacked(n, packed.placed(n, x, warp.number(0), lay))

    for _ in range(2):
        keys = pieces(loaded[0], packed.in_rows)
        maximum, total, decays, right = packed.weighed(n, keys, asked, seen, SCALE, maximum, total)
        sums = packed.added(n, pieces(loaded[1], packed.in_columns), right, decays, sums)
    logits = np.where(hidden, -np.inf, SCALE * query.astype(np.float64) @ want[0].T)
    weight = np.exp(logits - logits.max(axis=1, keepdims=True))
    got = np.zeros((8, dim))
    for i, g in np.ndindex(dim // 8, n.groups):
        channel = row * (dim // 8) + i
        got[quarter + 4 * g, channel] = sums[4 * (i // 2) + 2 * (i % 2) + g].each
    totals = np.concatenate([x.each.reshape(8, 4).sum(axis=0) for x in total])
    np.testing.assert_allclose(totals[:group] / 2, weight.sum(axis=1), rtol=1e-4)
    np.testing.assert_allclose(
        got[:group] / totals[:group, None], weight / weight.sum(axis=1, keepdims=True) @ want[1], atol=2e-2
    )
