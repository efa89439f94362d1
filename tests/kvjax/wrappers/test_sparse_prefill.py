"""`Prefill`: what a sparse prompt attends to, beside float64 loops; files of patterns; what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from experiments.heads.patterns import to_file
from kvjax.attention import estimates
from kvjax.attention.estimates import antidiagonal_scores, kept_by_share
from kvjax.attention.patterns import KINDS as READ
from kvjax.decoding.checks import check_sizes
from kvjax.methods import Full, SnapKV
from kvjax.testing.model import TinyModel
from kvjax.wrappers import Pattern, PerLayer, Prefill, patterns
from pallas_kernels.soft_cap import soft_cap
from tests.harness import SMALL_PATTERNS, TINY, any_example, drive, frequencies, generous, random_tokens, read, tiny_params
from tests.oracles import adaptive_prompt as oracle
from tests.oracles import minference
from tests.oracles.plain import rotate_all

pytestmark = pytest.mark.usefixtures("quick_compile")
KINDS = {
    "vertical_slash": Pattern("vertical_slash", columns=3, diagonals=3),
    "a_shape": Pattern("a_shape", columns=2, diagonals=5),
    "block_sparse": Pattern("block_sparse", blocks=3),
    "xattention": Pattern("xattention", share=0.6),
    "flexprefill": Pattern("flexprefill", share=0.5, tau=0.0, min_budget=2),  # never by blocks
}
MIXED = (
    *KINDS.values(),
    Pattern("flexprefill", share=0.5, tau=1.0, min_budget=4),
    Pattern("a_shape", columns=1, diagonals=2),
    Pattern("block_sparse", blocks=2),
)  # of the query heads of a layer


def compare(pattern, lengths, chunk=SMALL_PATTERNS["chunk"], poison=False, seed=3, quiet=()):
    """Assert that a layer's prompts are what the loops say; keys in ``quiet`` slots are small."""
    inv_freq, rules = frequencies(8), {**SMALL_PATTERNS, "chunk": chunk}
    group = len(pattern[0]) // 2 if isinstance(pattern, tuple) else 2
    q, k, v = random_tokens(seed, len(lengths), 2, group, max(lengths) + 1, 8)
    k[..., quiet, :] *= 0.05
    method = Prefill(method=Full(), pattern=pattern, **rules)
    got = drive(method, q, k, v, np.array(lengths), prompt=max(lengths), inv_freq=inv_freq, poison=poison)
    heads = pattern[0] if isinstance(pattern, tuple) else (pattern,)
    heads = [dataclasses.astuple(x) for x in heads]
    for row, length in enumerate(lengths):
        queries, keys = (rotate_all(x[row][..., :length, :], inv_freq) for x in (q, k))
        values = np.asarray(v[row][:, :length], np.float64)
        want = minference.prompt(queries, keys, values, heads, **rules)
        np.testing.assert_allclose(got.prompt[row, :, :, :length], want, atol=2e-5, rtol=0)
    return got


@pytest.mark.slow
def test_every_head_attends_as_its_pattern_says():
    """All patterns in one layer; a ragged batch, whose rows end in the first chunk and within a block of the second."""
    compare((MIXED, MIXED), (27, 9), poison=True)
    compare((MIXED[:2] * 2,) * 2, (27, 9))  # without "flexprefill" lists have room for the most columns of a head only
    q, k = (rotate_all(x[0], frequencies(8)) for x in random_tokens(3, 2, 2, 4, 28, 8)[:2])
    for at, x in enumerate(MIXED):
        seen = minference.seen_keys(q[at // 4, at % 4], k[at // 4], dataclasses.astuple(x), **SMALL_PATTERNS)
        assert any(len(keys) < t for t, keys in enumerate(seen)), "the setting leaves nothing out"


@pytest.mark.slow
def test_blasst_skips_beside_heads_of_other_patterns():
    """Queries of the last 64 slots of a second chunk skip quiet blocks; a head that has another threshold does not."""
    blasst, never = (Pattern("blasst", factor=x) for x in (300.0, 1e-9))
    heads = blasst, never, Pattern("a_shape", columns=2, diagonals=5), blasst
    q, k = (rotate_all(x[0], frequencies(8)) for x in random_tokens(3, 2, 2, 2, 501, 8)[:2])
    k[:, 192:384] *= 0.05
    seen = [minference.seen_keys(q[0, 0], k[0], dataclasses.astuple(x), **SMALL_PATTERNS | {"chunk": 256}) for x in heads[:2]]
    assert 300 not in seen[0][499] and 300 in seen[1][499]
    for given in ((heads, heads), blasst):
        compare(given, (500, 460), chunk=256, poison=True, quiet=range(192, 384))


@pytest.mark.thorough
@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_one_pattern_for_all_heads(kind, chunk):
    compare(KINDS[kind], (40, 23, 17, 9), chunk, poison=True, seed=5)


def test_the_fewest_entries_with_a_share_are_kept():
    """What is kept has the share, and without its lightest entry it has less."""
    rng, share = np.random.default_rng(0), np.array([0.2, 0.5, 0.9, 1.0, 0.7, 0.7], np.float32)
    weight = rng.exponential(size=(6, 40)).astype(np.float32) ** 4
    weight[4, 5:], weight[5] = 0, 1
    certain = np.zeros((1, 40), bool)
    certain[0, [3, 7]] = True
    kept = np.asarray(jax.jit(kept_by_share)(weight, certain, share))
    assert kept[:, [3, 7]].all() and kept[3].all() and kept[5].all()  # of equal entries all are needed
    for row in (0, 1, 2, 4):
        held, others = weight[row][kept[row]].sum(), kept[row] & ~certain[0]
        assert held >= share[row] * weight[row].sum() * (1 - 1e-6) and others.any()
        assert held - weight[row][others].min() < share[row] * weight[row].sum()
        assert weight[row][~kept[row]].max() < weight[row][others].min()
    assert np.array_equal(kept_by_share(weight, certain, np.full((6,), 1e-6, np.float32)), np.repeat(certain, 6, 0))


def test_scores_by_antidiagonals_equal_float64_loops(monkeypatch):
    """A chunk behind others, of ragged rows, a few blocks of queries and keys at a time."""
    monkeypatch.setattr(estimates, "_ENTRIES", 300)
    q, k, _ = random_tokens(4, 2, 1, 2, 30, 8)
    total = np.array([29, 18], np.int32)
    query = np.where((np.arange(30) < total[:, None])[:, None, None, :, None], q, np.nan)[..., 12:, :]
    key = np.where((np.arange(30) < total[:, None])[:, None, :, None], k, np.nan)
    got = antidiagonal_scores(*map(jnp.asarray, (query, key)), jnp.int32(12), jnp.asarray(total), block=6, stride=3)
    assert got.shape == (2, 1, 2, 3, 5)
    want = np.zeros(got.shape)
    for row, g in np.ndindex(2, 2):
        scores = oracle.antidiagonal_scores(q[row, 0, g, : total[row]], k[row, 0, : total[row]], 6, 3)
        for (i, j), score in scores.items():
            if i >= 2:
                want[row, 0, g, i - 2, j] = score
    np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_allclose(want.sum(axis=4)[:, 0, 0], [[2, 2, 2], [2, 0, 0]], atol=1e-9)


def test_the_attention_that_chooses_has_the_model_s_soft_cap():
    """Under a cap of 2 no logit is 4 below another one, and BLASST skips what is log(576 / 10) below: nothing."""
    q, k, v = random_tokens(3, 1, 1, 1, 576, 8)
    quiet = jnp.asarray(k).at[..., 192:384, :].multiply(0.05)
    prompts = [Prefill(method=Full(), pattern=Pattern("blasst", factor=x)).sparse_prompt for x in (10, 1e-9)]
    skipping, whole = (lambda x=x: x.attend(jnp.asarray(9 * q), quiet, v, 0, jnp.array([576]))[0] for x in prompts)
    assert np.abs(skipping() - whole()).max() > 1e-5
    q, k, total, at = jnp.asarray(3 * q[..., :64, :]), k[..., :64, :], jnp.array([64]), np.arange(64)
    sparse = any_example("prefill").sparse_prompt
    with soft_cap(2.0):
        np.testing.assert_array_equal(skipping(), whole())
        votes, _ = sparse._votes(q, jnp.asarray(k), 0, total)
    logits = 2 * np.tanh(np.asarray(q)[0, 0, 0, -sparse.window :] @ k[0, 0].T / np.sqrt(8) / 2)
    weight = np.where(at <= at[-sparse.window :, None], np.exp(logits), 0)
    np.testing.assert_allclose(votes[0, 0, 0], (weight / weight.sum(axis=1, keepdims=True)).sum(axis=0), atol=1e-5)


def test_a_prompt_that_fits_into_every_pattern_is_read_densely():
    """The patterns say so of a number of slots."""
    prompt = Prefill(method=Full(), pattern=(MIXED[:1], MIXED[1:2])).for_layer(1, 2).sparse_prompt
    assert prompt.heads == MIXED[1:2] and prompt.covers(5) and not prompt.covers(6)
    assert not Prefill(method=Full(), pattern=(MIXED, MIXED), **SMALL_PATTERNS).for_layer(0, 2).sparse_prompt.covers(4)
    assert Prefill(method=Full(), pattern=KINDS["block_sparse"]).for_layer(0, 1).sparse_prompt.covers(3 * 64)
    assert Pattern("xattention").covers(128, 64) and not Pattern("xattention").covers(129, 64)
    assert Pattern("xattention", share=1).covers(10**6, 64) and Pattern("flexprefill", share=1).covers(10**6, 64)
    assert Pattern("flexprefill").covers(1024, 64) and not Pattern("flexprefill").covers(1025, 64)


# ---- files ----------------------------------------------------------------------------------------------------------


MODEL = TinyModel(num_layers=2, num_q_heads=4, num_kv_heads=2)
LAYER = {"0": ["vertical_and_slash", 30, 800, 0.9], "1": ["stream_llm", 100, 900, 0.5], "2": ["block_sparse", 7, 1, 3]}


def write(path, *layers):
    path.write_text(json.dumps(layers))
    return path


def test_files_are_read_as_minference_writes_them(tmp_path):
    layer = {**LAYER, "3": ["vertical_and_slash", 1000, 6096, 11]}
    table = patterns(write(tmp_path / "best.json", layer, dict(reversed(layer.items()))), MODEL)
    assert table[0] == table[1] == (
        Pattern("vertical_slash", 30, 800), Pattern("a_shape", 100, 900), Pattern("block_sparse", blocks=7), Pattern(),
    )  # fmt: skip
    scores = [[0.9, 0.5, 3, 11]] * 2
    assert json.loads(to_file(table, scores)) == [layer, layer]
    method = Prefill(method=SnapKV(), pattern=table)
    assert method.for_layer(1, 2).pattern == table[1]


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no patterns in .*which experiments.heads.patterns writes"):
        patterns(tmp_path / "none.json", MODEL)
    with pytest.raises(FileNotFoundError, match="patterns.json: expected a file"):
        patterns(tmp_path, MODEL)
    path = write(tmp_path / "best.json", LAYER, LAYER)
    with pytest.raises(ValueError, match="2 layers of 3 heads, the model has 2 layers of 4 query heads.*of another model"):
        patterns(path, MODEL)
    for wrong, reason in (
        ([{"0": ["vertical_and_slash", -1, 800, 0]}], "columns must be a whole number of at least 0, got -1"),
        ([{"0": ["dilated", 1, 800, 0]}], "'dilated'"),
        ([{"0": ["stream_llm", 1]}], "not enough values"),
        ([{"1": ["stream_llm", 1, 8, 0]}], "no entry 0"),
        ([[1]], "no attribute"),
        (3, "not iterable"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=rf"holds no patterns, expected \[.*got: .*{reason}"):
            patterns(path, MODEL)


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_patterns_of_another_model_are_refused():
    method = Prefill(method=SnapKV(budget=12, obs_window=5), pattern=(MIXED[:2],) * 2, **SMALL_PATTERNS)
    with pytest.raises(ValueError, match="for 2 layers of 2 query heads, the model has 2 layers of 4: .*of another model"):
        check_sizes(PerLayer(layers={}, default=method), MODEL)
    with pytest.raises(ValueError, match="patterns for each of the model's 3 layers, got 2"):
        method.for_layer(0, 3)


def test_wrong_knobs_are_refused():
    with pytest.raises(ValueError, match="Pattern: kind must be one of 'vertical_slash', 'a_shape', .*, got 'vs'"):
        Pattern("vs")
    with pytest.raises(ValueError, match="Pattern: diagonals must be a whole number of at least 1, got 0"):
        Pattern(diagonals=0)
    for name, wrong in (("share", 0), ("share", 1.5), ("tau", -1), ("min_budget", 0)):
        with pytest.raises(ValueError, match=f"Pattern: {name} must be a .*, got {wrong}"):
            Pattern(**{name: wrong})
    with pytest.raises(ValueError, match="kind 'a_shape' reads columns and diagonals only, got blocks=5, tau=0.5, of an"):
        Pattern("a_shape", columns=5, diagonals=5, blocks=5, tau=0.5)
    for pattern in (KINDS["xattention"], (MIXED, MIXED)):
        with pytest.raises(ValueError, match="Prefill: block must be a multiple of stride=8 tokens, got 4"):
            Prefill(method=Full(), pattern=pattern, block=4)
    for wrong in ("a_shape", (), ((Pattern(),), (Pattern(), Pattern())), (Pattern(), 3)):
        with pytest.raises(ValueError, match=r"Prefill: pattern must be"):
            Prefill(method=Full(), pattern=wrong)
    with pytest.raises(ValueError, match="Prefill: chunk must be a multiple of block=64 tokens, got 100"):
        Prefill(method=Full(), chunk=100)


@pytest.mark.parametrize("kind", READ)
def test_a_kind_takes_the_numbers_that_it_reads(kind):
    other = {"columns": 7, "diagonals": 9, "blocks": 3, "share": 0.5, "tau": 0.4, "min_budget": 5}
    for name, number in other.items():
        if name in READ[kind]:
            assert vars(Pattern(kind, **{name: number}))[name] == number
        else:
            with pytest.raises(ValueError, match=f"kind '{kind}' reads .* only, got {name}={number}, of"):
                Pattern(kind, **{name: number})


def test_a_chunk_that_begins_inside_of_a_block_is_refused():
    """Another layer may have pieces of its own."""
    prompt = Prefill(method=Full(), **SMALL_PATTERNS).for_layer(0, 1).sparse_prompt
    query, key = np.zeros((1, 1, 1, 6, 8)), np.zeros((1, 1, 20, 8))
    with pytest.raises(ValueError, match="whole blocks of 4 tokens, got chunks of 6 tokens, which another layer needs"):
        prompt.attend(query, key, key, start=np.int32(6), length=np.array([6]))


def _all_of_it(tau):
    return Pattern("flexprefill", share=1.0, tau=float(tau), min_budget=1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((x, "vertical_slash") for x in ("quest", "pariskv", "think", "duoattention", "sentencekv", "kvzip", "periodic")),
        *((x, "vertical_slash") for x in ("magicpig", "retroinfer")),
        *((x, kind) for x in ("quest", "snapkv") for kind in ("xattention", "flexprefill")),
    ],
)
def test_methods_decode_after_a_sparse_prompt_as_after_a_dense_one(name, kind):
    """A pattern with room for everything changes nothing."""
    inner, everything = any_example(name), generous("prefill").pattern
    if kind != "vertical_slash":  # the last head has fewer blocks than the prompts, or they would be read densely
        heads = [Pattern(kind, share=1.0) if kind == "xattention" else _all_of_it(at) for at in range(3)]
        everything = ((*heads, Pattern("block_sparse", blocks=12)),) * TINY.num_layers
    caches = [read(x, config=TINY) for x in (inner, Prefill(method=inner, pattern=everything, **SMALL_PATTERNS))]
    np.testing.assert_allclose(*(cache.logits for cache in caches), atol=1e-4)
    made = [kvjax.generate(tiny_params(), cache, max_new_tokens=9, eos_token_ids=()) for cache in caches]
    np.testing.assert_array_equal(*(x.tokens for x in made))
    np.testing.assert_array_equal(*(x.stats.attended for x in made))
