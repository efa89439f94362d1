"""Operations that read and write codes of 8 and 4 bits, against the numbers that the codes stand for."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.dense_decode import Rotation, dense_decode
from pallas_kernels.attend.dense_decode import code_kernel as dense_codes
from pallas_kernels.attend.dense_decode import pallas_triton as dense_kernel
from pallas_kernels.attend.gather_attention import code_kernel, gather_attention
from pallas_kernels.formats.quantised import Quantised, quantise, whole
from pallas_kernels.host import Rows
from pallas_kernels.machine import assume_machine
from pallas_kernels.store.store_token import store_token
from tests.pallas_kernels import cases
from tests.pallas_kernels.test_quantised import levels_of, normal, numbers_of

FLOAT8 = "float8_e4m3fn"
KINDS = {  # of keys and of values: the codes, whether vectors are mixed, and whether groups of channels have scales
    "int8": [("int8", False, False)] * 2,
    "float8": [(FLOAT8, False, False)] * 2,
    "int4": [("int4", False, False)] * 2,
    "mixed 8": [("int8", True, False), ("int4", True, False)],
    "mixed 4": [("int4", True, False)] * 2,
    "k8v4": [("int8", True, False), ("int4", True, True)],
    "grouped": [("int4", False, False), ("int4", False, True)],
}
CONFIG = dense_kernel.Config(block=16, splits=2)
DENSE = cases.implementations("dense_decode", config=CONFIG)
GATHER = cases.implementations("gather_attention", config=CONFIG)
ROTATED, EVICT = cases.implementations("rotated_rows"), cases.implementations("evict_token")
INV_FREQ = jnp.asarray(10.0 ** -np.arange(16), jnp.float32)
coded, numbers = jax.jit(quantise, static_argnums=(1, 2, 3)), jax.jit(whole)


def bodies(*rows, quick=()):
    """Parameters ``name`` and those of each case: interpreted kernels run the ``quick`` cases, others run thoroughly."""
    made = []
    for name, marks in map(cases.name_and_marks, cases.NAMES):
        for case in rows:
            first = name == "pallas_triton" or (name == "interpreted" and case[0] in quick)
            made.append(pytest.param(name, *case, marks=[*marks, *([] if first else [pytest.mark.thorough])]))
    return made


@functools.cache
def stored(kind, slots, dim, dtype="bfloat16", rows=2):
    """A key and a value as codes, and their float64 numbers; channels of values differ in size."""
    drawn = np.random.default_rng(3).normal(size=(2, rows, 2, slots, dim))
    drawn[1] *= np.exp(np.sin(np.arange(dim)) - 1)
    pair = [coded(jnp.asarray(x, jnp.float32), *how) for x, how in zip(drawn, KINDS[kind], strict=True)]
    return [dataclasses.replace(x, of=dtype) for x in pair], [numbers_of(x) for x in pair]


def largest(x: Quantised):
    """The bytes of the largest codes."""
    return {"int4": 0x77, "int8": 127}.get(x.kind, 448.0)


def soiled(x: Quantised, empty) -> Quantised:
    """Scales of NaN and the largest codes where ``empty``."""
    empty = jnp.asarray(empty)
    codes = jnp.where(empty[..., None], jnp.asarray(largest(x), x.codes.dtype), x.codes)
    return dataclasses.replace(x, codes=codes, scale=jnp.where(empty[..., None] if x.grouped else empty, jnp.nan, x.scale))


def holes(seed, *shape):
    return np.where(np.random.default_rng(seed).random(shape) < 0.3, -1, 7).astype(np.int32)


DECODED = [
    ("int8", "float32", 3, 32), ("float8", "bfloat16", 3, 32), ("k8v4", "bfloat16", 3, 64), ("int8", "bfloat16", 16, 64),
    ("int4", "bfloat16", 1, 16), ("k8v4", "float32", 3, 32), ("k8v4", "bfloat16", 12, 128), ("grouped", "bfloat16", 17, 256),
    ("mixed 4", "bfloat16", 1, 64),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "dtype", "group", "dim"), bodies(*DECODED, quick=("int8", "float8")))
def test_dense_decode_equals_float64(name, kind, dtype, group, dim):
    slots, query = 37, jnp.asarray(np.random.default_rng(2).normal(size=(2, 2, group, dim)), dtype)
    pair, exact = stored(kind, slots, dim, dtype)
    assert dense_codes.takes(query, *pair) == (dtype == "bfloat16" and dim >= 32)
    position, limit = holes(5, 2, 2, slots), np.asarray([slots, 20], np.int32)
    seen = (position >= 0) & (np.arange(slots) < limit[:, None, None])
    run = cases.compiled(DENSE[name], scale=cases.SCALE, mass=True)
    *got, mass = run(query, *(soiled(x, ~seen) for x in pair), position=jnp.asarray(position), limit=jnp.asarray(limit))
    *want, weight = cases.softmax_attention(query, *exact, seen[:, :, None])
    cases.close(got, want, dtype)
    # The query is rounded to codes too, where it is bfloat16 and keys are int8.
    np.testing.assert_allclose(mass, weight.sum(axis=2), rtol=0.05, atol=0.01)
    assert not np.any(np.asarray(mass)[~seen])


@pytest.mark.parametrize(("name", "kind"), bodies(("int8",), ("float8",), ("mixed 8",), ("k8v4",), quick=("int8", "mixed 8")))
def test_dense_decode_joined_to_what_is_beside(name, kind):
    """Of one row the slots are empty, and of one head both are; where nothing is beside, its output is NaN."""
    rows, heads, group, slots, dim = 2, 2, 5, 37, 64
    query, (pair, exact) = normal(2, rows, heads, group, dim, dtype="bfloat16"), stored(kind, slots, dim)
    rng = np.random.default_rng(5)
    out, lse = rng.normal(size=(rows, heads, group, dim)), 3 * rng.normal(size=(rows, heads, group)).astype(np.float32)
    lse[0, 0], lse[1, 1, 2:] = -np.inf, -np.inf
    partials = jnp.asarray(np.where((lse == -np.inf)[..., None], np.nan, out), "bfloat16"), jnp.asarray(lse)
    gap, limit = jnp.asarray([[[16, 33], [0, 0]], [[0, 37], [9, 9]]], jnp.int32), jnp.asarray([slots, 0], jnp.int32)
    position = np.zeros((rows, heads, slots), np.int32)
    position[0, 0, 16:33], position[1, 0] = -1, -1
    seen = (position >= 0) & (np.arange(slots) < np.asarray(limit)[:, None, None])
    rest = {"position": jnp.asarray(position), "limit": limit, "partials": partials, "gap": gap}
    got = cases.compiled(DENSE[name], scale=cases.SCALE)(query, *pair, **rest)
    cases.close(got, cases.joined(partials, *cases.softmax_attention(query, *exact, seen[:, :, None])[:2]), "bfloat16")
    assert not np.any(got[0][1, 1, 2:]) and np.all(got[1][1, 1, 2:] == -np.inf)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.NAMES[1:])
@pytest.mark.parametrize(("kind", "allowed"), [("int8", 2.0**-15), ("float8", 1e-6), ("int4", 2.0**-15)])
def test_a_query_is_multiplied_exactly_or_in_two_digits(name, kind, allowed):
    """The logit of one slot, which is its lse, whatever the size of the query and of the largest of its numbers."""
    query = np.random.default_rng(7).normal(size=(3, 1, 4, 64)) * np.asarray([1e-6, 1.0, 1e6])[:, None, None, None]
    query[:, :, 1, 9] *= 100
    query[:, :, 2] = 0
    query = jnp.asarray(query, "bfloat16")
    pair, exact = ([jax.tree.map(lambda x: x[:, :1], y) for y in x] for x in stored(kind, 16, 64, rows=3))
    position = jnp.full((3, 1, 16), -1, jnp.int32).at[:, :, 5].set(5)
    _, lse = cases.compiled(DENSE[name], scale=cases.SCALE)(
        query, *pair, position=position, limit=jnp.full((3,), 16, jnp.int32)
    )
    query, key = np.asarray(query, np.float64), exact[0][:, :, 5]
    size = np.abs(query).max(-1) * np.abs(key).sum(-1)[..., None]
    assert np.all(np.abs(lse - cases.SCALE * (query @ key[..., None])[..., 0]) <= cases.SCALE * allowed * size)


GATHERED = [
    ("mixed 4", "bfloat16", 3, 64, 1), ("k8v4", "bfloat16", 3, 64, 10), ("int8", "float32", 3, 32, 4),
    ("int8", "bfloat16", 3, 32, 1), ("float8", "bfloat16", 8, 64, 1), ("int4", "bfloat16", 12, 64, 10),
    ("mixed 8", "bfloat16", 17, 256, 1), ("grouped", "bfloat16", 1, 64, 4), ("k8v4", "float32", 3, 32, 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "dtype", "group", "dim", "page"), bodies(*GATHERED, quick=("mixed 4", "k8v4")))
def test_gather_attention_equals_float64(name, kind, dtype, group, dim, page):
    """Lists of pages with empty slots; lists of slots with a bias, logits, and a part beside the list."""
    slots, rng = 96, np.random.default_rng(6)
    query = jnp.asarray(rng.normal(size=(2, 2, group, dim)), dtype)
    pair, exact = stored(kind, slots, dim, dtype)
    assert code_kernel.takes(query, *pair, None, None) == (dtype == "bfloat16")
    items = np.argsort(rng.random((2, 2, -(-slots // page))), axis=-1)[..., : 37 if page == 1 else 6].astype(np.int32)
    items[..., 0] = np.where((items == slots // page).any(-1), items[..., 0], (slots - 1) // page)  # the end may cut it
    mask = rng.random(items.shape) < 0.7
    mask[0, 1] = False  # an empty list
    token = items[..., None] * page + np.arange(page)
    held = (mask[..., None] & (token < slots)).reshape(2, 2, -1)
    token = np.minimum(token, slots - 1).reshape(2, 2, -1)
    position = holes(2, 2, 2, slots) if page > 1 else None
    held &= True if position is None else np.take_along_axis(position, token, 2) >= 0
    seen = np.zeros((2, 2, slots), bool)
    for at in np.ndindex(2, 2):
        seen[at][token[at][held[at]]] = True
    bias, rest, fixed = 0.0, {}, {"scale": cases.SCALE, "page_size": page, "logits": page == 1}
    if page > 1:
        rest["position"] = jnp.asarray(position)
    else:
        bias = rng.normal(size=(2, 2, group, items.shape[2])).astype(np.float32)
        bias[1, 0, -1] = -np.inf
        beside = (rng.normal(size=(2, 2, 1, group, dim)[:n]).astype(np.float32) for n in (5, 4))
        rest = {"bias": jnp.asarray(bias), "partials": tuple(map(jnp.asarray, beside))}
    lists = jnp.asarray(np.where(mask, items, 2**30)), jnp.asarray(mask)
    out, lse, *logits = cases.compiled(GATHER[name], **fixed)(query, *(soiled(x, ~seen) for x in pair), *lists, **rest)
    keys, values = (np.take_along_axis(x, token[..., None], 2) for x in exact)
    want = cases.softmax_attention(query, keys, values, held[:, :, None], bias)[:2]
    cases.close((out, lse), want if page > 1 else cases.joined([x[:, :, 0] for x in rest["partials"]], *want), dtype)
    if page > 1:
        assert not np.any(out[0, 1]) and np.all(lse[0, 1] == -np.inf)
    else:
        wanted = cases.SCALE * np.asarray(query, np.float64) @ keys.swapaxes(2, 3) + bias
        cases.close(logits[0], np.where(held[:, :, None], wanted, -np.inf), dtype)


@pytest.mark.parametrize("kind", ["int8", "mixed 8"])
def test_keys_rotated_when_read_are_dequantised_before(kind):
    query, (pair, exact) = normal(3, 2, 2, 3, 32), stored(kind, 40, 32, "float32")
    plain = [jnp.asarray(x, jnp.float32) for x in exact]
    slots = jnp.asarray(np.random.default_rng(6).integers(0, 40, (2, 2, 9)), jnp.int32)
    listed = {"slots": slots, "mask": jnp.ones(slots.shape, bool), "place": slots, "inv_freq": INV_FREQ}
    position = jnp.broadcast_to(jnp.arange(40, dtype=jnp.int32), (2, 2, 40))
    rotation = Rotation(INV_FREQ, jnp.asarray([[0, 9], [0, 5]], jnp.int32), 4)
    dense = {"position": position, "limit": jnp.asarray([40, 9], jnp.int32), "rotation": rotation}
    for run, rest in ((gather_attention, listed), (dense_decode, dense)):
        run = jax.jit(functools.partial(run, **rest, scale=cases.SCALE))
        cases.close(run(query, *pair), run(query, *plain), "float32")


HOSTED = [("int8", 8, False), ("int8", 1, True), ("float8", 1, False), ("k8v4", 1, False), ("int4", 8, False)]


@pytest.mark.parametrize(
    ("name", "kind", "page", "values_only"),
    bodies(*HOSTED, quick=("k8v4",)) + [pytest.param(cases.MOSAIC, *x, marks=cases.ON_HOPPER) for x in HOSTED[:3]],
)
def test_gather_attention_of_rows_in_host_memory(name, kind, page, values_only):
    """The numbers of a resident cache, whose codes are where they are read: elsewhere are the largest ones."""
    (dim, dtype), slots, sinks, ring = (64, "bfloat16") if name == cases.MOSAIC else (32, "float32"), 64, 4, 16
    query, (pair, _) = normal(2, 2, 2, 3, dim).astype(dtype), stored(kind, slots, dim, dtype)
    rng, newest, every = np.random.default_rng(6), np.asarray([slots, 45], np.int32), np.arange(slots)
    held = np.broadcast_to(every < newest[:, None, None], (2, 2, slots))
    pair = [soiled(x, ~held) for x in pair]
    listed = np.argsort(rng.random((2, 2, slots // page)), axis=-1)[..., : 40 // page].astype(np.int32)
    mask = jnp.asarray((rng.random(listed.shape) < 0.8) & (listed * page < newest[:, None, None]))
    fixed, arguments = {"scale": cases.SCALE, "page_size": page}, (jnp.asarray(listed), mask)
    rest = {"position": jnp.asarray(np.where(held, every, -1), jnp.int32)} if page > 1 else {}
    run = cases.compiled((GATHER | cases.on_hopper(gather_attention))[name], **fixed)
    want = run(query, *pair, *arguments, **rest)
    hosted = np.concatenate([np.asarray(x.codes) for x in pair[values_only:]], axis=3)
    fill = np.asarray(largest(pair[1]), hosted.dtype)
    copied = (every < sinks) | (every >= newest[:, None] - ring)
    hosted = np.where(copied[:, None, :, None] | ~held[..., None], fill, hosted)
    few = [dataclasses.replace(x, codes=cases.near(x.codes, newest, sinks + ring, sinks, fill)) for x in pair]
    few[0] = pair[0] if values_only else few[0]
    rows = Rows(host=jax.device_put(hosted, jax.memory.Space.Host), newest=jnp.asarray(newest), sinks=sinks)
    cases.alike(run(query, *few, *arguments, rows=rows, **rest), want)


def test_rows_of_another_kind_are_refused():
    key = quantise(normal(1, 1, 1, 8, 16), "int8")
    short = Quantised(codes=key.codes[:, :, :4], scale=key.scale, of=key.of)
    host, lists = jnp.zeros((1, 1, 8, 32), jnp.int8), (jnp.zeros((1, 1, 2), jnp.int32), jnp.ones((1, 1, 2), bool))
    few = dataclasses.replace(short, scale=key.scale[:, :, :4])
    for x, rows, told in ((short, host.astype(jnp.float32), r"\['float32', 'int8'\]"), (few, host, r"scales .* 4\)")):
        given = Rows(host=rows, newest=jnp.full((1,), 8, jnp.int32), sinks=0)
        with pytest.raises(ValueError, match=f"rows.host of .*{told}"):
            gather_attention(normal(2, 1, 1, 1, 16), x, x, *lists, scale=cases.SCALE, rows=given)
    one = jnp.zeros((1, 1, 16)), jnp.zeros((1, 1, 16)), jnp.zeros((1,), jnp.int32)
    held = {"cache_position": jnp.zeros((1, 1, 8), jnp.int32), "cursor": jnp.zeros((1,), jnp.int32)}
    with pytest.raises(ValueError, match="cache_key.scale"):
        store_token(*one, cache_key=few, cache_value=short, **held, rows=Rows(host=host, newest=held["cursor"], sinks=0))


def store(name, *args, **rest):
    """`store_token` of an implementation, as a tuple."""
    made = cases.implementations("store_token")[name](*args, **rest)
    return made.key, made.value, made.position, made.cursor, made.query


@pytest.mark.parametrize(
    ("name", "kind", "rotating"), bodies(*((x, True) for x in KINDS), ("int8", False), ("k8v4", False), quick=("k8v4",))
)
def test_stored_tokens_are_quantised(name, kind, rotating):
    """A row has no token, and one is full."""
    rows, heads, slots, dim = 3, 2, 6, 32
    new, query = [normal(i, rows, heads, dim, large=20) for i in (1, 2)], normal(3, rows, heads, 2, dim)
    place, cursor = jnp.asarray([5, -1, 7], jnp.int32), jnp.asarray([2, 3, slots], jnp.int32)
    held = {"cache_position": jnp.zeros((rows, heads, slots), jnp.int32), "cursor": cursor}
    held |= {"query": query if rotating else None, "inv_freq": INV_FREQ if rotating else None}
    pair, _ = stored(kind, slots, dim, "float32", rows)
    old = dict(zip(("cache_key", "cache_value"), pair, strict=True))
    got = cases.compiled(functools.partial(store, name))(*new, place, **old, **held)
    want = cases.compiled(functools.partial(store, "xla"))(*new, place, **{x: numbers(old[x]) for x in old}, **held)
    for made, exact, before, how in zip(got[:2], want[:2], pair, KINDS[kind], strict=True):
        exact = coded(exact[0, :, 2], *how)
        np.testing.assert_array_equal(made.scale[0, :, 2], exact.scale)
        # One step, where the numbers differ in their last bit.
        np.testing.assert_allclose(levels_of(made)[0, :, 2], levels_of(exact), rtol=0.13, atol=1)
        kept = np.ones((rows, slots), bool)
        kept[0, 2] = False
        for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(before), strict=True):
            np.testing.assert_array_equal(np.asarray(a).swapaxes(1, 2)[kept], np.asarray(b).swapaxes(1, 2)[kept])
    cases.alike(got[2:], want[2:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), bodies(*((x,) for x in KINDS), quick=("int8",)))
def test_codes_go_to_copies_and_scales_to_slots(name, kind):
    """Of an offloaded cache: codes go to the row of the slot's copy, scales to the slot. Keys may all be there."""
    rows, heads, slots, dim, sinks, size = 4, 2, 24, 32, 2, 7
    new = normal(1, rows, heads, dim), normal(2, rows, heads, dim)
    place, cursor = jnp.asarray([1, -1, 24, 17], jnp.int32), jnp.asarray([1, 9, slots, 17], jnp.int32)
    pair, _ = stored(kind, slots, dim, "float32", rows)
    held = {"cache_position": jnp.zeros((rows, heads, slots), jnp.int32), "cursor": cursor, "query": None, "inv_freq": None}
    run = cases.compiled(functools.partial(store, name))
    want = run(*new, place, cache_key=pair[0], cache_value=pair[1], **held)
    few = dataclasses.replace(pair[1], codes=pair[1].codes[:, :, :size])  # all keys are on the device
    hosted = Rows(host=jnp.zeros((rows, heads, slots, pair[1].codes.shape[3]), few.codes.dtype), newest=cursor, sinks=sinks)
    got = run(*new, place, cache_key=pair[0], cache_value=few, **held, rows=hosted)
    cases.alike(jax.tree.leaves((got[0], got[1].scale, got[2:4])), jax.tree.leaves((want[0], want[1].scale, want[2:4])))
    expected = np.array(few.codes)
    for row, slot in ((0, 1), (3, 17)):  # the others store nothing
        expected[row, :, slot if slot < sinks else sinks + (slot - sinks) % (size - sinks)] = want[1].codes[row, :, slot]
    np.testing.assert_array_equal(got[1].codes, expected)
    assert not np.array_equal(expected, few.codes)


@pytest.mark.parametrize(("name", "kind"), bodies(*((x,) for x in KINDS if x != "int4"), quick=()))
def test_rotated_rows_and_eviction_equal_those_of_the_numbers(name, kind):
    """In every bit: codes are dequantised before they are rotated, and move with their scales."""
    pair, _ = stored(kind, 30, 32)
    token = jnp.asarray(np.random.default_rng(6).integers(0, 30, (2, 21)), jnp.int32)
    if not any(x.packed for x in pair) or name == "xla":  # its check refuses packed codes
        run = cases.compiled(ROTATED[name])
        cases.alike(run(*pair, token, INV_FREQ), run(*map(numbers, pair), token, INV_FREQ))
    position = jnp.broadcast_to(jnp.arange(30, dtype=jnp.int32), (2, 2, 30))
    rest = position, jnp.asarray([30, 3], jnp.int32), normal(5, 2, 2, 30)
    got = cases.compiled(EVICT[name], budget=5)(*pair, *rest)
    cases.alike([*map(numbers, got[:2]), *got[2:]], cases.compiled(EVICT["xla"], budget=5)(*map(numbers, pair), *rest))


def test_other_calls_run_the_kernel_that_casts_codes():
    (key, value), _ = stored("mixed 8", 96, 64)
    query, items = jnp.zeros((2, 2, 3, 64), "bfloat16"), jnp.zeros((2, 2, 9), jnp.int32)
    assert code_kernel.takes(query, key, value, None, None)
    assert not code_kernel.takes(query.astype("float32"), key, value, None, None)
    assert not code_kernel.takes(query, key, value, items, None)
    assert not code_kernel.takes(query, key, value, None, Rows(host=items, newest=items, sinks=0))
    narrow = Quantised(codes=value.codes[..., :16], scale=value.scale, of="bfloat16", packed=True)
    assert not code_kernel.takes(query[..., :32], key, narrow, None, None)
    odd = [dataclasses.replace(x, codes=x.codes[:1, :1, :95], scale=x.scale[:1, :1, :95]) for x in (key, value)]
    assert not code_kernel.takes(query[:1, :1], *odd, None, None)  # scales are read in pairs


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mixing_takes_no_launch_beside_the_kernel(dtype):
    pair, _ = stored("mixed 8", 96, 64, dtype)
    query, items = jnp.zeros((2, 2, 3, 64), dtype), jnp.zeros((2, 2, 9), jnp.int32)
    with assume_machine("gpu", (9, 0)):
        traced = jax.make_jaxpr(functools.partial(gather_attention, scale=cases.SCALE))(query, *pair, items, items > 0)
    names = [x.primitive.name for x in _equations(traced.jaxpr)]
    assert names.count("pallas_call") == 1
    assert names.count("dot_general") == (0 if dtype == "bfloat16" else 2)


def _equations(jaxpr):
    """The equations outside of kernels."""
    for equation in jaxpr.eqns:
        yield equation
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if inner is not None and equation.primitive.name != "pallas_call":
            yield from _equations(inner.jaxpr)
