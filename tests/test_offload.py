"""Offloaded caches: the same tokens as resident ones, whatever the method, the batch, the chunks and the calls."""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
import pytest
from harness import example, read, tiny_params

import kvjax
from experiments import offload as experiment
from experiments import speed_bench, speed_floor
from models import ModelConfig

OFFLOADED = {
    "pariskv": {},
    "sentencekv": {},
    "quest": {},
    "chess": {},
    "tokenselect": {},
    "mosaickv": {"strategy": "dynamic", "buffer": 16, "segment": 32, "lifetime": 4.0},
}


TINY_SPEED = ModelConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=8,
    qk_norm=True, max_position_embeddings=8192,
)  # fmt: skip


def memory_kinds(cache):
    kinds = [x.sharding.memory_kind for state in cache.layers for x in jax.tree.leaves(state)]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def both(name, **knobs):
    return example(name, **knobs), example(name, offload=True, **knobs)


def tokens_of(method, chunk_size=512, rows=None, new=24, parts=(24,), extend=None):
    cache = read(method, rows=rows, chunk_size=chunk_size, max_new_tokens=64)
    if extend is not None:
        cache = kvjax.extend(tiny_params(), cache, extend)
    out = []
    for part in parts:
        made = kvjax.generate(tiny_params(), cache, max_new_tokens=part, eos_token_ids=())
        out.append(np.asarray(made.tokens))
        cache = made.cache
    return np.concatenate(out, axis=1), cache


@pytest.mark.parametrize("name", OFFLOADED)
@pytest.mark.parametrize("chunk", [512, 16])
def test_offloaded_equals_resident(name, chunk):
    """Ragged rows, one chunk and several, generation in parts that are no multiple of anything, a question in between."""
    resident, offloaded = both(name, **OFFLOADED[name])
    question = [[3, 1, 4, 1, 5], [9, 2], [6]]
    plain, kept = tokens_of(resident, chunk, parts=(7, 1, 24), extend=question)
    hosted, cache = tokens_of(offloaded, chunk, parts=(7, 1, 24), extend=question)
    np.testing.assert_array_equal(hosted, plain)
    kinds = memory_kinds(cache)
    assert kinds.get("pinned_host", 0) >= len(cache.layers)
    assert "pinned_host" not in memory_kinds(kept)


def test_the_experiment(monkeypatch, capsys, tmp_path):
    """Both ways of every method, the bytes over the bus, a table and a figure; a second run measures nothing."""
    monkeypatch.setitem(speed_bench.MODELS, "tiny", lambda: TINY_SPEED)
    fast = speed_floor.Bandwidth(bytes_per_second=1e9, size=1, variants={})
    monkeypatch.setattr(speed_bench, "measure_bandwidth", lambda: fast)
    monkeypatch.setattr(experiment, "link_bandwidth", lambda: 5e10)
    out = tmp_path / "offload.json"
    fixed = ["--model", "tiny", "--lengths", 4096, "--batches", "1,2", "--tokens", 3, "--repeats", 1, "--out", out]
    argv = ["offload", "--methods", "full,pariskv,sentencekv", "--set", "pariskv.buffer=32", *fixed]
    monkeypatch.setattr(sys, "argv", [str(x) for x in argv])
    experiment.main()
    said = capsys.readouterr().out
    made = json.loads(out.read_text())
    rows = {(x["name"], x["method"], x["batch"]): x for x in made["metrics"]}
    assert len(rows) == 10 and not any(x["error"] for x in rows.values())
    paris = rows["offload", "pariskv", 2]
    # What is retrieved, at most: 100 of 2 rows x 2 heads x 2 layers, a key and a value of 8 float32 each.
    assert 0 < paris["bus_bytes"] <= 100 * 2 * 2 * 2 * 2 * 8 * 4 and 0.5 < paris["hot"] < 1
    assert paris["host_bytes"] > rows["resident", "pariskv", 2]["host_bytes"] == 0
    assert rows["offload", "sentencekv", 1]["bus_bytes"] > 0
    assert "MB over the bus" in said and "| pariskv | 4096 | 2 |" in out.with_suffix(".md").read_text()
    assert out.with_suffix(".png").stat().st_size > 10000
    experiment.main()
    assert "offload   pariskv" not in capsys.readouterr().out
