"""`dense_decode` against float64 NumPy; kernels run interpreted here, that for GPUs compiled on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.dense_decode import Rotation, pallas_tpu, pallas_triton
from pallas_kernels.numerics import merge_partials
from tests.pallas_kernels import cases

CONFIG = pallas_triton.Config(block=16, splits=3)
DENSE = cases.implementations("dense_decode", config=CONFIG) | {
    "interpreted_tpu": cases.implementations("dense_decode", "pallas_tpu", config=pallas_tpu.Config(block=128))["interpreted"]
}


def cache(seed, group=3, dim=32, slots=75, dtype="float32", rows=3, heads=2, holes=0.3):
    """Random query, cache and limits; every slot that must not enter is NaN, held or not."""
    rng = np.random.default_rng(seed)
    query, key, value = (rng.normal(size=(rows, heads, n, dim)).astype(np.float32) for n in (group, slots, slots))
    position = np.argsort(rng.random((rows, heads, slots)), axis=-1).astype(np.int32)
    position[rng.random(position.shape) < holes] = -1
    limit = np.asarray([slots, 0, slots // 2 + 1][:rows], np.int32)
    seen = (position >= 0) & (np.arange(slots) < limit[:, None, None])
    key[~seen], value[~seen] = np.nan, np.nan
    arrays = [jnp.asarray(x, dtype) for x in (query, key, value)]
    return arrays, {"position": jnp.asarray(position), "limit": jnp.asarray(limit)}, seen


@cases.in_dtypes(cases.every_body_and_tpu)
@pytest.mark.parametrize(
    ("group", "dim", "slots"),
    cases.one_shape((3, 32, 75), (1, 64, 75), (4, 128, 64), (3, 32, 17), (8, 64, 130), (4, 128, 300), (1, 128, 128)),
)
def test_attention_and_what_each_slot_receives_equal_float64(name, dtype, group, dim, slots):
    """Blocks of 16 do not divide 75 slots, so the last one begins early; of one row all slots are hidden."""
    arrays, rest, seen = cache(slots, group, dim, slots, dtype)
    run = cases.compiled(DENSE[name], scale=cases.SCALE, mass=True)
    got = out, lse, mass = run(*arrays, **rest)
    assert out.dtype == dtype and lse.dtype == mass.dtype == jnp.float32
    *expected, weight = cases.softmax_attention(*arrays, seen[:, :, None])
    cases.close(got, (*expected, weight.sum(axis=2)), dtype)
    assert not np.any(out[1]) and np.all(lse[1] == -np.inf) and not np.any(np.asarray(mass)[~seen])
    cases.alike(got, run(*arrays, **rest))


@cases.every_body_and_dtype
@pytest.mark.parametrize(
    ("width", "dim", "slots", "splits"),
    cases.one_shape((80, 32, 75, 3), (16, 64, 40, 1), (112, 128, 100, 5), (64, 32, 16, 2), (240, 256, 33, 2)),
)
def test_keys_of_another_width_joined_to_what_is_beside(name, dtype, width, dim, slots, splits):
    """Where nothing is beside, its output is NaN; of one row the slots are empty, and of one head both are."""
    (query, key, value), rest, seen = cache(slots, 3, max(width, dim), slots, dtype)
    query, key, value = query[..., :width], key[..., :width], value[..., :dim]
    rng = np.random.default_rng(slots)
    out, lse = rng.normal(size=(*query.shape[:3], dim)).astype(np.float32), rng.normal(size=query.shape[:3]) * 3
    lse[0, 1], lse[1, 0, 1:], lse[2, 1, 0] = -np.inf, -np.inf, -np.inf
    out[lse == -np.inf] = np.nan
    partials = jnp.asarray(out, dtype), jnp.asarray(lse, jnp.float32)
    config = pallas_triton.Config(block=16, splits=splits)
    run = cases.compiled(cases.implementations("dense_decode", config=config)[name], scale=cases.SCALE)
    got = run(query, key, value, **rest, partials=partials)
    alone = cases.softmax_attention(query, key, value, seen[:, :, None])[:2]
    assert got[0].shape == (*query.shape[:3], dim) and got[0].dtype == dtype and got[1].dtype == jnp.float32
    cases.close(got, cases.joined(partials, *alone), dtype)
    assert not np.any(got[0][1, 0, 1:]) and np.all(got[1][1, 0, 1:] == -np.inf)


@cases.every_body
def test_a_gap_changes_nothing_and_is_not_read(name):
    """Gaps of whole blocks, of a part of one, of none, and up to the end of the cache."""
    arrays, rest, _ = cache(6, heads=3, holes=0)
    gap = np.asarray([[[16, 64], [5, 75], [0, 0]], [[0, 75], [3, 9], [30, 31]], [[0, 17], [20, 50], [75, 75]]], np.int32)
    slot, first, stop = np.arange(75), gap[..., :1], gap[..., 1:]
    rest["position"] = jnp.where((slot >= first) & (slot < stop), -1, rest["position"])
    run = cases.compiled(DENSE[name], scale=cases.SCALE)
    want = cases.compiled(DENSE["xla"], scale=cases.SCALE)(*arrays, **rest)
    if name == "interpreted":  # in blocks of 16 that are not read, positions say that there are tokens
        block = slot // 16 * 16
        unread = (block >= first) & (block + 16 <= np.minimum(stop, np.asarray(rest["limit"])[:, None, None]))
        assert unread.sum() > 100
        rest["position"] = jnp.where(unread, 1, rest["position"])
    cases.alike(run(*arrays, **rest, gap=jnp.asarray(gap)), want, rtol=1e-5, atol=1e-5)


@cases.every_body
def test_parts_join_to_the_whole(name):
    arrays, rest, _ = cache(4)
    out, lse = cases.compiled(DENSE[name], scale=cases.SCALE, parts=True)(*arrays, **rest)
    assert out.dtype == lse.dtype == jnp.float32 and out.shape[2] == (3 if name == "interpreted" else lse.shape[2])
    whole = jax.jit(merge_partials)(np.moveaxis(out, 2, 0), np.moveaxis(lse, 2, 0))
    cases.alike(cases.compiled(DENSE["xla"], scale=cases.SCALE)(*arrays, **rest), whole, rtol=1e-5, atol=1e-5)


@cases.every_body_and_dtype
@pytest.mark.parametrize(("group", "dim", "slots"), cases.one_shape((3, 32, 75), (4, 128, 300)))
def test_keys_rotated_when_read_equal_complex_numbers(name, dtype, group, dim, slots):
    """Against complex numbers in float64; in one row all tokens are before the position, in another none is."""
    (query, key, value), rest, seen = cache(7, group, dim, slots, dtype)
    later = jnp.asarray([0, 0, 40], jnp.int32)[:, None, None]
    position = jnp.where(rest["position"] >= 0, rest["position"] + later, -1)
    origin = np.asarray([[7, 90], [5, 70], [3, 2000]], np.int32)
    inv_freq = 1 / 10000 ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    rotation = Rotation(jnp.asarray(inv_freq), jnp.asarray(origin), 40)
    run = DENSE[name]
    got = jax.jit(lambda *x: run(*x[:3], position=x[3], limit=x[4], rotation=Rotation(x[5], x[6], 40), scale=cases.SCALE))(
        query, key, value, position, rest["limit"], *rotation[:2]
    )
    at = np.asarray(position, np.int64)
    place = at - np.where(at < 40, origin[:, :1, None], origin[:, 1:, None])
    first, second = np.split(np.nan_to_num(np.asarray(key, np.float64)), 2, axis=-1)
    turned = (first + 1j * second) * np.exp(1j * place[..., None] * np.float64(inv_freq))
    want = cases.softmax_attention(query, np.concatenate([turned.real, turned.imag], -1), value, seen[:, :, None])
    tolerance = {"float32": 1e-3, "bfloat16": 3e-2}[dtype]  # an angle of 2000 radians in float32 is 1e-4 off
    cases.alike(got, want[:2], rtol=tolerance, atol=tolerance)


def test_a_rotation_of_another_width():
    arrays, rest, _ = cache(5)
    with pytest.raises(ValueError, match="rotation.inv_freq"):
        DENSE["xla"](*arrays, **rest, scale=cases.SCALE, rotation=Rotation(jnp.ones(8), jnp.zeros((3, 2), jnp.int32), 4))


def test_parts_have_no_mass():
    arrays, rest, _ = cache(5)
    with pytest.raises(ValueError, match="parts and mass"):
        DENSE["xla"](*arrays, **rest, scale=cases.SCALE, parts=True, mass=True)


@cases.every_body_and_thorough_tpu
def test_a_limit_beyond_the_cache_or_below_zero_is_clipped(name):
    arrays, rest, _ = cache(1)
    run = functools.partial(cases.compiled(DENSE[name], scale=cases.SCALE), *arrays, position=rest["position"])
    plain = run(limit=rest["limit"])
    cases.alike(plain, run(limit=jnp.asarray([2**31 - 1, -(2**31), 38], jnp.int32)))
