"""`Verified` at a temperature: the first tokens of the built-in model have the distribution that Full's logits give."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import chi2

import kvjax
import models
from kvjax.methods import Full, SnapKV
from tests.kvjax.exact.test_verified import Wrong

ROWS, TOP, TOKENS = 640, 3, 3  # rows of a call, tokens that can come at each place, tokens that are compared
KEYS = (11, 12)
TEXT = "The door of the old house was open, and she"
LEAST = 1e-4  # of the probability that right samples are as far away as the samples seen


pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def builtin():
    params, config = models.from_pretrained(models.builtin_directory(), dtype="float32")
    tokenizer = models.load_tokenizer(models.builtin_directory(), config)
    return params, config, tokenizer.encode(TEXT).ids


def read(builtin, method, prompts):
    """Prefill prompts of a few lengths with room for the tokens."""
    params, config, _ = builtin
    lengths = [len(row) for row in prompts]
    padded = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    given = {"config": config, "max_new_tokens": TOKENS, "pad_multiple": 1}
    return kvjax.prefill(params, padded, lengths=lengths, method=method, **given)


@pytest.fixture(scope="module")
def exact(builtin):
    """Full's probability of each sequence of tokens that can come."""
    chance = {(): 1.0}
    for _ in range(TOKENS):
        logits = np.asarray(read(builtin, Full(), [[*builtin[2], *before] for before in chance]).logits, np.float64)
        later = {}
        for (before, p), row in zip(chance.items(), logits, strict=True):
            best = np.argsort(row)[-TOP:]
            weight = np.exp(row[best] - row[best].max())
            later |= {(*before, int(x)): p * w for x, w in zip(best, weight / weight.sum(), strict=True)}
        chance = later
    assert len(chance) == TOP**TOKENS
    return chance


def probability(seen, exact):
    """Return the p-value of Pearson's chi-square; sequences that come less than eight times are counted together."""
    total = sum(seen.values())
    rare = [x for x, p in exact.items() if total * p < 8]
    groups = [[x] for x in exact if x not in rare] + ([rare] if rare else [])
    expected = np.array([total * sum(exact[x] for x in group) for group in groups])
    counts = np.array([sum(seen[x] for x in group) for group in groups])
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), len(groups) - 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "draft, least, most",
    [
        pytest.param(Full(), 1, 1, id="accepted"),
        pytest.param(Wrong(), 0, 0.1, id="rejected"),
        pytest.param(SnapKV(budget=6, obs_window=3), 0.1, 0.99, id="both"),
    ],
)
def test_sampled_tokens_have_fulls_distribution(builtin, exact, draft, least, most):
    """The first token of a pass, tokens that were accepted, and tokens that stand in the place of rejected ones."""
    method = kvjax.Verified(draft=draft, depth=TOKENS - 1, worth=None)
    cache, seen, kept = read(builtin, method, [builtin[2]]), dict.fromkeys(exact, 0), []
    for key in KEYS:
        out = kvjax.generate(
            builtin[0],
            kvjax.fork(cache, ROWS),
            max_new_tokens=TOKENS,
            eos_token_ids=(),
            temperature=1.0,
            top_k=TOP,
            key=jax.random.key(key),
        )
        for row in map(tuple, np.asarray(out.tokens).tolist()):
            seen[row] += 1  # a KeyError: Full cannot draw these tokens
        kept.append(float(jnp.mean(out.stats.counters["accepted_1"])))
    assert least <= np.mean(kept) <= most, np.mean(kept)
    assert probability(seen, exact) > LEAST


def test_the_chi_square_sees_a_small_bias():
    """A share of .05 that goes to another sequence of two tokens fails the bound at the number of samples that is drawn."""
    total = len(KEYS) * ROWS
    chance = dict(zip(itertools.product(range(3), repeat=2), np.linspace(0.06, 0.17, 9) / 1.035, strict=True))
    rng = np.random.default_rng(0)
    for bias, fails in ((0.0, False), (0.05, True)):
        p = np.array(list(chance.values()))
        p[0], p[-1] = p[0] + bias, p[-1] - bias
        drawn = rng.multinomial(total, p / p.sum())
        assert (probability(dict(zip(chance, drawn.tolist(), strict=True)), chance) < LEAST) == fails
