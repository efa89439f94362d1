"""Log-probabilities: those of a dense pass in float64 and of transformers, what `score` and `stream` say, what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import models
from kvjax.exact import FromJudge
from kvjax.methods import Full, SnapKV
from tests import harness
from tests.harness import METHODS, any_example, group, padded, prompts, repeated, tiny_params
from tests.kvjax.api.test_generate import probabilities
from tests.kvjax.cases import ONE
from tests.kvjax.cases import model as tiny_model
from tests.models.test_parity import read_golden, write_checkpoint
from tests.tiny_models import run as dense_logits

pytestmark = pytest.mark.usefixtures("quick_compile")

N, TOP = 8, 3
COUNTS = [N, 0, 5]  # most tokens of each row
DRAWN = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "key": jax.random.key(1)}
DRAFT = SnapKV(budget=12, obs_window=5)
METHODS_THAT_DRAW = {
    "full": Full(),
    "drafted": kvjax.Verified(draft=DRAFT, depth=2, worth=0.0),
    "alone": kvjax.Verified(draft=DRAFT, depth=2, worth=1.0),  # behind a first round, in the same program
    "from judge": kvjax.Verified(draft=FromJudge(budget=12, num_recent=6), depth=2, worth=0.0),
}
WRAPPED = [group("verified"), group("periodic"), group("layer_budgets")]
read = functools.partial(harness.read, config=ONE)


def run(cache, logprobs=True, end=59, **options):
    """`generate`; no row draws the token 59."""
    options = {"top_logprobs": TOP * logprobs, "limits": COUNTS, **DRAWN, **options}
    return kvjax.generate(tiny_params(), cache, max_new_tokens=N, eos_token_ids=[end], logprobs=logprobs, **options)


@functools.cache
def full():
    return run(read(Full()))


@functools.cache
def exact(tokens):
    """The log-probabilities of every token id after each prompt and each of ``tokens``: float64 [B][N, V]."""
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts(), tokens, strict=True)]
    logits = np.asarray(dense_logits(ONE, tiny_params(), jnp.asarray(padded(rows, 48)[0])), np.float64)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return [logits[i, len(prompt) - 1 :][:N] for i, prompt in enumerate(prompts())]


def answers(out):
    return tuple(map(tuple, out.tokens.tolist()))


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x == "from judge")) for x in METHODS_THAT_DRAW])
def test_log_probabilities_are_those_of_a_dense_pass_in_float64(name):
    """Of ragged rows that end early: of the model, of what was drawn from, and of the likeliest tokens; zeros behind them."""
    out = run(read(METHODS_THAT_DRAW[name]))
    got = out.logprobs
    assert got.top_tokens.shape == got.top.shape == (3, N, TOP)
    np.testing.assert_array_equal(out.tokens, full().tokens)
    for row, logits in enumerate(exact(answers(out))):
        count = COUNTS[row]
        for place, token in enumerate(out.tokens[row, :count].tolist()):
            drawn = np.log(probabilities(logits[place], 1.3, 20, 0.9)[token])
            np.testing.assert_allclose(got.model[row, place], logits[place, token], atol=1e-4)
            np.testing.assert_allclose(got.sampled[row, place], drawn, atol=1e-4)
            np.testing.assert_array_equal(got.top_tokens[row, place], np.argsort(-logits[place])[:TOP])
            np.testing.assert_allclose(got.top[row, place], np.sort(logits[place])[::-1][:TOP], atol=1e-4)
        assert not got.model[row, count:].any() and not got.sampled[row, count:].any()
        assert not got.top[row, count:].any() and (got.top_tokens[row, count:] == -1).all()


def test_nothing_changes_where_nobody_asks():
    plain = run(read(Full()), logprobs=False)
    np.testing.assert_array_equal(plain.tokens, full().tokens)
    assert plain.logprobs is None
    with pytest.raises(ValueError, match="logprobs"):
        plain.scored_rows()


def test_the_token_that_ends_a_row_is_the_last_one_with_a_log_probability():
    end = int(full().tokens[2, 2])
    out = run(read(Full()), end=end)
    counts = [row.index(end) + 1 if end in row else len(row) for row in full().rows()]
    assert out.num_tokens.tolist() == counts != COUNTS
    kept = np.arange(N) < np.array(counts)[:, None]
    for got, whole in ((out.logprobs.model, full().logprobs.model), (out.logprobs.sampled, full().logprobs.sampled)):
        np.testing.assert_array_equal(got, np.where(kept, whole, 0))
    assert [len(row) for row in out.scored_rows()] == counts


def test_greedy_tokens_are_certain():
    """Under the distribution of a single token, without a temperature or with 0; the model's own is what it is."""
    out = run(read(Full()), temperature=0.0)
    assert not out.logprobs.sampled.any()
    real = np.arange(N) < np.array(COUNTS)[:, None]
    np.testing.assert_array_equal(out.logprobs.top_tokens[..., 0], np.where(real, out.tokens, -1))
    np.testing.assert_array_equal(out.logprobs.top[..., 0], out.logprobs.model)


@pytest.mark.parametrize("name", repeated(METHODS + WRAPPED, but=("quest",)))
def test_a_score_is_what_a_rollout_saw(name):
    """Under the method that drew the tokens, which selects and evicts in each step; the cache can be used again."""
    config = tiny_model(name)
    cache = read(any_example(name), config=config)
    got = kvjax.score(tiny_params(), cache, full().tokens, lengths=COUNTS)
    again = kvjax.score(tiny_params(), cache, full().tokens, lengths=COUNTS)
    np.testing.assert_array_equal(got, again)
    expected = []
    for step in range(N):
        made = jax.nn.log_softmax(cache.logits)
        active = step < np.array(COUNTS)
        expected.append(np.where(active, made[np.arange(3), full().tokens[:, step]], 0))
        cache = kvjax.decode_step(tiny_params(), cache, full().tokens[:, step], active=active)
    np.testing.assert_allclose(got, np.stack(expected, axis=1), atol=1e-5)


def test_scores_equal_those_of_transformers(tmp_path):
    """Of the last tokens of two texts, after prompts of two lengths."""
    golden = read_golden("llama")
    write_checkpoint(tmp_path, golden)
    params, config = models.from_pretrained(tmp_path)
    tokens, starts = golden["tokens"].tolist(), (12, 17)
    logits = golden["logits"].astype(np.float64)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    heads, tails = ([row[:at] for row, at in zip(tokens, starts)], [row[at:] for row, at in zip(tokens, starts)])
    cache = kvjax.prefill(params, heads, config=config, method="full", max_new_tokens=12)
    got = kvjax.score(params, cache, tails)
    for row, (start, tail) in enumerate(zip(starts, tails)):
        expected = logits[row, start - 1 : -1][np.arange(len(tail)), tail]
        np.testing.assert_allclose(got[row, : len(tail)], expected, atol=1e-4)
        assert not got[row, len(tail) :].any()


class Names:
    def decode(self, ids):
        return "".join(f"<{token}>" for token in ids)


def test_a_stream_has_the_scored_tokens_of_generate():
    options = {"max_new_tokens": 4, "block": 2, "eos_token_ids": (), "logprobs": True, "top_logprobs": TOP, **DRAWN}
    pieces = list(kvjax.stream(tiny_params(), read(Full()), **options))
    wanted = run(read(Full()), limits=[N] * 3).scored_rows()
    for row, expected in enumerate(wanted):
        got = [one for piece in pieces for one in piece[row]]
        assert [one.token for one in got] == [one.token for one in expected[:4]]
        np.testing.assert_allclose([one[1:3] for one in got], [one[1:3] for one in expected[:4]], atol=1e-5)
        assert all(one.top[0][1] >= one.top[1][1] and len(one.top) == TOP for one in got)
    texts = list(kvjax.stream(tiny_params(), read(Full()), tokenizer=Names(), **options))
    assert [[text for text, _ in entry] for entry in texts] == [
        [Names().decode(one.token for one in scored) for scored in entry] for entry in pieces
    ]
    assert [[scored for _, scored in entry] for entry in texts] == pieces


@pytest.mark.slow
def test_log_probabilities_inside_jit_and_vmap():
    """Mapped over given tokens and keys; the calls outside give the same."""
    cache = read(Full())

    def both(key, tokens):
        out = run(cache, key=key)
        return out.logprobs, kvjax.score(tiny_params(), cache, tokens, lengths=jnp.array(COUNTS))

    keys, texts = jax.random.split(jax.random.key(5), 2), jnp.stack([full().tokens, full().tokens[:, ::-1]])
    made, scores = jax.jit(jax.vmap(both))(keys, texts)
    for lane in range(2):
        want = run(kvjax.fork(cache), key=keys[lane]).logprobs
        for got, expected in zip(jax.tree.leaves(made), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got[lane], expected, atol=1e-4)
        np.testing.assert_allclose(scores[lane], kvjax.score(tiny_params(), cache, texts[lane], lengths=COUNTS), atol=1e-4)


@pytest.mark.slow
def test_a_score_has_a_gradient():
    """In reverse mode as in forward mode, through the prompt and the steps of a method that selects."""
    tangent = jax.tree.map(lambda x: 1e-2 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype), tiny_params())

    def loss(params):
        options = {"config": ONE, "method": any_example("quest"), "max_new_tokens": 4}
        cache = kvjax.prefill(params, [[5, 9, 2, 7], [3, 17, 6]], **options)
        return kvjax.score(params, cache, [[4, 8, 1], [7]]).sum()

    with kvjax.default_implementation("xla"):
        slope = jax.jit(jax.grad(loss))(tiny_params())
        _, forward = jax.jit(lambda params: jax.jvp(loss, (params,), (tangent,)))(tiny_params())
    ahead = jax.tree.reduce(jnp.add, jax.tree.map(lambda x, y: jnp.vdot(x, y), slope, tangent))
    np.testing.assert_allclose(ahead, forward, rtol=1e-3)
    assert abs(forward) > 1e-3


def test_what_is_refused():
    cache = read(Full())
    for options, told in (
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs=2 needs logprobs=True"),
        ({"top_logprobs": 62}, "top_logprobs must be .*61.*, got 62"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs must be .*, got 5"),
    ):
        with pytest.raises(ValueError, match=told):
            kvjax.generate(tiny_params(), cache, **{"logprobs": True, **options})
    for tokens, told in (
        ([[1]], "tokens must have 3 rows"),
        ([[1], [61], []], "vocab_size=61"),
        ([[1] * 33] * 3, "room for 32 more tokens"),
    ):
        with pytest.raises(ValueError, match=told):
            kvjax.score(tiny_params(), cache, tokens)
    assert kvjax.score(tiny_params(), cache, [[], [], []]).shape == (3, 0)
