"""Online eviction against NumPy loops, on every implementation; interpreted where there is no GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.store.evict_token import evict_token
from tests.pallas_kernels.cases import alike, compiled, every_body, implementations, on_hopper

EVICT = implementations("evict_token") | on_hopper(evict_token)


def evict(name, *args, first=0, **kwargs):
    return compiled(EVICT[name], first=first)(*args, **kwargs)


def case(batch=3, heads=2, slots=21, dim=16, dtype="float32", seed=0):
    """A cache whose rows are full, one token over budget 12, and below it; holes, tokens out of order, garbage in holes."""
    rng = np.random.default_rng(seed)
    cursor = np.array([slots, 13, 7][:batch])
    position = np.full((batch, heads, slots), -1)
    for row, used in enumerate(cursor):
        for head in range(heads):
            position[row, head, :used] = np.append(rng.permutation(used - 1) * 3, used * 3)
            position[row, head, rng.integers(0, used - 1, 2)] = -1
    rows = [rng.normal(size=(batch, heads, slots, dim)) for _ in range(2)]
    for x in rows:
        x[position < 0] = np.nan
    score, gain = rng.integers(0, 4, (2, batch, heads, slots))
    arrays = [jnp.asarray(x, dtype) for x in rows]
    return (*arrays, jnp.asarray(position, jnp.int32), jnp.asarray(cursor, jnp.int32)), tuple(
        jnp.asarray(x, jnp.float32) for x in (score, gain)
    )


def oracle(key, value, position, cursor, score, *, budget, gain=None, first=0, recent=0):
    """Loops over rows and heads."""
    key, value, position, cursor = (np.array(x, np.float64) for x in (key, value, position, cursor))
    total = None if score is None else np.array(score, np.float64) + (0 if gain is None else np.array(gain))
    for row, used in enumerate(cursor.astype(int)):
        if used <= budget:
            continue
        last = used - 1
        for head, places in enumerate(position[row]):
            old = [s for s, p in enumerate(places) if p >= first and 0 <= p <= places.max() - recent]
            rank = places if total is None else total[row, head]
            worst = min(old, key=lambda s, rank=rank, places=places: (rank[s], -places[s]), default=0)
            key[row, head, worst], value[row, head, worst] = key[row, head, last], value[row, head, last]
            if total is not None:
                carried, total[row, head, last] = total[row, head, last], 0
                total[row, head, worst] = carried
            places[worst] = places[last]
            places[last] = -1
        cursor[row] = last
    return key, value, position, cursor, total


KNOBS = {
    "by score": {"budget": 12},
    "nothing over budget": {"budget": 21},
    "the newest and the first are safe": {"budget": 12, "first": 4, "recent": 9},
    "nothing may go": {"budget": 12, "recent": 1000},
}


@every_body
@pytest.mark.parametrize("label", KNOBS)
def test_a_score_of_all_heads_equals_each_head_and_does_not_move(name, label):
    args, (score, _) = case()
    *got, moved = evict(name, *args, score[:, :1], **KNOBS[label])
    assert moved is None
    alike(got, oracle(*args, np.broadcast_to(score[:, :1], score.shape), **KNOBS[label])[:4])


@every_body
@pytest.mark.parametrize("label", KNOBS)
@pytest.mark.parametrize("scores", ["none", pytest.param("score", marks=pytest.mark.thorough), "score and gain"])
def test_evict_token_matches_a_loop(name, label, scores):
    args, (score, gain) = case()
    knobs = KNOBS[label] | ({"gain": gain} if "gain" in scores else {})
    score = None if scores == "none" else score
    for x, want in zip(evict(name, *args, score, **knobs), oracle(*args, score, **knobs), strict=True):
        assert (x is None) == (want is None)
        if x is not None:
            np.testing.assert_array_equal(np.asarray(x, np.float64), want)
