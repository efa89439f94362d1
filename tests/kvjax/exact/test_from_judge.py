"""`FromJudge` against float64 loops: what it attends to after a prompt, and the list that a pass of the judge makes."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.exact import FromJudge
from kvjax.protocol.method import LayerSpec
from kvjax.protocol.typing import EMPTY
from tests.harness import drive, frequencies, random_tokens, small
from tests.kvjax.cases import layer_inputs
from tests.oracles.plain import attend, attend_to, best, rotate_all

pytestmark = pytest.mark.usefixtures("quick_compile")

HEADS, GROUP, DIM, PROMPT, STEPS = 2, 2, 8, 30, 4
LENGTHS = np.array([30, 7], np.int32)
DRAFT = small(FromJudge, budget=12, num_recent=4, obs_window=5)
VEGAS = small(FromJudge, budget=20, num_recent=4, obs_window=1, share=0.3, one_list=True, last_too=True, least_listed=5)
ROWS = random_tokens(0, len(LENGTHS), HEADS, GROUP, PROMPT + STEPS, DIM)


def rotated(row):
    q, k, v = (x[row] for x in ROWS)
    return rotate_all(q, frequencies(DIM)), rotate_all(k, frequencies(DIM)), v.astype(np.float64)


def listed(draft, q, k, head, queries, tokens):
    """The old tokens to which most attention of the ``queries`` goes, when ``tokens`` are stored."""
    mass = dict.fromkeys(range(tokens - draft.num_recent // 2), 0.0)
    for t in queries:
        for h, g in np.ndindex(q.shape[:2]):
            if h == head or draft.one_list:
                _, weight = attend(q[h, g, t], list(k[h, : t + 1]), list(k[h, : t + 1]))
                for i in mass:
                    mass[i] += weight[i] if i <= t else 0.0
    count = draft.budget - draft.num_recent
    return best(
        mass, count if draft.share is None else int(np.clip(np.ceil(draft.share * tokens), draft.least_listed, count))
    )


@pytest.mark.parametrize("draft", [DRAFT, pytest.param(VEGAS, marks=pytest.mark.slow)], ids=["ours", "vegas"])
def test_steps_attend_to_the_list_and_the_newest_tokens(draft):
    got = drive(draft, *ROWS, LENGTHS, prompt=PROMPT)
    for row, length in enumerate(LENGTHS.tolist()):
        q, k, v = rotated(row)
        queries = range(max(length - draft.obs_window, 0), length)
        lists = [listed(draft, q, k, head, queries, length) for head in range(HEADS)]
        for step in range(STEPS):
            t = length + step
            recent = set(range(max(t + 1 - draft.num_recent, 0), t + 1))
            chosen = [sorted({i for i in own if i <= t - draft.num_recent} | recent) for own in lists]
            for head in range(HEADS):
                assert set(np.flatnonzero(got.attended[step, row, head])) == set(chosen[head])
            np.testing.assert_allclose(got.outputs[step, row], attend_to(q, k, v, t, chosen), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("draft", [DRAFT, VEGAS], ids=["ours", "vegas"])
def test_a_pass_renews_the_list_by_its_first_query_or_by_its_ends(draft):
    """Three queries, of which the first row keeps two tokens and the second row all."""
    layer = kvjax.Verified(draft=draft, depth=2).for_layer(0, 1)
    spec = LayerSpec(
        batch=len(LENGTHS), num_kv_heads=HEADS, group_size=GROUP, head_dim=DIM, dtype="float32", prompt_slots=PROMPT,
        max_new_tokens=STEPS,
    )  # fmt: skip

    def given(first, tokens, start=None, kept=None):
        at = first[:, None] + np.arange(tokens)[None]
        real = at < (LENGTHS[:, None] if start is not None else first[:, None] + kept[:, None])
        at, position = jnp.asarray(at, jnp.int32), jnp.asarray(np.where(real, at, EMPTY), jnp.int32)
        return layer_inputs((*map(jnp.asarray, ROWS), jnp.asarray(frequencies(DIM))), at, position, start, shared)

    shared = kvjax.Verified(draft=draft, depth=2).init_shared((spec,))
    _, state = layer.attend(layer.init(spec), given(np.zeros_like(LENGTHS), PROMPT, start=0))
    state = layer.finish(state, spec)
    tokens, kept = 3, np.array([2, 3])
    out, state, mass = layer.judge(state, given(LENGTHS, tokens, kept=np.full(2, tokens)))
    state = layer.commit(state, given(LENGTHS, tokens, kept=kept), mass, jnp.asarray(tokens - kept, jnp.int32))
    assert state.cache.cursor.tolist() == (LENGTHS + kept).tolist()
    for row, length in enumerate(LENGTHS.tolist()):
        q, k, v = rotated(row)
        for t in range(tokens):
            everything = [list(range(length + t + 1))] * HEADS
            np.testing.assert_allclose(out[row, :, :, t], attend_to(q, k, v, length + t, everything), atol=1e-5)
        for head in range(HEADS):
            asks = [length, length + tokens - 1] if draft.last_too else [length]
            want = listed(draft, q, k, head, asks, length + kept[row])
            assert set(np.asarray(state.aux.slots[row, head])[np.asarray(state.aux.used[row, head])]) == want
