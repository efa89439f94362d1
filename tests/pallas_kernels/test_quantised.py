"""Codes of 8 bits: how they are made, and the operations that read and write them, against the numbers they stand for."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense_decode import DENSE_DECODE, dense_decode
from pallas_kernels.dense_decode import pallas_triton as dense_kernel
from pallas_kernels.evict_token import evict_token
from pallas_kernels.evict_token import pallas_triton as evict_kernel
from pallas_kernels.formats.quantised import MOST, Quantised, dequantise, quantise, whole
from pallas_kernels.gather_attention import gather_attention
from pallas_kernels.gather_attention import pallas_triton as gather_kernel
from pallas_kernels.machine import assume_machine
from pallas_kernels.store_token import pallas_triton as store_kernel
from pallas_kernels.store_token import store_token
from tests.pallas_kernels.cases import NAMES, SCALE, close, compiled, implementations, softmax_attention

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
DENSE = implementations(dense_decode, functools.partial(dense_kernel.dense_decode, config=CONFIG, interpret=True))
GATHER = implementations(
    gather_attention,
    lambda *args, page_size=1, **rest: gather_kernel.gather_attention(
        *args, page_size=page_size, config=CONFIG, interpret=True, **rest
    ),
)
EVICT = implementations(evict_token, functools.partial(evict_kernel.evict_token, interpret=True))


def store(name, *args, **rest):
    """`store_token` of an implementation, as a tuple."""
    if name == "interpreted":
        return store_kernel.store_token(*args, **rest, interpret=True)
    made = store_token(*args, **rest, implementation=name)
    return made.key, made.value, made.position, made.cursor, made.query


def normal(seed, *shape, dtype="float32"):
    """Random numbers; vectors differ much in length."""
    rng = np.random.default_rng(seed)
    size = np.exp(rng.normal(size=(*shape[:-1], 1)))
    return jnp.asarray(rng.normal(size=shape) * size, dtype)


def soiled(x: Quantised, empty) -> Quantised:
    """Scales of NaN and the largest codes where ``empty``."""
    codes = jnp.where(empty[..., None], jnp.asarray(MOST[x.kind], x.codes.dtype), x.codes)
    return Quantised(codes=codes, scale=jnp.where(empty, jnp.nan, x.scale), of=x.of)


@every_kind
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_a_number_reads_back_within_half_a_step(kind, size):
    x = normal(1, 50, 16) * size
    made = jax.jit(quantise, static_argnums=1)(x, kind)
    assert made.codes.dtype == kind and made.scale.dtype == jnp.bfloat16
    largest = np.abs(x).max(axis=1, keepdims=True)
    # A scale is rounded up by 2^-7 at most. A step of float8 is an eighth of a number's power of two.
    step = largest / 127 if kind == "int8" else np.maximum(np.abs(x) / 8, largest / 448 / 512)
    assert np.all(np.abs(dequantise(made) - x) <= step * (0.5 * (1 + 2.0**-7) + 1e-5))


@every_kind
def test_what_no_code_can_hold(kind):
    """Zeros stay zeros, a number larger than any code is not clipped, and a NaN is not hidden."""
    rows = jnp.asarray([[0.0, 0.0], [1e38, -1.0], [jnp.nan, 1.0]])
    zero, large, bad = np.asarray(dequantise(quantise(rows, kind)))
    assert not zero.any() and abs(large[0] / 1e38 - 1) < 0.04 and np.isnan(bad).all()


@bodies(("interpreted", "int8"))
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.thorough)])
def test_dense_decode(name, kind, dtype):
    rows, heads, group, slots, dim = 2, 2, 3, 37, 32
    query = normal(2, rows, heads, group, dim, dtype=dtype)
    key, value = (quantise(normal(seed, rows, heads, slots, dim, dtype=dtype), kind) for seed in (3, 4))
    rng = np.random.default_rng(5)
    position = np.where(rng.random((rows, heads, slots)) < 0.3, -1, 7).astype(np.int32)
    limit = np.asarray([slots, 20], np.int32)
    seen = (position >= 0) & (np.arange(slots) < limit[:, None, None])
    out, lse = compiled(DENSE[name], scale=SCALE)(
        query, soiled(key, ~seen), soiled(value, ~seen), position=jnp.asarray(position), limit=jnp.asarray(limit)
    )
    numbers = (np.asarray(whole(x), np.float32) for x in (key, value))
    every = np.broadcast_to(seen[:, :, None], (rows, heads, group, slots))
    expected = softmax_attention(np.asarray(query, np.float32), *numbers, every)
    close(out, expected[0], dtype)
    close(lse, expected[1], dtype)


@bodies()
@pytest.mark.parametrize("how", ["pages", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("slots", "rotated"))])
def test_gather_attention(name, kind, how):
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
    for a, b in zip(got, want, strict=True):
        close(a, b, "float32")


@bodies()
@pytest.mark.parametrize("rotating", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_store_token(name, kind, rotating):
    rows, heads, group, slots, dim = 3, 2, 2, 6, 16
    key, value, query = normal(1, rows, heads, dim), normal(2, rows, heads, dim), normal(3, rows, heads, group, dim)
    place, cursor = jnp.asarray([5, -1, 7], jnp.int32), jnp.asarray([2, 3, slots], jnp.int32)  # none, and a full row
    old = {x: quantise(normal(i, rows, heads, slots, dim), kind) for i, x in enumerate(("cache_key", "cache_value"))}
    rest = {
        "cache_position": jnp.zeros((rows, heads, slots), jnp.int32),
        "cursor": cursor,
        "query": query if rotating else None,
        "inv_freq": jnp.asarray(10.0 ** -np.arange(dim // 2), jnp.float32) if rotating else None,
    }
    got = compiled(functools.partial(store, name))(key, value, place, **old, **rest)
    want = store("xla", key, value, place, **{x: whole(old[x]) for x in old}, **rest)
    for made, numbers, before in zip(got[:2], want[:2], old.values(), strict=True):
        exact = quantise(numbers[0, :, 2], kind)
        np.testing.assert_array_equal(made.scale[0, :, 2], exact.scale)
        codes = (np.asarray(x, np.float32) for x in (made.codes[0, :, 2], exact.codes))
        np.testing.assert_allclose(*codes, rtol=0.13, atol=1)  # one step, where the numbers differ in their last bit
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
    for a, b in zip(got[2:], want[2:], strict=True):
        np.testing.assert_array_equal(a, b)


def test_which_gpus_read_codes():
    shape = jax.ShapeDtypeStruct
    query, position, limit = shape((1, 2, 4, 64), "bfloat16"), shape((1, 2, 32), "int32"), shape((1,), "int32")

    def taken(kind, implementation=None):
        codes = Quantised(codes=shape((1, 2, 32, 64), kind), scale=shape((1, 2, 32), "bfloat16"), of="bfloat16")
        rest = {"position": position, "limit": limit, "scale": SCALE, "implementation": implementation}
        return DENSE_DECODE.resolve(query, codes, codes, **rest)

    with assume_machine("gpu", (8, 0)):
        assert (taken("int8"), taken("float8_e4m3fn")) == ("pallas_triton", "xla")
        with pytest.raises(NotImplementedError, match="got int8 codes, expected bfloat16"):
            taken("int8", "cudnn")
    with assume_machine("gpu", (9, 0)):
        assert taken("float8_e4m3fn") == "pallas_triton"
