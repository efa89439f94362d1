"""`Prefill`: what a sparse prompt attends to, beside float64 loops; files of patterns; what is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import kvjax
from kvjax import Pattern, Prefill
from kvjax.checks import check_sizes
from kvjax.methods import H2O, Full, KeyDiff, Quest, SnapKV
from kvjax.patterns import to_file
from kvjax.testing.model import TinyModel
from tests.harness import (
    SMALL_PATTERNS,
    TINY,
    any_example,
    drive,
    frequencies,
    generous,
    random_tokens,
    read,
    tiny_params,
)
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
MIXED = (*KINDS.values(), Pattern("flexprefill", share=0.5, tau=1.0, min_budget=4))  # of the query heads of a layer


def compare(pattern, lengths, chunk=SMALL_PATTERNS["chunk"], poison=False, seed=3):
    """Assert that a layer's prompts are what the loops say; returns the share of the keys that are left out."""
    inv_freq, rules = frequencies(8), {**SMALL_PATTERNS, "chunk": chunk}
    group = len(pattern[0]) // 2 if isinstance(pattern, tuple) else 2
    q, k, v = random_tokens(seed, len(lengths), 2, group, max(lengths) + 1, 8)
    method = Prefill(method=Full(), pattern=pattern, **rules)
    got = drive(method, q, k, v, np.array(lengths), prompt=max(lengths), inv_freq=inv_freq, poison=poison)
    heads = pattern[0] if isinstance(pattern, tuple) else (pattern,)
    heads = [dataclasses.astuple(x) for x in heads]
    for row, length in enumerate(lengths):
        queries, keys = (rotate_all(x[row][..., :length, :], inv_freq) for x in (q, k))
        values = np.asarray(v[row][:, :length], np.float64)
        want = minference.prompt(queries, keys, values, heads, **rules)
        np.testing.assert_allclose(got.prompt[row, :, :, :length], want, atol=1e-5, rtol=0)
    return got


def test_every_head_attends_as_its_pattern_says():
    """All patterns in one layer; a ragged batch, whose rows end in the first chunk and within a block of the second."""
    compare((MIXED, MIXED), (27, 9), poison=True)
    q, k = (rotate_all(x[0], frequencies(8)) for x in random_tokens(3, 2, 2, 3, 28, 8)[:2])
    for at, x in enumerate(MIXED):
        seen = minference.seen_keys(q[at // 3, at % 3], k[at // 3], dataclasses.astuple(x), **SMALL_PATTERNS)
        assert any(len(keys) < t for t, keys in enumerate(seen)), "the setting leaves nothing out"


@pytest.mark.thorough
@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_one_pattern_for_all_heads(kind, chunk):
    compare(KINDS[kind], (40, 23, 17, 9), chunk, poison=True, seed=5)


def test_a_prompt_that_fits_into_every_pattern_is_read_densely():
    """The patterns say so of a number of slots."""
    prompt = Prefill(method=Full(), pattern=(MIXED[:1], MIXED[1:2])).for_layer(1, 2).sparse_prompt
    assert prompt.heads == MIXED[1:2] and prompt.covers(5) and not prompt.covers(6)
    assert not Prefill(method=Full(), pattern=(MIXED, MIXED), **SMALL_PATTERNS).for_layer(0, 2).sparse_prompt.covers(4)
    assert Prefill(method=Full(), pattern=KINDS["block_sparse"]).for_layer(0, 1).sparse_prompt.covers(3 * 64)


# ---- files ----------------------------------------------------------------------------------------------------------


MODEL = TinyModel(num_layers=2, num_q_heads=4, num_kv_heads=2)
LAYER = {"0": ["vertical_and_slash", 30, 800, 0.9], "1": ["stream_llm", 100, 900, 0.5], "2": ["block_sparse", 7, 1, 3]}


def write(path, *layers):
    path.write_text(json.dumps(layers))
    return path


def test_files_are_read_as_minference_writes_them(tmp_path):
    layer = {**LAYER, "3": ["vertical_and_slash", 1000, 6096, 11]}
    table = kvjax.patterns(write(tmp_path / "best.json", layer, dict(reversed(layer.items()))), MODEL)
    assert table[0] == table[1] == (
        Pattern("vertical_slash", 30, 800), Pattern("a_shape", 100, 900), Pattern("block_sparse", blocks=7), Pattern(),
    )  # fmt: skip
    scores = [[0.9, 0.5, 3, 11]] * 2
    assert json.loads(to_file(table, scores)) == [layer, layer]
    method = Prefill(method=SnapKV(), pattern=table)
    assert method.for_layer(1, 2).pattern == table[1] and method.heads_differ


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no patterns in .*which experiments.insight.patterns writes"):
        kvjax.patterns(tmp_path / "none.json", MODEL)
    path = write(tmp_path / "best.json", LAYER, LAYER)
    with pytest.raises(ValueError, match="2 layers of 3 heads, the model has 2 layers of 4 query heads.*of another model"):
        kvjax.patterns(path, MODEL)
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
            kvjax.patterns(path, MODEL)


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_patterns_of_another_model_are_refused():
    method = Prefill(method=SnapKV(budget=12, obs_window=5), pattern=(MIXED[:2],) * 2, **SMALL_PATTERNS)
    with pytest.raises(ValueError, match="for 2 layers of 2 query heads, the model has 2 layers of 4: .*of another model"):
        check_sizes(kvjax.PerLayer(layers={}, default=method), MODEL)
    with pytest.raises(ValueError, match="patterns for each of the model's 3 layers, got 2"):
        method.for_layer(0, 3)


def test_what_cannot_be_wrapped_is_refused():
    with pytest.raises(ValueError, match="Prefill: H2O needs the attention of the whole prompt"):
        Prefill(method=H2O())
    with pytest.raises(ValueError, match=r"Prefill: method must be a method that chooses cache slots \(a SlotMethod\)"):
        Prefill(method=KeyDiff())
    for wrap in (
        lambda x: kvjax.Twilight(method=x),
        lambda x: kvjax.DenseBelow(method=x, length=9),
        lambda x: kvjax.Stages(evict=SnapKV(), retrieve=x),
        lambda x: Prefill(method=x),
    ):
        with pytest.raises(ValueError, match="must not read its prompt sparsely: Prefill goes around all others"):
            wrap(Prefill(method=Quest()))


def test_wrong_knobs_are_refused():
    with pytest.raises(ValueError, match="Pattern: kind must be one of 'vertical_slash', 'a_shape', .*, got 'vs'"):
        Pattern("vs")
    with pytest.raises(ValueError, match="Pattern: diagonals must be a whole number of at least 1, got 0"):
        Pattern(diagonals=0)
    for wrong in ("a_shape", (), ((Pattern(),), (Pattern(), Pattern())), (Pattern(), 3)):
        with pytest.raises(ValueError, match=r"Prefill: pattern must be a kvjax\.Pattern or one for each query head"):
            Prefill(method=Full(), pattern=wrong)
    with pytest.raises(ValueError, match="Prefill: chunk must be a multiple of block=64 tokens, got 100"):
        Prefill(method=Full(), chunk=100)


def test_a_chunk_that_begins_inside_of_a_block_is_refused():
    """Another layer may have pieces of its own."""
    prompt = Prefill(method=Full(), **SMALL_PATTERNS).for_layer(0, 1).sparse_prompt
    query, key = np.zeros((1, 1, 1, 6, 8)), np.zeros((1, 1, 20, 8))
    with pytest.raises(ValueError, match="pieces of whole blocks of 4 tokens, but another layer reads 6 at once"):
        prompt.attend(query, key, key, start=np.int32(6), length=np.array([6]))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["quest", "pariskv", "think", "duoattention", "sentencekv", "kvzip", "periodic"])
def test_methods_decode_after_a_sparse_prompt_as_after_a_dense_one(name):
    """A pattern with room for everything changes nothing."""
    inner, everything = any_example(name), generous("prefill").pattern
    caches = [read(x, config=TINY) for x in (inner, Prefill(method=inner, pattern=everything, **SMALL_PATTERNS))]
    np.testing.assert_allclose(*(cache.logits for cache in caches), atol=1e-4)
    made = [kvjax.generate(tiny_params(), cache, max_new_tokens=9, eos_token_ids=()) for cache in caches]
    np.testing.assert_array_equal(*(x.tokens for x in made))
    np.testing.assert_array_equal(*(x.stats.attended for x in made))
