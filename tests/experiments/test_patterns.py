"""The search of patterns: attention that candidates keep beside float64 loops, and the command on a tiny model."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.heads import patterns
from kvjax import wrappers
from kvjax.methods import Full
from kvjax.wrappers import Pattern
from tests.experiments.test_heads import CONFIG
from tests.harness import SMALL_PATTERNS, random_tokens
from tests.kvjax.wrappers.test_sparse_prefill import KINDS
from tests.oracles import minference
from tests.oracles.plain import softmax
from tests.tiny_models import write_model

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.thorough
def test_attention_kept_equals_float64_loops():
    """Of ragged rows; a candidate with room for everything keeps everything."""
    known, rules = (*KINDS.values(), Pattern(diagonals=20)), {**SMALL_PATTERNS, "chunk": 64}
    q, k, v = random_tokens(3, 2, 2, 2, 23, 8)
    method = patterns.Measuring(inner=Full(), patterns=known, knobs=tuple(rules.items()))
    got = method.kept(*map(jnp.asarray, (q, k, v)), jnp.array([23, 9], jnp.int32))
    for row, length in enumerate((23, 9)):
        for h, g, at in np.ndindex(2, 2, len(known)):
            query, key, pattern = q[row, h, g, :length], k[row, h, :length], dataclasses.astuple(known[at])
            seen = minference.seen_keys(query.astype(np.float64), key.astype(np.float64), pattern, **rules)
            each = [softmax(key[: t + 1] @ query[t] / np.sqrt(8))[sorted(keys)].sum() for t, keys in enumerate(seen)]
            np.testing.assert_allclose(got[row, h, g, at], np.mean(each), atol=1e-5)
    assert (np.asarray(got)[0, ..., :3] < 0.99).all() and np.allclose(got[1, ..., -1], 1, atol=1e-5)


def test_a_head_gets_the_candidate_that_keeps_most():
    known = patterns.candidates(0.1)
    assert known[0] == Pattern("a_shape", 10, 80) and known[-1] == Pattern("block_sparse", blocks=2) and len(known) == 6
    found = np.zeros((2, 2, 6))
    found[0, 1, 4], found[1, 0, 5], found[1, 1, 2:4] = 0.7, 0.5, 0.3
    table, scores = patterns.best(found, known)
    assert table == ((known[0], known[4]), (known[5], known[2])) and scores == [[0, 0.7], [0.5, 0.3]]
    with pytest.raises(ValueError, match="scale must be a finite number above 0, got 0"):
        patterns.PatternSettings(scale=0)


@pytest.mark.slow
def test_the_command_writes_patterns_that_load(tmp_path, capsys):
    write_model(tmp_path / "model", dataclasses.replace(CONFIG, vocab_size=5120))
    out = tmp_path / "patterns.json"
    given = ["--model", str(tmp_path / "model"), "--length", "256", "--samples", "1", "--scale", "0.05"]
    assert patterns.main([*given, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "| pattern | size | attention kept | heads |" in printed and "16 heads, 1 samples" in printed
    table = wrappers.patterns(out, CONFIG)
    assert len(table) == 4 and {head.kind for row in table for head in row} <= set(KINDS)
    assert patterns.main(["--scale", "nan"]) == 2
