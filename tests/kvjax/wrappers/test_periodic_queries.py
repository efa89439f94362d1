"""What `Periodic` keeps of queries: a ring of those since the last eviction, which adds them to the moments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention.moments import add_queries, no_moments
from kvjax.decoding.settle import settle_due
from kvjax.methods import ExpectedAttention, SnapKV, TriAttention
from kvjax.protocol.method import LayerSpec
from kvjax.protocol.slots import Reads
from kvjax.protocol.typing import EMPTY, pytree
from kvjax.wrappers import Periodic
from tests.harness import frequencies, random_tokens, small
from tests.kvjax.cases import layer_inputs

pytestmark = pytest.mark.usefixtures("quick_compile")

TEXT, DIM = 40, 8
BLOCKS = [1, 1, 1, 4, 1, 4, 1, 1, 1, 1]  # tokens that come at once; in a block of several each row has as many as it gets
TOKENS = np.array([[1, 1, 1, 4, 1, 4, 1, 1, 1, 1], [1, 0, 1, 1, 1, 3, 1, 0, 1, 1], [0, 0, 0, 2, 0, 0, 0, 0, 1, 0]])  # [B, N]
PROMPTS = np.array([20, 7, 1])
OFTEN = 4


@pytree
class Remembers(SnapKV):
    """`SnapKV`, which gets moments too and reads none."""

    reads = Reads(moments_from=2)


@functools.cache
def tokens_of_rows():
    return *random_tokens(4, len(PROMPTS), 2, 2, TEXT, DIM), frequencies(DIM)


def blocks_of(method, q, k, v, inv_freq):
    """The states after the prompt and after each of `BLOCKS`: before evictions and after them."""
    spec = LayerSpec(
        batch=len(PROMPTS), num_kv_heads=2, group_size=2, head_dim=DIM, dtype="float32", prompt_slots=20,
        max_new_tokens=sum(BLOCKS),
    )  # fmt: skip

    def inputs(first, count, size, start=None):
        step = jnp.arange(size)[None]
        at = jnp.minimum(first[:, None] + step, TEXT - 1)
        position = jnp.where(step < count[:, None], at, EMPTY).astype(jnp.int32)
        return layer_inputs((q, k, v, inv_freq), at, position, start)

    length = jnp.asarray(PROMPTS)
    state = method.finish(method.attend(method.init(spec), inputs(0 * length, length, 20, 0))[1], spec)
    states = [(state, state)]
    for size, count in zip(BLOCKS, TOKENS.T, strict=True):
        _, state = method.attend(state, inputs(length, jnp.asarray(count), size))
        (after,) = settle_due([method], (state,))
        states.append((state, after))
        state, length = after, length + count
    return states


RUN = jax.jit(blocks_of, static_argnums=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "evict",
    [
        pytest.param(TriAttention(budget=9, interval=None), marks=pytest.mark.thorough),
        small(ExpectedAttention, budget=9, num_sink=2),
    ],
)
def test_moments_at_an_eviction_cover_all_queries_one_by_one(evict):
    """Rows of other lengths get other numbers of tokens; a row that is not due keeps its moments to the bit."""
    q, k, v, inv_freq = tokens_of_rows()
    found = RUN(Periodic(evict=evict, interval=OFTEN), q, k, v, inv_freq)
    add = jax.jit(add_queries)
    for row, length in enumerate(PROMPTS.tolist()):
        ends, since, evicted, kept = length + np.cumsum([0, *TOKENS[row]]), 0, 0, None
        own = no_moments(1, 2, 2, DIM, evict.reads.moments_from, evict.reads.covariance)
        for before, (state, after), end in zip([0, *ends], found, ends, strict=False):
            for at in range(before, end):
                own = add(own, q[row : row + 1, :, :, at : at + 1], jnp.array([[at]], jnp.int32), inv_freq)
            since = 0 if kept is None else since + end - before
            assert state.aux.since[row] == since < 2 * OFTEN
            got = [np.asarray(x)[row] for x in jax.tree.leaves(after.aux.moments)]
            if kept is None or since >= OFTEN:  # the prompt's end, or an eviction
                evicted, since, kept = evicted + (kept is not None), 0, got
                for one, other in zip(got, jax.tree.leaves(own), strict=True):
                    np.testing.assert_allclose(one, other[0], rtol=2e-5, atol=2e-5)
            assert after.aux.since[row] == since
            for one, other in zip(got, kept, strict=True):
                np.testing.assert_array_equal(one, other)
        assert evicted == [3, 2, 0][row]
    assert (after.aux.moments.scatter is None) == (not evict.reads.covariance)


@pytest.mark.slow
def test_a_window_since_the_last_eviction_equals_the_window_alone():
    """Moments need more queries than the window has, and the ring is as long as the longer of both."""
    for window in (3, 9):
        kinds = (kind(budget=12, obs_window=window, kernel=3) for kind in (SnapKV, Remembers))
        methods = [Periodic(evict=kind, interval=OFTEN) for kind in kinds]
        once, again = (RUN(method, *tokens_of_rows()) for method in methods)
        assert again[0][0].aux.query.shape[3] == max(window, 2 * OFTEN - 1) and once[0][0].aux.query.shape[3] == window
        for one, other in zip(once, again, strict=True):
            np.testing.assert_array_equal(one[1].cache.position, other[1].cache.position)
            np.testing.assert_array_equal(one[1].cache.key, other[1].cache.key)


def test_metadata_of_a_step_is_a_share_of_what_an_eviction_reads():
    """The ring has 2 * interval - 1 queries, the moments a mean and lengths; a covariance counts where it is read."""
    for evict, floats in (
        (TriAttention(budget=9, interval=None), DIM + DIM // 2),
        (small(ExpectedAttention, budget=9, num_sink=2), DIM + DIM // 2 + DIM * DIM),
    ):
        method = Periodic(evict=evict, interval=OFTEN)
        last = jax.eval_shape(functools.partial(blocks_of, method), *tokens_of_rows())[-1][1]
        _, read = method.count(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), last.cache), last.aux, None)
        want = len(PROMPTS) * 2 * 2 * 4 * ((2 * OFTEN - 1) * DIM + floats) / OFTEN
        np.testing.assert_allclose(read.sum(), want, rtol=1e-6)
