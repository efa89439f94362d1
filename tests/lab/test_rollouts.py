"""Log-ratios of rollouts: importance weights by their definition, a method that keeps everything, the command."""

import json

import numpy as np
import pytest

from experiments.lab.rollouts import main, mismatch

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_weights_are_those_of_the_definition():
    """Of rows that end early, and of an answer that outweighs all others."""
    rng = np.random.default_rng(0)
    sampled, counts = rng.normal(-2, 1, (5, 7)), np.array([7, 3, 1, 7, 5])
    scored = sampled + rng.normal(0, 0.5, sampled.shape)
    got = mismatch(sampled, scored, counts)
    ratios = [scored[row, :count] - sampled[row, :count] for row, count in enumerate(counts)]
    each, weights = np.concatenate(ratios), np.exp([ratio.sum() for ratio in ratios])
    np.testing.assert_allclose(got["value"], -each.mean(), rtol=1e-3)
    np.testing.assert_allclose(got["mean_weight"], np.exp(each).mean(), rtol=1e-3)
    np.testing.assert_allclose(got["effective_answers"], weights.sum() ** 2 / (5 * (weights**2).sum()), rtol=1e-3)
    np.testing.assert_allclose(got["outside"], 100 * ((each > np.log(2)) | (each < -np.log(2))).mean(), rtol=1e-3)
    assert got["tokens"] == counts.sum() and got["tail"] <= got["farthest"]
    heavy = mismatch(sampled, sampled + np.array([[9.0]] + [[0]] * 4), np.full(5, 7))
    np.testing.assert_allclose(heavy["effective_answers"], 1 / 5, rtol=1e-3)


def test_a_method_that_keeps_everything_is_full(directory, tmp_path, capsys):
    """The second call measures no row again."""
    out = tmp_path / "rollouts.json"
    words = ["--model", str(directory), "--length", "512", "--tokens", "8", "--samples", "2", "--out", str(out)]
    assert main([*words, "--methods", "snapkv", "--budgets", "1/1"]) == 0
    first = json.loads(out.read_text())["metrics"]
    assert main([*words, "--methods", "snapkv,streamingllm", "--budgets", "1/8"]) == 0
    rows = json.loads(out.read_text())["metrics"]
    assert rows[:2] == first and [row["method"] for row in rows[2:]] == ["snapkv(budget=1/8)", "streamingllm(budget=1/8)"]
    assert max(row["farthest"] for row in first) < 1e-4 < min(row["farthest"] for row in rows[2:])
    assert "| StreamingLLM(budget=1/8) |" in capsys.readouterr().out
