"""The peers in PyTorch: what is said where torch is missing, and a tiny model end to end where it is installed."""

from __future__ import annotations

import importlib.util
import json
import sys

import jax
import pytest

from experiments.cli import read_record
from experiments.lab import attention_peers
from experiments.lab.peers import __main__ as peers
from experiments.lab.peers.report import peer_tables
from experiments.lab.peers.settings import PRESSES, PeersSettings
from experiments.records import Results, versions
from experiments.speed import MODELS, budget_at
from kvjax import registry
from models import ModelConfig

TINY = ModelConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=8,
    qk_norm=False, max_position_embeddings=512, dtype="float32",
)  # fmt: skip


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_a_missing_package_is_one_sentence(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", peers)  # stands for one that is there: any module
    monkeypatch.setitem(sys.modules, name, None)  # which makes its import fail
    assert peers.main(["--out", str(tmp_path / "peers.json")]) == 2
    said = capsys.readouterr().err
    assert f" needs {name}, which is not installed here: pip install torch transformers" in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"methods": ["quest"]}, "methods: expected one of full, snapkv"),
        ({"caches": ["paged"]}, "caches"),
        ({"model": "gpt"}, "unknown model 'gpt'"),
        ({"mode": "fast"}, "mode"),
        ({"lengths": [0]}, "lengths"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        PeersSettings.from_mapping(wrong, "a file")


def test_presses_are_methods_with_a_budget():
    assert {*PRESSES} <= set(registry.classes())
    assert {budget_at(name, 131072) for name in PRESSES} == {1024} and budget_at("snapkv", 256) == 64


def test_a_record_of_another_device_asks_nothing_of_jax(monkeypatch, tmp_path):
    """JAX would take most of the memory of the GPU that torch measures on."""

    def start():
        raise AssertionError("JAX was started")

    monkeypatch.setattr(jax, "devices", start)
    card = {"platform": "gpu", "kind": "a card", "count": 1}
    results = Results(tmp_path / "peers.json", "peers", {}, device=card, packages=("pytest",))
    results.note("x", 1)
    record = json.loads(results.path.read_text())
    assert card.items() <= record["device"].items() and record["device"]["cpu_cores"]
    assert record["versions"]["pytest"] == pytest.__version__ and "pytest" not in versions()


def test_table_says_why_a_row_has_no_value():
    row = {"model": "m", "method": "snapkv", "cache": "static", "compiled": "default", "attention": "sdpa", "length": 8}
    row |= {"batch": 1, "value": None, "out_of_memory": False, "error": "kvpress is not installed: pip install kvpress"}
    text = peer_tables([row, {**row, "method": "full", "error": "OutOfMemoryError: 1 | 2", "out_of_memory": True}], {})
    said = "kvpress is not installed: pip install kvpress"
    assert f"| SnapKV | static | default | sdpa | 8 | 1 |  |  |  |  |  |  | {said} |" in text
    assert "|  | out of memory |" in text


# What follows needs torch. It is not in the project's environment: see docs/peers.md.


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """`python -m experiments.lab.peers` on a tiny model: what it prints, and its record."""
    for package in ("torch", "transformers"):
        pytest.importorskip(package, reason=f"the peers need {package}, which is not installed")
    import torch

    monkeypatch.setitem(MODELS, "tiny", lambda: TINY)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments):
        fixed = ["--model", "tiny", "--lengths", "128", "--tokens", "4", "--repeats", "2", "--out", str(tmp_path / "p.json")]
        assert peers.main([*fixed, *arguments]) == 0
        return capsys.readouterr().out, json.loads((tmp_path / "p.json").read_text())

    return run


needs_torch = pytest.mark.filterwarnings("default")  # torch and transformers warn of their own affairs


@needs_torch
@pytest.mark.slow
def test_full_end_to_end(command):
    printed, record = command("--methods", "full", "--caches", "static,dynamic", "--mode", "default", "--batches", "2")
    static, dynamic = record["metrics"]
    assert (static["cache"], static["compiled"]) == ("static", "default") and static["compile_seconds"] > 0
    assert (dynamic["cache"], dynamic["compiled"], dynamic["compile_seconds"]) == ("dynamic", "no", None)
    vectors = 2 * TINY.num_layers * 2 * TINY.num_kv_heads * TINY.head_dim * 4  # keys and values of 2 rows in float32
    assert dynamic["cache_bytes"] == 128 * vectors and static["cache_bytes"] == (128 + 3 * 5) * vectors
    for row in record["metrics"]:
        assert row["error"] is None and 0 < row["least"] <= row["value"] <= row["most"] and row["stored_tokens"] == 128
    assert {"torch", "transformers"} <= record["versions"].keys() and record["device"]["kind"] == "cpu"
    again, same = command("--methods", "full", "--caches", "static,dynamic", "--mode", "default", "--batches", "2")
    assert again.count("from the record") == 2 and same["metrics"] == record["metrics"]


@needs_torch
def test_filled_static_cache_continues_like_the_prompt(command):
    """A cache that is filled by hand is one that read a prompt: the next logits are the same."""
    import torch
    import transformers

    from experiments.lab.peers.filled_cache import dynamic_cache, static_cache
    from experiments.lab.peers.random_model import random_model

    model = random_model(TINY, "sdpa", torch.device("cpu"))
    text = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        read = transformers.DynamicCache(config=model.config)
        model(text[:, :8], past_key_values=read)
        layers = [(layer.keys.clone(), layer.values.clone()) for layer in read.layers]
        filled = (static_cache(model, layers, 2, 8, 5), dynamic_cache(model, layers))
        want = model(text).logits[:, -1]
        for cache in filled:
            torch.testing.assert_close(model(text[:, 8:], past_key_values=cache).logits[:, -1], want)


@needs_torch
def test_presses_leave_their_budget(command):
    printed, record = command("--methods", ",".join(PRESSES), "--caches", "dynamic", "--lengths", "1024")
    assert [row["method"] for row in record["metrics"]] == list(PRESSES)
    for row in record["metrics"]:
        if importlib.util.find_spec("kvpress") is None:
            assert row["missing"] and row["error"] == "kvpress is not installed: pip install kvpress"
        else:
            assert row["error"] is None and row["stored_tokens"] == row["budget"] == 256
            assert row["cache_bytes"] == 256 * 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4


@needs_torch
def test_a_row_without_memory_is_a_row(command, monkeypatch):
    import torch

    from experiments.lab.peers import bench

    def no_memory(*_, **__):
        try:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        except RuntimeError as error:
            raise RuntimeError("the compiler failed") from error

    monkeypatch.setattr(bench, "decode_times", no_memory)
    printed, record = command("--methods", "full", "--caches", "dynamic")
    (row,) = record["metrics"]
    assert row["out_of_memory"] and row["value"] is None and "out of memory" in printed


def test_one_call_of_attention_is_timed_and_right(tmp_path, monkeypatch):
    monkeypatch.setattr(
        attention_peers, "WORK", {"all": attention_peers.Work(2, 64), "pages": attention_peers.Work(1, 64, 2, 4)}
    )
    monkeypatch.setattr(attention_peers, "ITERATIONS", 1)
    assert attention_peers.main(["--out", str(tmp_path / "r.json")]) == 0
    rows = read_record(tmp_path / "r.json")["metrics"]
    assert [(row["work"], row["side"]) for row in rows] == [("all", "kvjax"), ("pages", "kvjax")]
    assert all(row["relative_error"] < 1e-2 for row in rows) and rows[1]["bytes_read"] == 2 * 2 * 8 * 8 * 128
