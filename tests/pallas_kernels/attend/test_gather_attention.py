"""`gather_attention` against float64 NumPy: lists of slots and pages, shared lists, bias, keys rotated when read.

The Pallas kernel runs interpreted here and compiled where there is a GPU, with the same parameters.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.rope import rotate
from pallas_kernels._triton.rotate import cosine_sine
from pallas_kernels.attend.gather_attention import gather_attention, jax_triton, pallas_triton
from pallas_kernels.attend.gather_attention.reference import rotate_rows
from pallas_kernels.host import Rows
from tests.pallas_kernels import cases

CONFIG = pallas_triton.Config(block=16, splits=2)  # several steps and splits in a list of 37 slots
GATHER = cases.implementations("gather_attention", config=CONFIG)


def lists(seed, group=3, dim=32, listed=37, dtype="float32", rows=2, heads=2, slots=96):
    """Random query, cache, lists of different slots and mask; every row not listed and visible is NaN."""
    rng = np.random.default_rng(seed)
    query, key, value = (rng.normal(size=(rows, heads, n, dim)).astype(np.float32) for n in (group, slots, slots))
    chosen = np.argsort(rng.random((rows, heads, slots)), axis=-1)[..., :listed].astype(np.int32)
    mask = rng.random(chosen.shape) < 0.7
    mask[0, 1] = False  # an empty list
    used = np.zeros((rows, heads, slots), bool)
    for r, h in np.ndindex(rows, heads):
        used[r, h, chosen[r, h][mask[r, h]]] = True
    key[~used], value[~used] = np.nan, np.nan
    bias = rng.normal(size=mask.shape).astype(np.float32)
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    return query, key, value, jnp.asarray(chosen), jnp.asarray(mask), jnp.asarray(bias)


def gather_oracle(query, key, value, slots, mask, bias=None):
    """Float64 output, lse and logits."""
    keys, values = (np.take_along_axis(np.asarray(x, np.float64), np.asarray(slots)[..., None], 2) for x in (key, value))
    bias, mask = 0.0 if bias is None else np.asarray(bias, np.float64)[:, :, None], np.asarray(mask)[:, :, None]
    logits = cases.SCALE * np.asarray(query, np.float64) @ np.nan_to_num(keys).swapaxes(2, 3) + bias
    return *cases.softmax_attention(query, keys, values, mask, bias)[:2], np.where(mask, logits, -np.inf)


@cases.every_body_and_dtype
@pytest.mark.parametrize(
    ("group", "dim", "listed", "biased"),
    cases.one_shape((3, 32, 37, True), (1, 64, 37, False), (4, 64, 37, True), (8, 128, 64, False), (3, 128, 5, True)),
)
def test_attention_and_logits_equal_float64(name, dtype, group, dim, listed, biased):
    *args, bias = lists(group, group, dim, listed, dtype)
    bias = bias if biased else None
    run = cases.compiled(GATHER[name], scale=cases.SCALE, logits=True)
    got = out, lse, _ = run(*args, bias=bias)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    cases.close(got, gather_oracle(*args, bias), dtype)
    assert not np.any(out[0, 1]) and np.all(lse[0, 1] == -np.inf)
    cases.alike(got, run(*args, bias=bias))


@cases.every_kernel  # plain JAX: tests/kvjax/methods/test_retroinfer.py
def test_parts_beside_the_list_join(name):
    """The second half of each list as two parts beside the first: one of them is empty, and a row has nothing at all."""
    query, key, value, slots, mask, _ = lists(3)
    whole = gather_oracle(query, key, value, slots, mask)[:2]
    rest = out, lse = gather_oracle(query, key, value, slots[..., 20:], mask[..., 20:])[:2]
    out = jnp.asarray(np.stack([out, np.full_like(out, np.nan)], axis=2), jnp.float32)
    lse = jnp.asarray(np.stack([lse, np.full_like(lse, -np.inf)], axis=2), jnp.float32)
    run = cases.compiled(GATHER[name], scale=cases.SCALE)
    for many, want in ((20, whole), (0, rest)):  # an empty list has no kernel
        got = run(query, key, value, slots[..., :many], mask[..., :many], partials=(out, lse))
        cases.close(got, want, "float32")


@cases.every_kernel  # plain JAX: tests/kvjax/test_scan.py
def test_query_heads_with_slots_of_their_own(name):
    """A bias for each query head: -inf where it does not attend, in whole blocks and in whole lists too."""
    *args, bias = lists(5, group=3)
    rng = np.random.default_rng(0)
    apart = np.where(rng.random((2, 2, 3, 37)) < 0.5, np.asarray(bias)[:, :, None], -np.inf).astype(np.float32)
    apart[0, 0, 1, :16], apart[1, 1, 2] = -np.inf, -np.inf
    query, key, value, slots, mask = args
    out, lse = cases.compiled(GATHER[name], scale=cases.SCALE)(*args, bias=jnp.asarray(apart))
    for g in range(3):
        own = mask & (apart[:, :, g] > -np.inf)
        expected = gather_oracle(query[:, :, g : g + 1], key, value, slots, own, bias)
        cases.close(out[:, :, g : g + 1], expected[0], "float32")
        cases.close(lse[:, :, g : g + 1], expected[1], "float32")
    assert not np.any(out[1, 1, 2]) and lse[1, 1, 2] == -np.inf


@cases.every_body
def test_masked_slots_may_hold_anything(name):
    query, key, value, slots, mask, _ = lists(3)
    run = cases.compiled(GATHER[name], scale=cases.SCALE)
    want = gather_oracle(query, key, value, slots, mask)[:2]
    for anything in (slots, -(2**31), 2**31 - 1):
        cases.close(run(query, key, value, np.where(mask, slots, anything), mask), want, "float32")


def pages(seed, page, shared, listed=5, heads=2, slots=90, rows=2, dim=32, group=3):
    """Query, a cache with holes, page lists (the last page is cut by the end of the cache) and mask; the rest is NaN."""
    rng = np.random.default_rng(seed)
    query, key, value = (rng.normal(size=(rows, heads, n, dim)).astype(np.float32) for n in (group, slots, slots))
    total = -(-slots // page)
    number = np.argsort(rng.random((rows, 1 if shared else heads, total)), axis=-1)[..., : min(listed, total)]
    number[..., 0] = np.where((number == total - 1).any(-1), number[..., 0], total - 1)
    mask = rng.random(number.shape) < 0.8
    mask[0, 0, :2] = [True, False]
    position = np.where(rng.random((rows, heads, slots)) < 0.8, np.arange(slots), -1).astype(np.int32)
    seen = np.zeros(position.shape, bool)
    for r, h in np.ndindex(rows, heads):
        for p, used in zip(number[r, h % number.shape[1]], mask[r, h % number.shape[1]]):
            seen[r, h, p * page : (p + 1) * page] |= used
    seen &= position >= 0
    key[~seen], value[~seen] = np.nan, np.nan
    number = np.where(mask, number, 2**30).astype(np.int32)
    return [jnp.asarray(x) for x in (query, key, value, number, mask)], jnp.asarray(position), seen


@cases.every_body
@pytest.mark.parametrize(
    ("page", "shared"), [(8, False), (16, True), *(pytest.param(*x, marks=cases.thorough) for x in ((64, True), (10, False)))]
)
def test_lists_of_pages_equal_float64(name, page, shared):
    args, position, seen = pages(page, page, shared)
    got = cases.compiled(GATHER[name], scale=cases.SCALE, page_size=page)(*args, position=position)
    cases.close(got, cases.softmax_attention(*args[:3], seen[:, :, None])[:2], "float32")


@cases.every_body
def test_one_list_for_all_heads(name):
    query, key, value, slots, mask, bias = lists(4)
    key, value = np.nan_to_num(key), np.nan_to_num(value)
    one = [x[:, :1] for x in (slots, mask, bias)]
    every = [jnp.broadcast_to(x, slots.shape) for x in one]
    run = cases.compiled(GATHER[name], scale=cases.SCALE)
    shared = run(query, key, value, *one[:2], bias=one[2])
    cases.alike(shared, run(query, key, value, *every[:2], bias=every[2]))


@cases.every_body_and_dtype
def test_keys_rotated_when_read(name, dtype):
    query, key, value, slots, mask, _ = lists(6, dtype=dtype)
    rng = np.random.default_rng(0)
    place = jnp.asarray(rng.integers(0, 5000, slots.shape), jnp.int32)
    inv_freq = jnp.asarray(1 / 10000 ** (np.arange(0, 32, 2) / 32), jnp.float32)
    at = np.zeros(key.shape[:3])
    np.put_along_axis(at, np.asarray(slots), np.asarray(place), 2)
    first, second = np.split(np.asarray(key, np.float64), 2, axis=-1)
    rotated_keys = (first + 1j * second) * np.exp(1j * at[..., None] * np.asarray(inv_freq, np.float64))
    expected = gather_oracle(query, np.concatenate([rotated_keys.real, rotated_keys.imag], -1), value, slots, mask)[:2]
    out, lse = cases.compiled(GATHER[name], scale=cases.SCALE)(query, key, value, slots, mask, place=place, inv_freq=inv_freq)
    # An angle of 5000 radians in float32 is 2e-4 radians off.
    tolerance = {"float32": 1e-3, "bfloat16": 3e-2}[dtype]
    cases.alike((out, lse), expected, rtol=tolerance, atol=tolerance)


def test_rotation_is_the_one_of_the_methods():
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(2, 3, 5, 16)), jnp.bfloat16)
    place = jnp.asarray(rng.integers(0, 1000, (2, 3, 5)), jnp.int32)
    inv_freq = jnp.asarray(1 / 100 ** (np.arange(8) / 8), jnp.float32)
    np.testing.assert_array_equal(rotate_rows(rows, place, inv_freq), rotate(rows, place, inv_freq))


@pytest.mark.parametrize("most", [1, 10, 1e3, 1e5, 1.5e6])
def test_cosine_and_sine_of_large_angles(most):
    angle = np.random.default_rng(0).uniform(-most, most, 10000).astype(np.float32)
    for run in (cosine_sine, jax.jit(cosine_sine)):
        cos, sin = run(jnp.asarray(angle))
        np.testing.assert_allclose(cos, np.cos(np.float64(angle)), atol=4e-7, rtol=0)
        np.testing.assert_allclose(sin, np.sin(np.float64(angle)), atol=4e-7, rtol=0)


@cases.every_body
def test_an_empty_list_gives_zeros(name):
    query, key, value, slots, mask, _ = lists(1)
    run = cases.compiled(GATHER[name], scale=cases.SCALE, logits=True)
    out, lse, logits = run(query, key, value, slots[..., :0], mask[..., :0])
    assert out.shape == query.shape and not np.any(out) and np.all(lse == -np.inf) and logits.shape == (*query.shape[:3], 0)
    with pytest.raises(NotImplementedError, match="at least one entry"):
        jax_triton.check(query, key, value, slots[..., :0], mask[..., :0])


@cases.every_kernel
@pytest.mark.parametrize("page", [1, pytest.param(3, marks=cases.thorough)])
def test_a_program_reads_until_the_last_entry_of_its_blocks(name, page):
    # Two programs of up to four blocks for each list, of which one, two or none end early.
    query, key, value, *_ = lists(8, slots=150)
    key, value = np.nan_to_num(key), np.nan_to_num(value)
    items, rng = 100 // page, np.random.default_rng(8)
    small = {**GATHER, "pallas_triton": functools.partial(pallas_triton.gather_attention, config=CONFIG)}
    run = cases.compiled(small[name], scale=cases.SCALE, page_size=page)
    own = [np.argsort(rng.random(150 // page))[:items] for _ in range(4)]
    chosen = np.stack(own).reshape(2, 2, items).astype(np.int32)
    slots = (chosen[..., None] * page + np.arange(page)).reshape(2, 2, -1)
    number = np.arange(items)
    fronts = [number < count for count in (0, 1, 16 // page, 17 // page, 33 // page, 64 // page, items - 1, items)]
    others = [*(number == at for at in (0, 40 // page, items - 1)), (number > 20 // page) & (number < 50 // page)]
    for mask in fronts + others:
        mask = np.broadcast_to(mask, chosen.shape)
        out, lse = run(query, key, value, jnp.asarray(chosen), jnp.asarray(mask))
        expected = gather_oracle(query, key, value, slots, np.repeat(mask, page, axis=2))
        cases.close((out, lse), expected[:2], "float32")


def test_default_config_gives_every_program_work():
    for number, listed in [(1, 1), (8, 2048), (8, 0), (512, 4096), (8, 65), (8, 33 * 64), (600, 4096)]:
        config = pallas_triton.default_config(number, listed)
        steps = -(-listed // (config.block * config.splits))
        assert config.splits == 1 or config.block * steps * (config.splits - 1) < listed
    assert pallas_triton.default_config(8, 2048).splits == 32
    assert pallas_triton.default_config(128, 2048).splits == 4  # all programs run at once


@pytest.mark.slow
@pytest.mark.parametrize("name", [*cases.NAMES, pytest.param(cases.MOSAIC, marks=cases.ON_HOPPER)])
@pytest.mark.parametrize("values_only", [False, True])
@pytest.mark.parametrize(("sinks", "recent", "page"), cases.one_shape((16, 32, 8), (8, 24, 1), (0, 16, 1), (5, 91, 1)))
def test_rows_in_host_memory_equal_resident_rows(name, values_only, sinks, recent, page):
    """The numbers of a resident cache: a row with a copy is read on the device, and every other row in host memory."""
    query, key, value, slots, mask, _ = lists(
        9, slots=96, **({"dim": 128, "dtype": "bfloat16"} if name == cases.MOSAIC else {})
    )
    key, value = np.nan_to_num(key), np.nan_to_num(value)
    every, newest = np.arange(96), np.asarray([96, 61], np.int32)  # a ring that is full, and one that has begun again
    mask = np.asarray(mask & (slots < newest[:, None, None]))
    static, arrays = {"scale": cases.SCALE, "page_size": page}, {}
    if page > 1:
        slots, mask = slots[..., :5] % (96 // page), mask[..., :5]
        held = np.broadcast_to(every < newest[:, None, None], key.shape[:3])
        arrays["position"] = np.where(held, every, -1).astype(np.int32)
    run = cases.compiled((GATHER | cases.on_hopper(gather_attention))[name], **static)
    expected = run(query, key, value, slots, mask, **arrays)
    copies = [cases.near(x, newest, sinks + recent, sinks) for x in (key, value)]
    hosted = [value] if values_only else [key, value]
    copies[0] = key if values_only else copies[0]
    hosted = np.concatenate(hosted, axis=3)
    for b, end in enumerate(newest):
        hosted[b, :, (every < sinks) | (every >= end - recent)] = np.nan
    rows = Rows(host=jax.device_put(hosted, jax.memory.Space.Host), newest=jnp.asarray(newest), sinks=sinks)
    cases.alike(run(query, *copies, slots, mask, rows=rows, **arrays), expected)


def test_host_rows_are_checked():
    query, key, value, slots, mask, _ = lists(9, slots=96)
    host, newest = jnp.concatenate([key, value], axis=3), jnp.asarray([96, 96], jnp.int32)
    near = key[:, :, :32]
    for rows, message in (
        (Rows(host=host, newest=newest, sinks=32), "sinks=32"),
        (Rows(host=host[..., :50], newest=newest, sinks=0), r"host \(2, 2, 96, 50\)"),
    ):
        with pytest.raises(ValueError, match=message):
            gather_attention(query, near, near, slots, mask, scale=cases.SCALE, rows=rows)
