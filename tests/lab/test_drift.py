"""The drift experiment end to end on a tiny random model, and its search against exact answers."""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.answering import LoadedModel
from experiments.lab.ablations import cluster_search as search
from experiments.lab.ablations import figures
from experiments.lab.ablations.__main__ import main
from experiments.lab.ablations.cluster_drift import CLUSTERS, Course, make_text
from experiments.records import save
from kvjax.methods.pariskv import hashing
from tests.tiny_models import SHIPPED

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.slow
def test_drift_records_its_course(directory, capsys, tmp_path, monkeypatch):
    course = Course(prompt_tokens=320, new_tokens=64, every=32, k=10, num_sink=4, num_local=16, seed=3)
    asked = []
    monkeypatch.setattr(Course, "within", lambda *given: asked.append(given) or course)
    assert main(["drift", "--model", str(directory), "--seed", "3", "--out", str(tmp_path)]) == 0
    assert asked == [(2048, 3)]
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "drift.json").read_text())
    assert len(found["metrics"]) == 2 * 2 * len(CLUSTERS) * 2
    drawn, usual = figures(found)
    assert usual == ["drift"] and save(drawn["drift"]()).startswith(b"\x89PNG")
    pairs = {(m["name"], m["clusters"], m["shares"], m["generated"]): m["value"] for m in found["metrics"]}
    for (stage, *rest), value in pairs.items():
        assert 0 <= value <= 100 and (stage == "coarse_recall" or value <= pairs["coarse_recall", *rest])
    assert "Its recall does not fall along a generation." in said  # the claims of the page judge the record


def test_a_course_fits_the_window():
    assert Course.within(131072, 0) == Course()
    assert Course.within(8192, 1) == Course(prompt_tokens=512, new_tokens=7500, seed=1)  # the documentation's record


def test_a_text_beyond_the_positions_is_refused_before_it_is_made():
    model = LoadedModel("small", {}, SHIPPED, None, pathlib.Path("nowhere"))
    with pytest.raises(ValueError, match="continuation together must be at most 2048 tokens, .* got 2049"):
        make_text(model, Course(new_tokens=1))


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
