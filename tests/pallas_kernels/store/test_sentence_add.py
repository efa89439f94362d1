"""`sentence_add` against loops in NumPy, on every implementation; interpreted where there is no GPU."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.choose.sentencekv.sentence_cut import CLOSES, JOINS
from pallas_kernels.store.sentencekv.sentence_add import sentence_add
from tests.pallas_kernels.cases import compiled, every_body, every_body_and_dtype, implementations, on_hopper

ADD = implementations("sentence_add") | on_hopper(sentence_add)


def book(seed, rows=3, heads=2, group=2, dim=16, slots=20, dtype="float32"):
    """Arguments of `sentence_add`; row 0 goes on, row 1 ends a sentence, row 2 stands still, and empty slots hold NaN."""
    rng = np.random.default_rng(seed)
    cursor = np.array([8, 12, 6], np.int32)[:rows]
    held = (np.arange(slots) < cursor[:, None])[:, None, :, None]
    key = np.where(held, rng.normal(size=(rows, heads, slots, dim)), np.nan)
    mean = rng.normal(size=(rows, heads, slots, dim))
    count = rng.integers(2, 5, (rows, heads)).astype(np.int32)
    sentence = rng.integers(-1, 5, (rows, heads, slots)).astype(np.int32)
    query, query_sum = rng.normal(size=(2, rows, heads, group, dim)).astype(np.float32)
    key_sum = rng.normal(size=(rows, heads, dim)).astype(np.float32)
    key, mean, query = (jnp.asarray(x, dtype) for x in (key, mean, query))
    length = jnp.broadcast_to(jnp.array([3, 0, 2], jnp.int32)[:rows, None], (rows, heads))
    state = (*(jnp.asarray(x) for x in (sentence, mean, count, query_sum, key_sum)), length)
    return key, query, jnp.asarray(cursor), jnp.array([JOINS, CLOSES, 0], jnp.int32)[:rows], state


def add_oracle(key, query, cursor, event, state):
    key, query = (np.asarray(x.astype(jnp.float32)) for x in (key, query))
    sentence, mean, count, query_sum, key_sum, length = (np.array(x) for x in state)
    mean = mean.astype(np.float32)
    for row, head in np.ndindex(count.shape):
        if event[row] == 0:
            continue
        sentence[row, head, cursor[row] - 1] = count[row, head]
        query_sum[row, head] += query[row, head]
        key_sum[row, head] += key[row, head, cursor[row] - 1]
        length[row, head] += 1
        if event[row] == CLOSES:
            mean[row, head, count[row, head]] = key_sum[row, head] / length[row, head]
            count[row, head] += 1
            query_sum[row, head], key_sum[row, head], length[row, head] = 0, 0, 0
    return sentence, mean, count, query_sum, key_sum, length


@every_body_and_dtype
def test_state_equals_loops(name, dtype):
    args = book(0, dtype=dtype)
    got, want = compiled(ADD[name])(*args), add_oracle(*args)
    for new, right, old in zip(got, want, args[-1]):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
        tolerance = 1e-2 if new.dtype == jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(np.asarray(new.astype(jnp.float32)), right, rtol=tolerance, atol=tolerance)
    for new, old in zip(got, args[-1]):
        np.testing.assert_array_equal(np.asarray(new[2]), np.asarray(old[2]))  # stands still


@every_body
def test_past_the_end_nothing_is_written(name):
    key, query, cursor, event, state = book(1)
    sentence, mean, count, *sums = state
    got = compiled(ADD[name])(key, query, cursor + 20, event, (sentence, mean, count + 20, *sums))
    np.testing.assert_array_equal(got[0], sentence)
    np.testing.assert_array_equal(got[1], mean)
