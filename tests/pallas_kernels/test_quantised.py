"""Codes of 8 and 4 bits: how they are made, and operations that read and write them, against the numbers they stand for."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.dense_decode import DENSE_DECODE, dense_decode
from pallas_kernels.attend.dense_decode import pallas_triton as dense_kernel
from pallas_kernels.attend.gather_attention import GATHER_ATTENTION, gather_attention
from pallas_kernels.formats.quantised import MOST, Quantised, dequantise, pack, quantise, unpack, whole
from pallas_kernels.host import Rows
from pallas_kernels.machine import assume_machine
from pallas_kernels.store.evict_token import evict_token
from pallas_kernels.store.evict_token import pallas_triton as evict_kernel
from pallas_kernels.store.store_token import STORE_TOKEN, store_token
from tests.pallas_kernels.cases import NAMES, SCALE, alike, close, compiled, implementations, softmax_attention

every_kind = pytest.mark.parametrize("kind", MOST)


def bodies(*always):
    """Names of implementations and kinds of codes: those on a GPU and ``always`` by default, others thoroughly."""
    made = []
    for body in NAMES:
        name, marks = (body, ()) if isinstance(body, str) else (body.values[0], body.marks)
        for kind in MOST:
            first = name == "pallas_triton" or (name, kind) in always
            made.append(pytest.param(name, kind, marks=[*marks, *([] if first else [pytest.mark.thorough])]))
    return pytest.mark.parametrize(("name", "kind"), made)


CONFIG = dense_kernel.Config(block=16, splits=2)
DENSE = implementations("dense_decode", config=CONFIG)
GATHER = implementations("gather_attention", config=CONFIG)
ROTATED = implementations("rotated_rows")
EVICT = implementations("evict_token")


def store(name, *args, **rest):
    """`store_token` of an implementation, as a tuple."""
    stored = implementations("store_token")[name](*args, **rest)
    return stored.key, stored.value, stored.position, stored.cursor, stored.query


def normal(seed, *shape, dtype="float32"):
    """Random numbers; vectors differ much in length."""
    rng = np.random.default_rng(seed)
    size = np.exp(rng.normal(size=(*shape[:-1], 1)))
    return jnp.asarray(rng.normal(size=shape) * size, dtype)


def soiled(x: Quantised, empty) -> Quantised:
    """Scales of NaN and the largest codes where ``empty``."""
    codes = jnp.where(empty[..., None], largest(x.kind), x.codes)
    return dataclasses.replace(x, codes=codes, scale=jnp.where(empty[..., None] if x.grouped else empty, jnp.nan, x.scale))


def largest(kind):
    """The bytes of the largest codes."""
    most = jnp.asarray(MOST[kind], stored_dtype(kind))
    return pack(most, most) if kind == "int4" else most


def stored_dtype(kind):
    return "int8" if kind == "int4" else kind


def codes_alone(x: Quantised):
    """The codes of `x` as float32, one by one."""
    return np.asarray(jnp.concatenate(unpack(x.codes), axis=-1) if x.packed else x.codes, np.float32)


@every_kind
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_a_number_reads_back_within_half_a_step(kind, size):
    x = normal(1, 50, 16) * size
    made = jax.jit(quantise, static_argnums=1)(x, kind)
    assert made.codes.dtype == stored_dtype(kind) and made.scale.dtype == jnp.bfloat16
    assert (made.kind, made.shape) == (kind, x.shape) and made.codes.shape[1] == (8 if kind == "int4" else 16)
    largest = np.abs(x).max(axis=1, keepdims=True)
    # A scale is rounded up by 2^-7 at most. A step of float8 is an eighth of a number's power of two.
    step = np.maximum(np.abs(x) / 8, largest / 448 / 512) if kind == "float8_e4m3fn" else largest / MOST[kind]
    assert np.all(np.abs(dequantise(made) - x) <= step * (0.5 * (1 + 2.0**-7) + 1e-5))


@every_kind
def test_what_no_code_can_hold(kind):
    """Zeros stay zeros, a number larger than any code is not clipped, and a NaN is not hidden."""
    rows = jnp.asarray([[0.0, 0.0], [1e38, -1.0], [jnp.nan, 1.0]])
    zero, large, bad = np.asarray(dequantise(quantise(rows, kind)))
    assert not zero.any() and abs(large[0] / 1e38 - 1) < 0.04 and np.isnan(bad).all()


@bodies(("interpreted", "int8"), ("interpreted", "float8_e4m3fn"))
@pytest.mark.parametrize(
    ("dtype", "group", "dim"),
    [
        ("float32", 3, 32),
        ("bfloat16", 3, 32),
        *(pytest.param("bfloat16", *x, marks=pytest.mark.thorough) for x in ((16, 64), (1, 16))),
    ],
)
def test_dense_decode_on_codes_equals_dequantised_rows(name, kind, dtype, group, dim):
    """Codes of bfloat16 rows are multiplied as they are, up to 16 query heads and from 32 channels on."""
    rows, heads, slots = 2, 2, 37
    query = normal(2, rows, heads, group, dim, dtype=dtype)
    key, value = (quantise(normal(seed, rows, heads, slots, dim, dtype=dtype), kind) for seed in (3, 4))
    rng = np.random.default_rng(5)
    position = np.where(rng.random((rows, heads, slots)) < 0.3, -1, 7).astype(np.int32)
    limit = np.asarray([slots, 20], np.int32)
    seen = (position >= 0) & (np.arange(slots) < limit[:, None, None])
    out, lse, mass = compiled(DENSE[name], scale=SCALE, mass=True)(
        query, soiled(key, ~seen), soiled(value, ~seen), position=jnp.asarray(position), limit=jnp.asarray(limit)
    )
    expected = softmax_attention(query, whole(key), whole(value), seen[:, :, None])
    close((out, lse), expected[:2], dtype)
    # The query is rounded to codes too, where it is bfloat16 and keys are int8.
    np.testing.assert_allclose(mass, expected[2].sum(axis=2), rtol=0.05, atol=0.01)
    assert not np.any(np.asarray(mass)[~seen])


@bodies(("interpreted", "int8"), ("interpreted", "float8_e4m3fn"))
@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_dense_decode_joined_to_what_is_beside(name, kind, splits):
    """Of one row the slots are empty, and of one head both are; where nothing is beside, its output is NaN."""
    rows, heads, group, slots, dim = 2, 2, 5, 37, 64
    query = normal(2, rows, heads, group, dim, dtype="bfloat16")
    key, value = (quantise(normal(seed, rows, heads, slots, dim, dtype="bfloat16"), kind) for seed in (3, 4))
    out, lse = normal(5, rows, heads, group, dim), np.array(3 * normal(6, rows, heads, group))
    lse[0, 0], lse[1, 1, 2:] = -np.inf, -np.inf
    partials = jnp.where((lse == -np.inf)[..., None], jnp.nan, out).astype("bfloat16"), jnp.asarray(lse)
    rest = {"position": jnp.zeros((rows, heads, slots), jnp.int32), "limit": jnp.asarray([slots, 0], jnp.int32)}
    gap = jnp.asarray([[[16, 33], [0, 0]], [[0, 37], [9, 9]]], jnp.int32)
    rest["position"] = rest["position"].at[0, 0, 16:33].set(-1).at[1, 0].set(-1)
    config = dense_kernel.Config(block=16, splits=splits)
    run = compiled(implementations("dense_decode", config=config)[name], scale=SCALE)
    got = run(query, key, value, **rest, partials=partials, gap=gap)
    want = dense_decode(query, whole(key), whole(value), **rest, partials=partials, scale=SCALE, implementation="xla")
    for a, b in zip(got, want, strict=True):
        close(a, np.asarray(b, np.float64), "bfloat16")
    assert not np.any(got[0][1, 1, 2:]) and np.all(got[1][1, 1, 2:] == -np.inf)


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize(("kind", "allowed"), [("int8", 2.0**-15), ("float8_e4m3fn", 1e-6), ("int4", 2.0**-15)])
def test_a_query_is_multiplied_exactly_or_in_two_digits(name, kind, allowed):
    """The logit of one slot, which is its lse, whatever the size of the query and of the largest of its numbers."""
    rng = np.random.default_rng(7)
    query = rng.normal(size=(3, 1, 4, 64)) * np.asarray([1e-6, 1.0, 1e6])[:, None, None, None]
    query[:, :, 1, 9] *= 100
    query[:, :, 2] = 0
    query = jnp.asarray(query, "bfloat16")
    key, value = (quantise(normal(seed, 3, 1, 16, 64, dtype="bfloat16"), kind) for seed in (3, 4))
    position = jnp.full((3, 1, 16), -1, jnp.int32).at[:, :, 5].set(5)
    _, lse = compiled(DENSE[name], scale=SCALE)(query, key, value, position=position, limit=jnp.full((3,), 16, jnp.int32))
    numbers = codes_alone(key)[:, :, 5].astype(np.float64) * np.asarray(key.scale, np.float64)[:, :, 5:6]
    query = np.asarray(query, np.float64)
    size = np.abs(query).max(-1) * np.abs(numbers).sum(-1)[..., None]
    assert np.all(np.abs(lse - SCALE * (query @ numbers[..., None])[..., 0]) <= SCALE * allowed * size)


@bodies()
@pytest.mark.parametrize("how", ["pages", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("slots", "rotated"))])
def test_gather_attention_on_codes_equals_dequantised_rows(name, kind, how):
    rows, heads, group, slots, dim = 2, 2, 3, 48, 32
    query = normal(2, rows, heads, group, dim)
    key, value = (quantise(normal(seed, rows, heads, slots, dim), kind) for seed in (3, 4))
    rng = np.random.default_rng(6)
    page = 4 if how == "pages" else 1
    listed = jnp.asarray(np.argsort(rng.random((rows, heads, slots // page)), axis=-1)[..., :9], jnp.int32)
    mask = jnp.asarray(rng.random(listed.shape) < 0.7)
    position = jnp.asarray(np.where(rng.random((rows, heads, slots)) < 0.2, -1, 3), jnp.int32)
    fixed, rest = {"scale": SCALE, "page_size": page}, {}
    if how == "pages":
        rest["position"] = position
    if how == "rotated":
        rest = {"place": listed, "inv_freq": jnp.asarray(10.0 ** -np.arange(dim // 2), jnp.float32)}
    numbers = whole(key), whole(value)
    if how == "pages":
        key, value = (soiled(x, position < 0) for x in (key, value))
    got = compiled(GATHER[name], **fixed)(query, key, value, listed, mask, **rest)
    want = gather_attention(query, *numbers, listed, mask, implementation="xla", **fixed, **rest)
    close(got, want, "float32")


@bodies(("interpreted", "int8"))
@pytest.mark.parametrize(
    ("page", "values_only"), [(8, False), *(pytest.param(*x, marks=pytest.mark.thorough) for x in ((1, False), (1, True)))]
)
def test_gather_attention_of_rows_in_host_memory(name, kind, page, values_only):
    """The numbers of a resident cache, whose codes are where they are read: elsewhere are the largest ones."""
    batch, heads, group, slots, dim, sinks, ring = 2, 2, 3, 64, 32, 4, 16
    query = normal(2, batch, heads, group, dim)
    key, value = (quantise(normal(seed, batch, heads, slots, dim), kind) for seed in (3, 4))
    rng = np.random.default_rng(6)
    newest, every = np.asarray([slots, 45], np.int32), np.arange(slots)
    held = np.broadcast_to(every < newest[:, None, None], (batch, heads, slots))
    key, value = (soiled(x, jnp.asarray(~held)) for x in (key, value))
    listed = np.argsort(rng.random((batch, heads, slots // page)), axis=-1)[..., : 40 // page].astype(np.int32)
    mask = jnp.asarray((rng.random(listed.shape) < 0.8) & (listed * page < newest[:, None, None]))
    fixed, rest = {"scale": SCALE, "page_size": page}, {}
    if page > 1:
        rest["position"] = jnp.asarray(np.where(held, every, -1), jnp.int32)
    arguments = jnp.asarray(listed), mask
    want = compiled(GATHER[name], **fixed)(query, key, value, *arguments, **rest)
    partials = np.concatenate([np.asarray(x.codes) for x in ((value,) if values_only else (key, value))], axis=3)
    hosted, copies = partials.copy(), np.full((batch, heads, sinks + ring, partials.shape[3]), largest(kind), partials.dtype)
    for row, end in enumerate(newest):
        for slot in every[:end]:
            if slot < sinks or slot >= end - ring:
                at = slot if slot < sinks else sinks + (slot - sinks) % ring
                copies[row, :, at], hosted[row, :, slot] = partials[row, :, slot], largest(kind)
    width = value.codes.shape[3]
    near = dataclasses.replace(value, codes=jnp.asarray(copies[..., -width:]))
    near_key = key if values_only else dataclasses.replace(key, codes=jnp.asarray(copies[..., :width]))
    hosted = jax.device_put(hosted, jax.memory.Space.Host)
    rows = Rows(host=hosted, newest=jnp.asarray(newest), sinks=sinks)
    got = compiled(GATHER[name], **fixed)(query, near_key, near, *arguments, rows=rows, **rest)
    alike(got, want)


def test_rows_of_another_kind_are_refused():
    key = quantise(normal(1, 1, 1, 8, 16), "int8")
    near = Quantised(codes=key.codes[:, :, :4], scale=key.scale, of=key.of)
    host, lists = jnp.zeros((1, 1, 8, 32), jnp.int8), (jnp.zeros((1, 1, 2), jnp.int32), jnp.ones((1, 1, 2), bool))
    few = dataclasses.replace(near, scale=key.scale[:, :, :4])
    for x, rows, said in ((near, host.astype(jnp.float32), r"\['float32', 'int8'\]"), (few, host, r"scales .* 4\)")):
        given = Rows(host=rows, newest=jnp.full((1,), 8, jnp.int32), sinks=0)
        with pytest.raises(ValueError, match=f"rows.host of .*{said}"):
            gather_attention(normal(2, 1, 1, 1, 16), x, x, *lists, scale=SCALE, rows=given)
    one = jnp.zeros((1, 1, 16)), jnp.zeros((1, 1, 16)), jnp.zeros((1,), jnp.int32)
    held = {"cache_position": jnp.zeros((1, 1, 8), jnp.int32), "cursor": jnp.zeros((1,), jnp.int32)}
    with pytest.raises(ValueError, match="cache_key.scale"):
        store_token(*one, cache_key=few, cache_value=near, **held, rows=Rows(host=host, newest=held["cursor"], sinks=0))


@bodies()
def test_codes_are_dequantised_before_they_are_rotated(name, kind):
    """The result equals the rotation of dequantised rows, in every bit."""
    if kind == "int4" and name != "xla":
        pytest.skip("its check refuses packed codes")
    key, value = (quantise(normal(seed, 2, 2, 30, 16, dtype="bfloat16"), kind) for seed in (3, 4))
    token = jnp.asarray(np.random.default_rng(6).integers(0, 30, (2, 21)), jnp.int32)
    inv_freq = jnp.asarray(10.0 ** -np.arange(8), jnp.float32)
    run = compiled(ROTATED[name])
    for got, want in zip(run(key, value, token, inv_freq), run(whole(key), whole(value), token, inv_freq), strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got, want)


@bodies(("interpreted", "int8"))
def test_codes_go_to_copies_and_scales_to_slots(name, kind):
    """Of an offloaded cache: codes go to the row of the slot's copy, scales to the slot. Keys may all be there."""
    batch, heads, slots, dim, near, sinks = 4, 2, 24, 16, 7, 2
    key, value = normal(1, batch, heads, dim), normal(2, batch, heads, dim)
    place, cursor = jnp.asarray([1, -1, 24, 17], jnp.int32), jnp.asarray([1, 9, slots, 17], jnp.int32)
    full = [quantise(normal(i, batch, heads, slots, dim), kind) for i in (3, 4)]
    rest = {"cache_position": jnp.zeros((batch, heads, slots), jnp.int32), "cursor": cursor, "query": None, "inv_freq": None}
    run = functools.partial(store, name)
    want = compiled(run)(key, value, place, cache_key=full[0], cache_value=full[1], **rest)
    few = dataclasses.replace(full[1], codes=full[1].codes[:, :, :near])  # all keys are on the device
    rows = Rows(host=jnp.zeros((batch, heads, slots, dim), stored_dtype(kind)), newest=cursor, sinks=sinks)
    got = compiled(run)(key, value, place, cache_key=full[0], cache_value=few, **rest, rows=rows)
    alike(jax.tree.leaves((got[0], got[1].scale, got[2:4])), jax.tree.leaves((want[0], want[1].scale, want[2:4])))
    expected = np.array(few.codes)
    for row, slot in ((0, 1), (3, 17)):  # the others store nothing
        expected[row, :, slot if slot < sinks else sinks + (slot - sinks) % (near - sinks)] = want[1].codes[row, :, slot]
    np.testing.assert_array_equal(got[1].codes, expected)
    assert not np.array_equal(expected, few.codes)


@bodies(("interpreted", "int4"))
@pytest.mark.parametrize(
    "rotating, mixed", [(True, True), *(pytest.param(*x, marks=pytest.mark.thorough) for x in ((False, True), (True, False)))]
)
def test_stored_tokens_are_quantised(name, kind, rotating, mixed):
    rows, heads, group, slots, dim = 3, 2, 2, 6, 32 if mixed else 16  # kernels mix no vectors of 16 numbers
    key, value, query = normal(1, rows, heads, dim), normal(2, rows, heads, dim), normal(3, rows, heads, group, dim)
    place, cursor = jnp.asarray([5, -1, 7], jnp.int32), jnp.asarray([2, 3, slots], jnp.int32)  # none, and a full row
    old = {x: quantise(normal(i, rows, heads, slots, dim), kind, mixed) for i, x in enumerate(("cache_key", "cache_value"))}
    rest = {
        "cache_position": jnp.zeros((rows, heads, slots), jnp.int32),
        "cursor": cursor,
        "query": query if rotating else None,
        "inv_freq": jnp.asarray(10.0 ** -np.arange(dim // 2), jnp.float32) if rotating else None,
    }
    got = compiled(functools.partial(store, name))(key, value, place, **old, **rest)
    want = store("xla", key, value, place, **{x: whole(old[x]) for x in old}, **rest)
    for made, numbers, before in zip(got[:2], want[:2], old.values(), strict=True):
        exact = quantise(numbers[0, :, 2], kind, mixed)
        np.testing.assert_array_equal(made.scale[0, :, 2], exact.scale)
        # One step, where the numbers differ in their last bit.
        np.testing.assert_allclose(codes_alone(made)[0, :, 2], codes_alone(exact), rtol=0.13, atol=1)
        changed = np.zeros((rows, heads, slots), bool)
        changed[0, :, 2] = True
        for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(before), strict=True):
            np.testing.assert_array_equal(np.asarray(a)[~changed], np.asarray(b)[~changed])
    for a, b in zip(got[2:], want[2:], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@bodies()
def test_evict_token_moves_codes_and_scales(name, kind):
    rows, heads, slots, dim = 2, 2, 9, 16
    key, value = (quantise(normal(seed, rows, heads, slots, dim), kind) for seed in (3, 4))
    position = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (rows, heads, slots))
    score = normal(5, rows, heads, slots)
    rest = position, jnp.asarray([slots, 3], jnp.int32), score
    got = compiled(EVICT[name], budget=5)(key, value, *rest)
    want = evict_token(whole(key), whole(value), *rest, budget=5, implementation="xla")
    for made, numbers in zip(got[:2], want[:2], strict=True):
        np.testing.assert_array_equal(whole(made), numbers)
    alike(got[2:], want[2:])


def test_gpus_without_float8_read_float8_codes_by_xla():
    shape = jax.ShapeDtypeStruct
    query, position, limit = shape((1, 2, 4, 64), "bfloat16"), shape((1, 2, 32), "int32"), shape((1,), "int32")

    def taken(kind, implementation=None):
        codes = Quantised(codes=shape((1, 2, 32, 64), kind), scale=shape((1, 2, 32), "bfloat16"), of="bfloat16")
        rest = {"position": position, "limit": limit, "scale": SCALE, "implementation": implementation}
        return DENSE_DECODE.resolve(query, codes, codes, **rest)

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

    def codes(slots, held):
        return Quantised(codes=shape((1, 8, held, 128), "int8"), scale=shape((1, 8, slots), "bfloat16"), of="bfloat16")

    def resident(slots):
        store, position = codes(slots, slots), shape((1, 8, slots), "int32")
        cache = {"cache_key": store, "cache_value": store, "cache_position": position, "cursor": one}
        yield DENSE_DECODE.resolve(query, store, store, position=position, limit=one, scale=SCALE)
        yield STORE_TOKEN.resolve(new, new, one, **cache, query=None, inv_freq=None)

    def hosted(slots):
        rows = Rows(host=shape((1, 8, slots, 256), "int8"), newest=one, sinks=4)
        lists = shape((1, 8, 64), "int32"), shape((1, 8, 64), bool)
        yield GATHER_ATTENTION.resolve(query, *[codes(slots, 128)] * 2, *lists, scale=SCALE, rows=rows)

    with assume_machine("gpu", (9, 0)):
        for taken, slots in ((resident, 1 << 21), (hosted, 1 << 20)):
            assert set(taken(slots - 1)) == set(taken(2 * slots + 1)) == {"pallas_triton"}
            assert set(taken(slots)) == set(taken(2 * slots)) == {"xla"}
        many = Quantised(codes=shape((512, 8, 4096, 128), "int8"), scale=shape((512, 8, 4096), "bfloat16"), of="bfloat16")
        with pytest.raises(NotImplementedError, match="got 2147483648 bytes of int8, expected below 2 GiB or above 4 GiB"):
            evict_kernel.check(many, many, shape((512, 8, 4096), "int32"), shape((512,), "int32"), None, budget=5)
