"""`experiments.speed.offload` on a tiny random model: rows, bytes over the bus, shares of the layers, prompts."""

import dataclasses
import functools
import json
import re

import jax
import pytest

import kvjax
from experiments.records import Results
from experiments.speed import Bandwidth
from experiments.speed import bench as speed_bench
from experiments.speed import offload as experiment
from experiments.speed.filled_cache import filled_cache
from experiments.speed.settings import SpeedSettings
from kvjax.accounting.memory import memory_needed
from kvjax.decoding.layer_bytes import placed_bytes
from kvjax.methods import FreeKV, MagicPIG
from kvjax.protocol.method import num_bytes
from models import ModelConfig, random_params

pytestmark = pytest.mark.usefixtures("quick_compile")

TINY_SPEED = ModelConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=8,
    qk_norm=True, max_position_embeddings=8192,
)  # fmt: skip


@pytest.fixture
def command(monkeypatch, tmp_path):
    """`python -m experiments.speed.offload` on a tiny model, without measuring bandwidths: gives its record's path."""
    monkeypatch.setitem(speed_bench.MODELS, "tiny", lambda: TINY_SPEED)
    fast = Bandwidth(bytes_per_second=1e9, size=1, variants={})
    monkeypatch.setattr(speed_bench, "measure_bandwidth", lambda: fast)
    monkeypatch.setattr(experiment, "link_bandwidth", lambda: 1e6)

    def run(*arguments):
        out = tmp_path / "offload.json"
        fixed = ["--model", "tiny", "--lengths", 4096, "--repeats", 1, "--methods", "full,pariskv", "--out", out]
        code = experiment.main(list(map(str, [*fixed, *arguments])))
        if code:
            raise SystemExit(code)
        return out

    return run


@pytest.mark.slow
def test_every_method_decodes_offloaded_and_resident(command, capsys):
    """Both ways of every method, the bytes over the bus, a table and a figure; a second run measures nothing."""
    arguments = ["--set", "pariskv.buffer=32", "--batches", 2, "--tokens", 3]
    out = command(*arguments)
    said = capsys.readouterr().out
    made = json.loads(out.read_text())
    rows = {(x["name"], x["method"], x["batch"]): x for x in made["metrics"]}
    assert len(rows) == 3 and not any(x["error"] for x in rows.values())
    paris = rows["offload", "pariskv", 2]
    # What is retrieved, at most: 100 of 2 rows x 2 heads, a key and a value of 8 float32 each.
    assert 0 < paris["bus_bytes"] <= 100 * 2 * 2 * 2 * 8 * 4 and 0.5 < paris["hot"] < 1
    assert paris["host_bytes"] > rows["resident", "pariskv", 2]["host_bytes"] == 0
    assert "MB over the bus" in said and "| ParisKV | 4096 | 2 |" in out.with_suffix(".md").read_text()
    command(*arguments)
    again = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("offload", "resident"))]
    assert again and all(line.endswith("from the record") for line in again)
    with pytest.raises(SystemExit):
        command(*arguments, "--share", 1.5)
    assert "share must be 'fit' or a number above 0 and at most 1, got 1.5" in capsys.readouterr().err


@pytest.mark.thorough
def test_the_systems_that_keep_an_index_on_the_device(command, monkeypatch):
    """What their steps read over the bus, on which a slow link's floor depends; ShadowKV's is by its accounting."""
    methods = ["pqcache", "shadowkv", "socket", "retrievalattention", "magicpig_8k", "retroinfer", "freekv"]
    sizes = ["--tokens", 2, "--no-resident", "--set", "shadowkv.rank=8", "--set", "magicpig_8k.num_bits=4"]
    monkeypatch.setattr(FreeKV, "num_dense_layers", 0)  # the only layer that is timed is not a dense one
    monkeypatch.setattr(MagicPIG, "dense_every", 0)
    rows = {x["method"]: x for x in json.loads(command("--methods", ",".join(methods), *sizes).read_text())["metrics"]}
    assert list(rows) == methods and not any(row["error"] for row in rows.values())
    for name, row in rows.items():
        assert row["name"] == "offload" and row["layers"] == 1 and 0 < row["hot"] < 1, name
        near = row["weight_bytes_read"] + row["cache_bytes_read"] - row["bus_bytes"]
        assert 0 < row["bus_bytes"] < row["cache_bytes_read"], name
        assert row["floor"] == max(near / 1e9, row["bus_bytes"] / 1e6) == row["bus_bytes"] / 1e6, name
    pair = 2 * 2 * 8 * 4  # a key and a value of float32 of 8 channels, 2 heads
    found = int((4096 - 32) * 0.05)
    assert (found - 3) * pair <= rows["pqcache"]["bus_bytes"] <= found * pair  # the newest of them may have copies
    assert rows["shadowkv"]["bus_bytes"] == 1024 * pair / 2
    assert rows["socket"]["bus_bytes"] == 1024 * pair


@pytest.mark.thorough
def test_the_experiment_offloads_what_does_not_fit(command, monkeypatch, capsys):
    """`--share fit` leaves room to read a prompt, beside which one layer of three fits; without a prompt all three fit."""
    model = dataclasses.replace(TINY_SPEED, num_layers=3)
    monkeypatch.setitem(speed_bench.MODELS, "tiny", lambda: model)
    two = memory_needed(kvjax.make("pariskv", offload=0.67), model, batch=1, prompt_slots=4096, max_new_tokens=12)
    params = num_bytes(random_params(model, jax.random.key(0)))
    limit = two.device + two.staged + params
    monkeypatch.setattr(experiment, "bytes_limit", lambda: limit)
    monkeypatch.setattr(speed_bench, "bytes_limit", lambda: limit)
    monkeypatch.setattr(experiment, "offload_share", functools.partial(kvjax.offload_share, spare=0))
    out = command("--tokens", 2, "--share", "fit", "--methods", "pariskv")
    rows = {(x["name"], x["method"]): x for x in json.loads(out.read_text())["metrics"]}
    assert rows["offload", "pariskv"]["layers"] == 2 and rows["offload", "pariskv"]["share"] == 2 / 3
    assert not rows["resident", "pariskv"]["out_of_memory"]
    limit = params
    command("--tokens", 3, "--share", "fit", "--methods", "pariskv")
    assert re.search(r"offload +pariskv +4096 +1 out of memory", capsys.readouterr().out)


@pytest.mark.slow
def test_prompts_have_a_row_for_each_method_that_offloads(command, capsys):
    """With --prompts: a row per method that offloads, with what it put into host memory, in a table of its own."""
    out = command("--prompts", "--chunk-size", 1024)
    assert re.search(r"full +4096 +1 has nothing to offload", capsys.readouterr().out)
    (row,) = json.loads(out.read_text())["metrics"]
    # A key and a value of 8 float32 each for every slot, 2 heads.
    assert row["error"] is None and row["host_bytes"] == (4096 + 32) * 2 * 2 * 8 * 4
    table = out.with_suffix(".md").read_text()
    assert "### Prompts" in table and "| ParisKV | 4096 | 1 | 1024 |" in table and "TPOT" not in table
    with pytest.raises(SystemExit):
        command("--chunk-size", 1024)
    assert "--chunk-size has no meaning without --prompts" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [None, pytest.param("int8", marks=pytest.mark.thorough)])
def test_the_search_for_the_largest_batch_begins_at_what_fits_on_the_device(kind, tmp_path, monkeypatch):
    """Of a row with keys and values in host memory, only what stays on the device counts."""
    monkeypatch.setitem(speed_bench.MODELS, "tiny", lambda: TINY_SPEED)
    settings = SpeedSettings(model="tiny", lengths=(128,), tokens=1, repeats=1)
    bench = speed_bench.Bench(settings, Results(tmp_path / "speed.json", "speed", {}))
    method = kvjax.make("pariskv", offload=True, buffer=32)
    cache = filled_cache(method, TINY_SPEED, batch=2, length=128, max_new_tokens=bench.room, kv_dtype=kind)
    device, host = placed_bytes(cache.layers)
    assert bench.cache_bytes(method, 128, 2, kind) == device and host > 0
