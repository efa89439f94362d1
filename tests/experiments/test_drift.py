"""The drift experiment end to end on a tiny random model, and its search against exact answers."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.drift import search
from experiments.drift.__main__ import main
from experiments.drift.settings import CLUSTERS, DriftSettings
from kvjax.methods.pariskv import hashing

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.slow
def test_drift_runs(directory, capsys, tmp_path):
    arguments = [
        "--model", directory, "--prompt-tokens", 320, "--new-tokens", 64, "--every", 32, "--k", 10, "--num-sink", 4,
        "--num-local", 16, "--out", tmp_path / "drift",
    ]  # fmt: skip
    assert main(list(map(str, arguments))) == 0
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "drift.json").read_text())
    assert len(found["metrics"]) == 2 * 2 * len(CLUSTERS) * 2
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")
    pairs = {(m["name"], m["clusters"], m["shares"], m["generated"]): m["value"] for m in found["metrics"]}
    for (stage, *rest), value in pairs.items():
        assert 0 <= value <= 100 and (stage == "coarse_recall" or value <= pairs["coarse_recall", *rest])
    assert "coarse and final recall" in said


def test_drift_refuses():
    for given, expected in (
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"rho": 0.1, "beta": 0.2}, "beta=0.2 and rho=0.1"),
        ({"prompt_tokens": 100, "every": 50}, "must hold at least k=100 tokens, got -170"),
    ):
        with pytest.raises(ValueError, match=expected):
            DriftSettings(**given)


def test_search_finds_everything_when_all_are_candidates():
    key = jax.random.key(0)
    keys = jax.random.normal(key, (2, 2, 300, 16))
    queries = jax.random.normal(jax.random.fold_in(key, 1), (2, 2, 1, 16))
    sizes = {"k": 20, "num_sink": 4, "num_local": 30}
    stored = jnp.int32(280)
    best = search.exact_best(keys, queries[:, :, 0], stored, **sizes)
    score = np.einsum("lhd,lhtd->lht", queries[:, :, 0], keys)
    score[..., :4] = score[..., 250:] = -np.inf
    assert (np.sort(np.nonzero(np.asarray(best[1, 0]))[0]) == np.sort(np.argsort(-score[1, 0])[:20])).all()
    clusters, codes, asked = search.sign_clusters(keys, queries, rotated=True)
    scale = jnp.float32(hashing.rotation_scale(16))
    arguments = (codes, asked[:, :, 0], scale, best, stored, jnp.int32(0))
    every, final = search.recall(clusters, *arguments, jnp.float32(1), jnp.float32(1), **sizes)
    assert (np.asarray(every) == 1).all() and 0.6 < float(final.mean()) <= 1
    few, _ = search.recall(clusters, *arguments, jnp.float32(0.5), jnp.float32(0.2), **sizes)
    assert 0.2 < float(few.mean()) < 1
    learned = search.learned_clusters(keys, queries, jnp.int32(300))
    few, _ = search.recall(learned, *arguments, jnp.float32(0.5), jnp.float32(0.2), **sizes)
    assert 0.2 < float(few.mean()) <= 1
