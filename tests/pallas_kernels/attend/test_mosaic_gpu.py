"""`dense_decode` and `gather_attention` through Mosaic GPU: lowered here, and on a Hopper GPU against float64 NumPy.

Pallas does not interpret `plgpu.inline_mgpu`, so without such a GPU no kernel runs as a whole. A warp in NumPy computes what
a warp does in a step.
"""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import dispatch
from pallas_kernels._mosaic_gpu import attention_step, steps, threads, warps
from pallas_kernels._mosaic_gpu.decode import ROOM, default_programs
from pallas_kernels._mosaic_gpu.sizes import ENTRIES, LINE, Sizes
from pallas_kernels.attend.dense_decode import Rotation, dense_decode
from pallas_kernels.attend.dense_decode import pallas_mosaic_gpu as dense_kernel
from pallas_kernels.attend.gather_attention import gather_attention
from pallas_kernels.attend.gather_attention import pallas_mosaic_gpu as gather_kernel
from pallas_kernels.formats.quantised import dequantise, quantise
from pallas_kernels.host import Rows
from pallas_kernels.machine import PALLAS_TRITON, assume_machine, current_machine
from pallas_kernels.numerics import LOG2_E, merge_partials
from tests.pallas_kernels.attend import test_dense_decode as dense
from tests.pallas_kernels.attend import test_dense_decode_queries as queries
from tests.pallas_kernels.attend import test_gather_attention as gather
from tests.pallas_kernels.cases import SCALE, close, compiled, joined, near, one_by_one, rotated, softmax_attention
from tests.pallas_kernels.operations import choose
from tests.pallas_kernels.warp import Number, Warp

NAME = "pallas_mosaic_gpu"
ON_HOPPER = pytest.mark.skipif(current_machine().capability != (9, 0), reason="needs a GPU of compute capability 9.0")
DENSE = functools.partial(dense_decode, scale=SCALE, implementation=NAME)
GATHER = functools.partial(gather_attention, scale=SCALE, implementation=NAME)
H100 = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA H100 80GB HBM3", None, "cuda"))


def lowered(run, *args, call="mosaic_gpu", **kwargs):
    with jax.sharding.use_abstract_mesh(H100), assume_machine("gpu", (9, 0)):
        text = jax.jit(run).trace(*args, **kwargs).lower(lowering_platforms=("cuda",)).as_text()
    return text.count(f"custom_call @{call}")


def test_all_arguments_lower_for_an_h100():
    """One kernel each, and none for the merge; a long list has a second one, which joins clusters."""
    shape, one = jax.ShapeDtypeStruct, (1, 8, 1 << 17)
    stored = [shape((*lead, 128), "bfloat16") for lead in ((1, 8, 4), one, one)]
    assert lowered(DENSE, *stored, position=shape(one, "int32"), limit=shape((1,), "int32")) == 2
    stored, rest, _ = queries.cache(1, 3, 5, 64, 75, "bfloat16")
    gap = jnp.zeros((2, 2, 2), jnp.int32)
    beside = stored[0], jnp.zeros(stored[0].shape[:4], jnp.float32)
    assert lowered(functools.partial(DENSE, parts=True), *stored, **rest, gap=gap, partials=beside) == 1
    *args, bias = gather.lists(1, 3, 128, dtype="bfloat16")
    beside = jnp.zeros((2, 2, 4, 3, 128), jnp.float32), jnp.zeros((2, 2, 4, 3), jnp.float32)
    run = jax.vmap(functools.partial(GATHER, bias=bias, partials=beside), (None, None, None, 0, None))
    assert lowered(run, *args[:3], args[3][None], args[4]) == 1


def test_rows_in_host_memory_lower_for_an_h100_and_stay_there():
    query, *stored, slots, mask, _ = gather.lists(1, 3, 128, dtype="bfloat16")
    host = jax.device_put(jnp.concatenate(stored, 3), jax.memory.Space.Host)

    def run(host, slots):
        rows = Rows(host=host, newest=jnp.full((2,), 96), sinks=4)
        return GATHER(query, *(x[:, :, :20] for x in stored), slots, mask, rows=rows)

    for attend, lists in ((run, slots), (jax.vmap(run, (None, 0)), slots[None])):
        assert lowered(attend, host, lists) == 1
        assert lowered(attend, host, lists, call="annotate_device_placement") == 2  # of the results


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(
    ("group", "dim", "dtype", "biased", "asked", "kind", "turned"),
    [
        (4, 128, "bfloat16", False, False, None, True),
        (8, 64, "float16", True, False, None, False),
        (16, 256, "bfloat16", False, True, None, False),
        (20, 128, "bfloat16", True, True, "int8", False),
        (4, 64, "float16", False, False, "float8_e4m3fn", False),
        (3, 64, "float16", False, False, None, True),
    ],
)
def test_a_step_of_a_warp_equals_float64(group, dim, dtype, biased, asked, kind, turned, tiled, monkeypatch):
    """Two steps on the same entries; slots without a token hold NaN, and the rows that fill a half of the query anything."""
    n = Sizes(heads=1, group=group, dim=dim, slots=1, dtype=jnp.dtype(dtype), shared=1 << 17, kind=kind, tiled=tiled)
    if tiled and n.width % LINE:
        pytest.skip("a row is no line of a tile")
    rng, warp = np.random.default_rng(dim), Warp(1 << 18)
    places = [0, 1 << 16, 1 << 17] if tiled else [64, 64 + ENTRIES * n.pitch, 64 + n.tags]
    monkeypatch.setattr(attention_step, "t", warp)
    monkeypatch.setattr(attention_step, "w", warp)
    rows, tiles = 8 * n.halves, dim // 8
    query, key, value = (rng.normal(size=(x, dim)).astype(n.dtype) for x in (rows, ENTRIES, ENTRIES))
    position, bias = rng.integers(0, 50, ENTRIES, np.int32), rng.normal(size=ENTRIES).astype(np.float32) * biased
    own = rng.integers(10, 60, rows, np.int32) if asked else np.full(rows, 50, np.int32)
    position[[1, 6, 12]] = -1
    seen, scales = (position >= 0) & (position <= own[:, None]), np.ones((2, ENTRIES), jnp.bfloat16)
    if kind is not None:
        codes = [quantise(jnp.asarray(x), kind) for x in (key, value)]
        key, value = (np.array(dequantise(x), np.float64) for x in codes)
    shift, inv_freq = rng.integers(-9, 10**5, ENTRIES, np.int32), np.float32(1e4) ** -np.linspace(0, 1, dim // 2, np.float32)
    want = softmax_attention(query, rotated(key, shift, inv_freq) if turned else key, value, seen, bias)[:2]
    if kind is None:
        key[[1, 6]], value[[1, 6, 12]] = np.nan, np.nan
    else:
        (key, value), scales = (np.array(x.codes) for x in codes), np.array([x.scale for x in codes])
        scales[:, [1, 6, 12]] = np.nan
    halves = rng.integers(0, 4, ENTRIES, np.int32)
    words = [
        np.where(halves & (1 << i), x.view(np.uint16).astype(np.int32) << 16, x.view(np.uint16)) for i, x in enumerate(scales)
    ]
    for place, stored in zip(places, (key, value)):
        for i, x in enumerate(np.ascontiguousarray(stored).view(np.uint8)):
            for chunk, part in enumerate(x.reshape(-1, 16)):
                at = (chunk // 8 * n.block + i) * LINE + (chunk % 8 ^ i % 8) * 16 if tiled else i * n.pitch + chunk * 16
                warp.memory[place + at :][:16] = part
    tags = (position, shift if turned else bias * np.float32(LOG2_E), *(np.asarray(x, np.int32) for x in (*words, halves)))
    for i, x in enumerate(tags):
        warp.memory[places[2] + 4 * ENTRIES * i :][: 4 * ENTRIES] = np.ascontiguousarray(x).view(np.uint8)
    row, column = np.arange(32) // 4, np.arange(32) % 4
    words = query.view(np.int32).reshape(n.halves, 8, tiles // 2, 2, 4)
    words = words if kind is None else words.reshape(n.halves, 8, tiles // 2, 4, 2).swapaxes(3, 4)
    words = words.reshape(n.halves, 8, tiles, 4)[:, row, :, column].transpose(1, 2, 0).reshape(-1, 32)
    asking = [Number(x[row]) for x in own.reshape(n.halves, 8)] if asked else None
    turning = [Number(inv_freq[i + 2 * column + j]) for i in range(0, dim // 2, 8) for j in (0, 1)] if turned else None
    state = [[warp.float_number(x)] * n.halves * many for x, many in ((0.0, 2 * tiles), (-np.inf, 1), (0.0, 1))]
    for _ in range(2):
        state = attention_step.attend_step(
            n, SCALE, biased, [warp.number(x) for x in places], [Number(x) for x in words], asking, turning, None, *state
        )
    sums, maximum, total = (np.stack([x.each for x in numbers]).reshape(n.halves, -1, 8, 4) for numbers in state)
    total, maximum = total.sum(-1).reshape(-1, 1), maximum[..., :1].reshape(-1, 1)
    out = sums.reshape(n.halves, tiles, 2, 8, 4).transpose(0, 3, 1, 4, 2)
    out = (out if kind is None else out.reshape(n.halves, 8, tiles // 2, 2, 4, 2).transpose(0, 1, 2, 4, 5, 3)).reshape(
        rows, dim
    )
    got = out / np.where(total > 0, total, 1), (maximum + np.log2(total / 2))[:, 0] / LOG2_E
    close(got, want, "bfloat16")


@pytest.mark.parametrize(
    ("kind", "page", "away", "sinks"), [(None, 1, "both", 5), ("int8", 8, "values", 0), (None, 3, "one", 8)]
)
def test_a_warp_copies_rows_from_where_they_are(kind, page, away, sinks, monkeypatch):
    """Host memory has other bits where a row has a copy on the device, and so has the ring where there is none."""
    warp, rng, every, newest = Warp(1 << 16), np.random.default_rng(page), np.arange(64), np.asarray([64, 45], np.int32)
    for module, name in itertools.product((threads, warps), (x for x in dir(Warp) if x[0] != "_")):
        monkeypatch.setattr(module, name, getattr(warp, name), raising=False)
    monkeypatch.setattr(steps.plgpu, "inline_mgpu", lambda **_: lambda run: functools.partial(run, None))
    monkeypatch.setattr(steps, "arith", types.SimpleNamespace(select=Number.select))
    monkeypatch.setattr(gather_kernel, "attend", lambda *args, **_: args[3])
    n = Sizes(heads=2, group=4, dim=64, slots=64, dtype=jnp.dtype("bfloat16"), shared=1 << 16, kind=kind)
    monkeypatch.setattr(Sizes, "place", lambda n, _, stage: stage * n.stage)
    both = rng.integers(0, 255, (2, 2, 2, 64, 64), np.uint8 if kind else np.uint16)
    both[1] = both[int(away != "one")]
    host = np.concatenate(both, 3) if away == "both" else both[1].copy()
    host[np.broadcast_to(((every < sinks) | (every >= newest[:, None] - 16))[:, None], host.shape[:3])] = 255
    stored = [
        x if i < (away == "values") else np.asarray(near(x, newest, sinks + 16, sinks, 255)) for i, x in enumerate(both)
    ]
    listed = np.argsort(rng.random((2, 2, 64 // page)))[..., : 40 // page].astype(np.int32)
    mask = (rng.random(listed.shape) < 0.7) & ((listed + 1) * page <= newest[:, None, None])
    rows = Rows(host=host, newest=newest, sinks=sinks)
    lists = gather_kernel.gather_attention(both[0], *stored, listed, mask, scale=1, page_size=page, rows=rows)
    fetch, copy, _ = steps.copier(n, lists, False)
    for b, h, start in itertools.product(range(2), range(2), range(0, 48, ENTRIES)):
        count, scalars = lists.entries(lists.operands, b, h)
        given, stage = [Number(np.int64(x)) for x in (start, *scalars)], start // ENTRIES % 2
        copy((stored, (), (), (host,)), None, fetch(lists.operands, given), given, Number(2 * b + h), Number(stage))
        warp.meet_warp()
        ring, entry = warp.memory[stage * n.stage :][: n.stage], start + np.arange(ENTRIES)
        item = np.minimum(entry, count - 1) // page
        slot, seen = listed[b, h, item] * page + entry % page, mask[b, h, item] & (entry < count)
        assert (ring[n.tags :][: 4 * ENTRIES].view(np.int32) == np.where(seen, slot, -1)).all()
        found = ring[: n.tags].reshape(2, ENTRIES, n.pitch)[..., : n.width].view(both.dtype)
        assert (found[:, seen] == both[:, b, h, slot[seen]]).all()


def test_programs_of_all_lists_run_at_once():
    shares = {(8, 32): (8, 1), (8, 2048): (2, 8), (64, 512): (2, 1), (128, 32): (1, 1), (2000, 9): (1, 1), (1, 1): (1, 1)}
    with assume_machine("gpu", (9, 0)):
        for (lists, blocks), expected in shares.items():
            assert default_programs(lists, blocks) == expected
        for lists in range(1, 140):
            splits, clusters = default_programs(lists, 500)
            assert lists * clusters <= max(ROOM[splits - 1], lists) and splits * clusters * lists > 66
    with assume_machine("gpu", (8, 0)):
        assert default_programs(8, 500) == (1, 13)


def test_it_runs_where_pallas_has_no_triton_and_says_where_it_cannot(monkeypatch):
    monkeypatch.setattr(dispatch, "why_missing", lambda module: "gone" if module == PALLAS_TRITON else None)
    wide, listed = {"D": 128, "S": 64}, {"D": 128, "S": 64, "K": 8}
    with assume_machine("gpu", (9, 0)):
        assert choose("dense_decode", **wide) == choose("gather_attention", **listed) == NAME
        for name, sizes, words in (
            ("dense_decode", wide | {"dtype": "float32"}, "dtypes"),
            ("dense_decode", wide | {"kind": "int4"}, "codes"),
            ("dense_decode", wide | {"D": 80}, "head_dim 64, 128 or 256"),
            ("dense_decode", wide | {"G": 13, "T": 5}, "at most 64"),
            ("dense_decode", wide | {"kind": "int8", "mass": True}, "mass"),
            ("gather_attention", listed | {"rotate": True, "kind": "int8"}, "place"),
            ("gather_attention", listed | {"K": 0}, "empty list"),
        ):
            with pytest.raises(NotImplementedError, match=words):
                choose(name, implementation=NAME, **sizes)
    with assume_machine("gpu", (8, 9)):
        assert choose("dense_decode", **wide) == NAME
        with pytest.raises(NotImplementedError, match="shared memory"):
            choose("dense_decode", implementation=NAME, **wide | {"D": 256})
    with assume_machine("gpu", (7, 5)), pytest.raises(NotImplementedError, match="compute capability"):
        choose("dense_decode", implementation=NAME, **wide)


@ON_HOPPER
@pytest.mark.parametrize("programs", [None, (1, 1), (2, 3), (3, 1), (8, 2)])
@pytest.mark.parametrize(
    ("group", "dim", "slots", "dtype"),
    [(3, 64, 75, "bfloat16"), (4, 128, 3000, "bfloat16"), (8, 256, 600, "float16"), (64, 128, 1, "bfloat16")],
)
def test_dense_decode_equals_float64(group, dim, slots, dtype, programs):
    """Hidden slots are NaN, and so is memory that an earlier array left; of one row all slots are hidden."""
    arrays, rest, seen = dense.cache(slots, group, dim, slots, dtype)
    jnp.full((1 << 24,), jnp.nan).delete()
    got = compiled(dense_kernel.dense_decode, scale=SCALE, programs=programs)(*arrays, **rest)
    assert got[0].dtype == dtype
    close(got, softmax_attention(*arrays, seen[:, :, None])[:2], "bfloat16")
    assert not np.any(got[0][1]) and np.all(got[1][1] == -np.inf)


@ON_HOPPER
@pytest.mark.parametrize("slots", [75, 2000])
def test_a_gap_and_what_is_beside(slots):
    """Where nothing is beside, its output is NaN; slots of the gap hold no token."""
    (query, key, value), rest, seen = queries.cache(4, 3, 5, 128, slots, "bfloat16")
    gap, slot = np.asarray([[[16, 64], [5, 75]], [[0, 0], [slots // 4, slots // 2]]], np.int32), np.arange(slots)
    empty = (slot >= gap[..., :1]) & (slot < gap[..., 1:])
    rest["position"], seen = jnp.where(empty, -1, rest["position"]), seen & ~empty[:, :, None, None]
    rng = np.random.default_rng(1)
    out, lse = rng.normal(size=query.shape).astype(np.float32), rng.normal(size=query.shape[:4]) * 3
    lse[0, 0, 1:], lse[1, :, :, :2] = -np.inf, -np.inf
    out[lse == -np.inf] = np.nan
    beside = jnp.asarray(out, "bfloat16"), jnp.asarray(lse, jnp.float32)
    want = joined(beside, *queries.oracle(query, key, value, seen))
    for parts in (False, True):
        got = compiled(DENSE, parts=parts)(query, key, value, **rest, gap=jnp.asarray(gap), partials=beside)
        got = merge_partials(*(jnp.moveaxis(x, 2, 0) for x in got)) if parts else got
        close(got, want, "bfloat16")


@ON_HOPPER
@pytest.mark.parametrize(
    ("group", "length", "dim", "slots"), [(3, 5, 64, 75), (4, 6, 128, 3000), (8, 8, 128, 33), (1, 1, 128, 65)]
)
def test_several_queries_equal_float64(group, length, dim, slots):
    arrays, rest, seen = queries.cache(slots + 1, group, length, dim, slots, "bfloat16")
    close(compiled(DENSE)(*arrays, **rest), queries.oracle(*arrays, seen), "bfloat16")


@ON_HOPPER
@pytest.mark.parametrize("programs", [None, (1, 1), (5, 3), (8, 1)])
@pytest.mark.parametrize(
    ("group", "dim", "listed", "biased"), [(3, 64, 37, True), (4, 128, 700, False), (8, 128, 64, True), (5, 256, 5, False)]
)
def test_lists_equal_float64(group, dim, listed, biased, programs):
    """One list is empty, what is not listed is NaN, and masked slots are anything."""
    *args, bias = gather.lists(group, group, dim, listed, "bfloat16", slots=max(96, listed))
    want = gather.gather_oracle(*args, bias if biased else None)[:2]
    args[3] = jnp.where(args[4], args[3], 2**31 - 1)
    run = compiled(gather_kernel.gather_attention, scale=SCALE, programs=programs)
    got = run(*args, bias=bias if biased else None)
    close(got, want, "bfloat16")
    assert not np.any(got[0][0, 1]) and np.all(got[1][0, 1] == -np.inf)


@ON_HOPPER
@pytest.mark.parametrize("positioned", [True, False])
@pytest.mark.parametrize(("page", "shared"), [(8, False), (16, True), (10, False), (1, True)])
def test_pages_equal_float64(page, shared, positioned):
    args, position, seen = gather.pages(page, page, shared, dim=128)
    args[:3] = (x.astype("bfloat16") for x in args[:3])
    if not positioned:  # then all slots of a page hold tokens
        args[1:3] = (jnp.nan_to_num(x) for x in args[1:3])
        seen = np.zeros_like(seen)
        for r, h in np.ndindex(seen.shape[:2]):
            for p, used in zip(args[3][r, h % args[3].shape[1]], args[4][r, h % args[3].shape[1]]):
                seen[r, h, p * page : (p + 1) * page] |= bool(used)
    got = compiled(GATHER, page_size=page)(*args, position=position if positioned else None)
    close(got, softmax_attention(*args[:3], seen[:, :, None])[:2], "bfloat16")


@ON_HOPPER
def test_parts_beside_a_list():
    query, key, value, slots, mask, _ = gather.lists(3, dim=128, dtype="bfloat16")
    whole = gather.gather_oracle(query, key, value, slots, mask)[:2]
    out, lse = gather.gather_oracle(query, key, value, slots[..., 20:], mask[..., 20:])[:2]
    out = jnp.asarray(np.stack([out, np.full_like(out, np.nan)], axis=2), jnp.float32)
    lse = jnp.asarray(np.stack([lse, np.full_like(lse, -np.inf)], axis=2), jnp.float32)
    close(compiled(GATHER)(query, key, value, slots[..., :20], mask[..., :20], partials=(out, lse)), whole, "bfloat16")


@ON_HOPPER
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("group", "dim", "slots", "dtype"), [(3, 64, 333, "bfloat16"), (4, 128, 900, "bfloat16"), (8, 256, 336, "float16")]
)
def test_codes_equal_float64(kind, group, dim, slots, dtype):
    """What is not listed, or holds no token, has scales of NaN, and codes too, where a code can be NaN."""
    (query, key, value), rest, seen = dense.cache(group, group, dim, slots, dtype)
    stored = [quantise(x, kind) for x in (key, value)]
    want = softmax_attention(query, *(np.asarray(dequantise(x), np.float64) for x in stored), seen[:, :, None])[:2]
    close(compiled(DENSE)(query, *stored, **rest), want, "bfloat16")
    query, key, value, slots, mask, _ = gather.lists(group, group, dim, 200, dtype, slots=slots)
    stored = [quantise(x, kind) for x in (key, value)]
    want = gather.gather_oracle(query, *(dequantise(x) for x in stored), slots, mask)[:2]
    close(compiled(GATHER)(query, *stored, slots, mask), want, "bfloat16")


@ON_HOPPER
def test_mass_rotations_and_places_equal_plain_jax():
    rng = np.random.default_rng(5)
    arrays, rest, _ = dense.cache(5, 4, 128, 700, "bfloat16")
    inv_freq, origin = jnp.asarray(10.0 ** rng.uniform(-4, 0, 64), jnp.float32), jnp.asarray([[3, 90]] * 3, jnp.int32)
    turned = {"rotation": Rotation(inv_freq, origin, 40)}
    for options in ({"mass": True}, turned, turned | {"mass": True}):
        close(
            *(jax.jit(functools.partial(DENSE, implementation=x, **options))(*arrays, **rest) for x in (NAME, "xla")),
            "bfloat16",
        )
    query, key, value, slots, mask, _ = gather.lists(2, 4, 128, 64, "bfloat16")
    place = jnp.asarray(rng.integers(0, 10**5, slots.shape), jnp.int32)
    args = query, key, value, slots, mask
    got, want = (compiled(GATHER, implementation=x)(*args, place=place, inv_freq=inv_freq) for x in (NAME, "xla"))
    close(got, want, "bfloat16")


@ON_HOPPER
def test_queries_limits_and_lists_are_mapped():
    (query, key, value), rest, _ = dense.cache(9, 4, 128, 500, "bfloat16")
    limits = [rest["limit"], rest["limit"] // 3, rest["limit"] * 0 + 499]
    one_by_one(
        lambda q, end: DENSE(q, key, value, position=rest["position"], limit=end),
        *((query * (i + 1), x) for i, x in enumerate(limits)),
    )
    *args, _ = gather.lists(2, 4, 128, 64, "bfloat16")
    one_by_one(
        lambda slots, mask: GATHER(*args[:3], slots, mask), *((args[3], jnp.roll(args[4], i, -1) & args[4]) for i in range(3))
    )


@ON_HOPPER
@pytest.mark.parametrize("page", [1, 3])
def test_lists_whose_first_or_last_blocks_are_masked(page):
    query, key, value, *_ = gather.lists(8, dim=128, slots=1500, dtype="bfloat16")
    key, value = (jnp.nan_to_num(x) for x in (key, value))
    items, rng = 1000 // page, np.random.default_rng(8)
    chosen = np.stack([np.argsort(rng.random(1500 // page))[:items] for _ in range(4)]).reshape(2, 2, items).astype(np.int32)
    slots, number = (chosen[..., None] * page + np.arange(page)).reshape(2, 2, -1), np.arange(items)
    run = compiled(GATHER, page_size=page)
    for mask in (number < 0, number < 17, number == items - 1, number > items // 2, (number > 70) & (number < 200)):
        mask = np.broadcast_to(mask, chosen.shape)
        want = gather.gather_oracle(query, key, value, slots, np.repeat(mask, page, axis=2))[:2]
        close(run(query, key, value, jnp.asarray(chosen), jnp.asarray(mask)), want, "bfloat16")
