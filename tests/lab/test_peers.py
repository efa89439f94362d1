"""The peers in PyTorch: what is said where torch is missing, and a tiny model end to end where it is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys

import jax
import pytest

from experiments.lab.peers.quality import __main__ as quality
from experiments.lab.peers.quality import settings as quality_settings
from experiments.lab.peers.quality.report import peer_scores
from experiments.lab.peers.speed import __main__ as peers
from experiments.lab.peers.speed.report import peer_tables
from experiments.lab.peers.speed.settings import PRESSES, PeersSettings
from experiments.records import Results, versions
from experiments.speed import MODELS, budget_at
from kvjax import registry
from models import ModelConfig, builtin_directory

TINY = ModelConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=8,
    qk_norm=False, max_position_embeddings=512, dtype="float32",
)  # fmt: skip


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_a_missing_package_is_one_sentence(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", peers)  # stands for one that is there: any module
    monkeypatch.setitem(sys.modules, name, None)  # which makes its import fail
    assert peers.main(["--out", str(tmp_path / "peers.json")]) == 2
    said = f"experiments.lab.peers.speed needs {name}, which is not installed here: pip install torch transformers"
    assert capsys.readouterr().err == f"kvjax: error: {said}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "given, message",
    [
        ({"methods": ("quest",)}, "unknown method 'quest', expected one of full, snapkv"),
        ({"caches": ("paged",)}, "unknown cache 'paged', expected one of static, dynamic"),
        ({"model": "gpt"}, "unknown model 'gpt'"),
        ({"mode": "fast"}, "unknown mode 'fast'"),
    ],
)
def test_wrong_settings_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        PeersSettings(**given)


def test_settings_of_scores_are_checked():
    with pytest.raises(ValueError, match="unknown method 'quest', expected one of full, snapkv, keydiff, tova"):
        quality_settings.PeersSettings(methods=("quest",))
    names = {name for method in quality_settings.METHODS for name in quality_settings.beside(method)}
    assert names <= set(registry.classes())


def test_a_missing_torch_is_one_sentence_for_scores_too(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert quality.main([str(tmp_path), "--out", str(tmp_path / "p.json")]) == 2
    assert "experiments.lab.peers.quality needs torch, which is not installed here" in capsys.readouterr().err


def test_scores_are_paired_by_sample_and_a_failure_is_a_note():
    def row(library, method, task, *scores, error=None):
        made = {"library": library, "method": method, "base": method.partition("(")[0], "name": task, "length": 64}
        value = 100 * sum(scores) / len(scores) if scores else None
        return made | {"budget": 8, "value": value, "scores": dict(enumerate(scores)), "error": error, "kept_tokens": 8.0}

    rows = [row("kvjax", "snapkv(obs_window=64)", task, 1, 1, 0) for task in "ab"]
    rows += [row("kvpress", "snapkv", task, 1, 0, 0) for task in "ab"]
    rows += [row("kvpress", "kvzip", "a", 1, 1), row("kvpress", "kvzip", "b", error="RuntimeError: 1 | 2\nmore")]
    text = peer_scores(rows, {"runs": {"now": {"device": "a card", "versions": {"torch": "2"}, "commit": "c"}}})
    paired = "33.3 / 66.7 (-33.3)"
    assert f"| snapkv | snapkv(obs_window=64) | {paired} | {paired} | 33.3 / 66.7 | -33.3 (" in text
    assert "| kvzip |  | 100.0 / - | - / - |  |  | 8.0 | b: RuntimeError: 1 / 2 |" in text
    assert "## 64 tokens, 8 kept" in text and "Run now: a card, torch 2, commit c." in text


def test_presses_are_methods_with_a_budget():
    assert set(PRESSES) <= set(registry.classes())
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
    """`python -m experiments.lab.peers.speed` on a tiny model: what it prints, and its record."""
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

    from experiments.lab.peers.speed.filled_cache import dynamic_cache, static_cache
    from experiments.lab.peers.speed.random_model import random_model

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

    from experiments.lab.peers.speed import bench

    def no_memory(*_, **__):
        try:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        except RuntimeError as error:
            raise RuntimeError("the compiler failed") from error

    monkeypatch.setattr(bench, "decode_times", no_memory)
    printed, record = command("--methods", "full", "--caches", "dynamic")
    (row,) = record["metrics"]
    assert row["out_of_memory"] and row["value"] is None and "out of memory" in printed


@needs_torch
def test_presses_that_prefill_together_keep_what_each_keeps_alone(tmp_path):
    """Hooks on copies of a layer's keys and values leave what kvpress's own context leaves; KVzip masks the same slots."""
    for package in ("torch", "transformers", "kvpress"):
        pytest.importorskip(package, reason=f"the peers need {package}, which is not installed")
    import kvpress
    import torch
    import transformers

    from experiments.lab.peers.quality import pressed

    directory = builtin_directory()
    model = pressed.load(str(directory), "sdpa", "float32", torch.device("cpu"))
    ids = transformers.AutoTokenizer.from_pretrained(directory).encode("The grass is green, and the sky is blue. " * 40)
    ids, methods = ids[:300], list(quality_settings.PRESSES)
    made = {method: pressed.make_press(kvpress, method, 300, 100) for method in methods}
    read = pressed.read_prompt(model, ids, made)
    assert not read.errors and read.kept["full"].tokens == 300

    def positions(module, inputs, kwargs):
        return inputs, {**kwargs, "cache_position": torch.arange(300)}

    for method in methods:
        assert abs(read.kept[method].tokens - 100) <= 0.5, method
        hooks = [x.self_attn.register_forward_pre_hook(positions, with_kwargs=True) for x in model.model.layers]
        cache = transformers.DynamicCache()
        with torch.no_grad(), pressed.make_press(kvpress, method, 300, 100)(model):
            model(input_ids=torch.tensor([ids]), past_key_values=cache)
            for hook in hooks:
                hook.remove()
        for layer, (keys, values) in zip(cache.layers, read.kept[method].layers, strict=True):
            torch.testing.assert_close((keys, values), (layer.keys, layer.values))
        if method == "kvzip":
            for own, (heads, slots) in zip(model.model.layers, read.kept[method].masked, strict=True):
                assert torch.equal(own.self_attn.masked_key_indices[1], heads)
                assert torch.equal(own.self_attn.masked_key_indices[2], slots)


@needs_torch
@pytest.mark.parametrize("method", ["full", "snapkv", "pyramidkv", "kvzip"])
def test_answers_that_are_decoded_together_are_those_of_each_alone(method):
    for package in ("torch", "transformers", "kvpress"):
        pytest.importorskip(package, reason=f"the peers need {package}, which is not installed")
    import kvpress
    import torch

    from experiments.lab.peers.quality import pressed

    model = pressed.load(str(builtin_directory()), "sdpa", "float32", torch.device("cpu"))
    prompts = [[(start + 7 * at) % 5000 + 5 for at in range(size)] for start, size in ((0, 150), (9, 131))]
    reads = []
    for ids in prompts:
        presses = {} if method == "full" else {method: pressed.make_press(kvpress, method, len(ids), 80)}
        reads.append(pressed.read_prompt(model, ids, presses))
    together = pressed.decode(model, reads, method, [6, 4], ())
    alone = [pressed.decode(model, [read], method, [limit], ())[0] for read, limit in zip(reads, (6, 4), strict=True)]
    assert together == alone and [len(ids) for ids in alone] == [6, 4]
    if method == "pyramidkv":  # layers of other lengths, which no padding makes alike
        layers = [(keys[:, :, -40:], values[:, :, -40:]) for keys, values in reads[1].kept[method].layers]
        uneven = pressed.Kept([*reads[1].kept[method].layers[:1], *layers[1:]])
        mixed = [reads[0], dataclasses.replace(reads[1], kept={method: uneven})]
        ids = pressed.decode(model, mixed, method, [6, 4], ())
        assert ids == [alone[0], pressed.decode(model, mixed[1:], method, [4], ())[0]]
    if method == "full":
        whole = model(torch.tensor([prompts[0] + alone[0][:-1]])).logits[0, 149:].argmax(dim=-1)
        assert whole.tolist() == alone[0]
