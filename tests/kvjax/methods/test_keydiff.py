"""KeyDiff: the sum of directions that each layer keeps equals the sum over the keys it holds, whatever stored them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from pallas_kernels.store.keydiff.evict_alike import direction_sum
from tests.harness import example, prompts, read, tiny_params
from tests.kvjax.cases import ONE

pytestmark = pytest.mark.usefixtures("quick_compile")
ROWS = len(prompts())


def check(cache):
    """Every sum equals the sum over the held keys, and a step's counter is at zero again."""
    for layer in cache.layers:
        held, kept = layer.cache, layer.aux
        want, got = (np.asarray(x, np.int64) for x in (direction_sum(held.key, held.position), kept.total))
        one = 2.0 ** (30 - held.num_slots.bit_length())
        got, want = (x[:, :, 0] / one + x[:, :, 1] / one**2 for x in (got, want))
        np.testing.assert_allclose(got, want, atol=1e-6)
        np.testing.assert_array_equal(kept.done, 0)
    return cache


def same(got, want):
    for x, y in zip(jax.tree.leaves(got.layers), jax.tree.leaves(want.layers), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("knobs", [{}, pytest.param({"kv_dtype": "int8"}, marks=pytest.mark.thorough)])
@pytest.mark.slow
def test_sums_follow_prompts_extensions_and_steps(knobs):
    """Rows of different lengths, padding, rows that pause; blocks of several tokens and of one."""
    params, token = tiny_params(), jnp.arange(ROWS, dtype=jnp.int32)
    cache = check(read(example("keydiff"), config=ONE, **knobs))
    for active in ([True] * ROWS, [True, False, True], [False] * ROWS):
        cache = check(kvjax.decode_step(params, cache, token, active=active))
    more = np.arange(ROWS * 5).reshape(ROWS, 5) % 50
    cache = check(kvjax.extend(params, cache, more, lengths=[5, 0, 2]))
    cache = check(kvjax.extend(params, cache, more[:, :1], lengths=[1, 0, 1]))
    same(check(kvjax.fork(cache)), cache)
    check(kvjax.generate(params, cache, max_new_tokens=6, eos_token_ids=()).cache)


@pytest.mark.slow
def test_a_prompt_read_token_by_token_ends_with_the_same_sum():
    check(read(example("keydiff", block=1), rows=[list(range(1, 19))], config=ONE))
