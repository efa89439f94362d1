"""Eviction of the key most alike to the mean direction against NumPy loops; interpreted where there is no GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.quantised import MOST, quantise, whole
from pallas_kernels.store.keydiff.evict_alike import direction_sum
from tests.pallas_kernels.cases import alike, compiled, every_body, every_body_and_dtype, implementations, one_shape

EVICT = implementations("evict_alike")


def case(slots=150, heads=3, dim=32, dtype="float32", seed=0):
    """Rows that are full, one token over budget 12, below it, and without a new token; holes, NaN in them, no order."""
    rng = np.random.default_rng(seed)
    cursor, newest = np.array([slots, 13, 7, 9]), np.array([900, 900, 900, -1])
    position = np.full((4, heads, slots), -1)
    for row, used in enumerate(cursor):
        for head in range(heads):
            position[row, head, :used] = np.append(rng.permutation(used - 1) * 3, 900)
            position[row, head, rng.integers(0, used - 1, 2)] = -1
    key, value = rng.normal(size=(2, 4, heads, slots, dim)) + 0.3
    key[0, 0, 1] = 0  # a key without a direction
    empty = position[..., None] < 0
    stored = [jnp.asarray(np.where(empty, np.nan, x), dtype) for x in (key, value)]
    return (*stored, jnp.asarray(position, jnp.int32), jnp.asarray(cursor, jnp.int32)), jnp.asarray(newest, jnp.int32)


@jax.jit
def sums(key, position, cursor, newest):
    """`direction_sum` before the newest token was stored."""
    last = (jnp.arange(key.shape[2])[None] == cursor[:, None] - 1) & (newest[:, None] >= 0)
    return direction_sum(whole(key), jnp.where(last[:, None], -1, position))


def evict(name, key, value, position, cursor, newest, budget):
    total, done = sums(key, position, cursor, newest), np.zeros(cursor.shape, np.int32)
    return compiled(EVICT[name])(key, value, position, cursor, total, done, newest=newest, budget=budget)


def directions(key, position):
    """Float64 unit vectors, 0 of empty slots."""
    exact = np.where(np.asarray(position)[..., None] < 0, 0, np.asarray(key, np.float64))
    return exact / np.maximum(np.linalg.norm(exact, axis=-1, keepdims=True), 1e-8)


def numbers(total, slots):
    """What a `direction_sum` of a cache of ``slots`` slots stands for, in float64."""
    one = 2.0 ** (30 - slots.bit_length())
    return np.asarray(total[..., 0, :]) / one + np.asarray(total[..., 1, :]) / one**2


def oracle(key, value, position, cursor, budget):
    """Loops over rows and heads, in float64."""
    unit = directions(key, position)
    key, value, position, cursor = (np.array(x, np.float64) for x in (key, value, position, cursor))
    for row, used in enumerate(cursor.astype(int)):
        if used <= budget:
            continue
        last = used - 1
        for head, places in enumerate(position[row]):
            mean = unit[row, head].sum(0)
            score = -unit[row, head] @ mean
            held = [s for s, p in enumerate(places) if p >= 0]
            worst = min(held, key=lambda s, score=score, places=places: (score[s], -places[s]), default=0)
            key[row, head, worst], value[row, head, worst] = key[row, head, last], value[row, head, last]
            places[worst] = places[last]
            places[last] = -1
        cursor[row] = last
    return key, value, position, cursor


@every_body_and_dtype
@pytest.mark.parametrize("slots", one_shape(150, 33, 64))
@pytest.mark.parametrize("budget", [12, 5])
def test_the_key_most_alike_goes(name, slots, dtype, budget):
    (*stored, position, cursor), newest = case(slots, dtype=dtype)
    key, value, moved, left, total, done = evict(name, *stored, position, cursor, newest, budget)
    alike((key, value, moved, left), oracle(*stored, position, cursor, budget))
    np.testing.assert_array_equal(done, 0)
    np.testing.assert_allclose(numbers(total, slots), directions(key, moved).sum(2), atol=2e-6)


@every_body
def test_of_equal_cosines_the_newest_goes_itself(name):
    (key, value, position, cursor), newest = case()
    key = jnp.asarray(np.where(np.asarray(position)[..., None] < 0, np.nan, 0.25 * np.ones(key.shape)), jnp.float32)
    _, _, moved, left, total, _ = evict(name, key, value, position, cursor, newest, 12)
    last = np.asarray(cursor) - 1
    for row in range(2):
        np.testing.assert_array_equal(moved[row, :, last[row]], -1)
        others = np.arange(position.shape[2]) != last[row]
        np.testing.assert_array_equal(moved[row][:, others], position[row][:, others])
    np.testing.assert_array_equal(left, np.where(np.asarray(cursor) > 12, last, cursor))
    np.testing.assert_allclose(numbers(total, 150), directions(key, moved).sum(2), atol=2e-6)


@every_body
@pytest.mark.parametrize("kind", one_shape(*MOST))
def test_codes_are_evicted_as_what_they_read_back(name, kind):
    if kind == "int4" and name != "xla":
        pytest.skip("its check refuses packed codes")
    (key, value, position, cursor), newest = case(dtype="bfloat16")
    codes = [jax.jit(quantise, static_argnums=1)(x, kind) for x in (key, value)]
    got = evict(name, *codes, position, cursor, newest, 12)
    read = jax.jit(whole)
    want = oracle(*(read(x) for x in codes), position, cursor, 12)
    left = [read(x) for x in got[:2]]
    alike((*left, *got[2:4]), want)
    np.testing.assert_allclose(numbers(got[4], 150), directions(left[0], got[2]).sum(2), atol=2e-6)


@pytest.mark.slow
@every_body
def test_the_sum_keeps_no_error_of_10000_steps(name):
    """Each step stores a token with a direction near a moving one, so the sum turns around."""
    slots, dim, steps, batch = 33, 16, 10_000 if name != "interpreted" else 300, 1
    noise = jax.random.normal(jax.random.key(0), (steps, batch, 2, dim))
    angle = jnp.arange(steps, dtype=jnp.float32) / 100
    noise = 0.7 * noise + jnp.stack([jnp.cos(angle), jnp.sin(angle)], 1)[:, None, None].repeat(dim // 2, -1)

    def step(carry, given):
        (key, value, position, cursor, total, done), (new, index) = carry, given
        key = key.at[:, :, cursor[0]].set(new)
        position = position.at[:, :, cursor[0]].set(index)
        kept = EVICT[name](key, value, position, cursor + 1, total, done, newest=jnp.full((batch,), index), budget=slots - 1)
        return tuple(kept), None

    zeros = jnp.zeros((batch, 2, slots, dim))
    position, cursor = jnp.full((batch, 2, slots), -1, jnp.int32), jnp.zeros((batch,), jnp.int32)
    start = (zeros, zeros, position, cursor, direction_sum(zeros, position), cursor)
    given = noise, jnp.arange(steps, dtype=jnp.int32)
    key, _, position, cursor, total, _ = jax.jit(lambda: jax.lax.scan(step, start, given)[0])()
    assert int(cursor[0]) == slots - 1
    # The directions that are kept cancel each other, so the sum is short; no error has grown.
    np.testing.assert_allclose(numbers(total, slots), directions(key, position).sum(2), atol=5e-7)
    np.testing.assert_allclose(numbers(total, slots), numbers(direction_sum(key, position), slots), atol=1e-7)
