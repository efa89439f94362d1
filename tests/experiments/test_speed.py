"""The benchmarks end to end on a tiny random model: rows, floors, resuming, running out of memory, kernels."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.records import knobs_of
from experiments.speed import __main__ as speed
from experiments.speed import bench as speed_bench
from experiments.speed import device_time, token_loop
from experiments.speed.filled_cache import filled_cache
from experiments.speed.plots import beside_floors
from experiments.speed.roofline import Bandwidth, measure_bandwidth
from experiments.speed.settings import SpeedSettings
from experiments.speed.variants import VARIANTS, Nothing, setting
from kvjax import registry
from kvjax.accounting import memory
from kvjax.api.measure import measure
from kvjax.decoding.decode import run_decode
from kvjax.decoding.prefill import run_prefill
from kvjax.decoding.sampling import Sampler
from models import LinearLayers, ModelConfig, param_shapes, random_params, shapes
from tests.harness import group, repeated

pytestmark = pytest.mark.usefixtures("quick_compile")
CONFIG = ModelConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=8,
    qk_norm=True, max_position_embeddings=4096,
)  # fmt: skip
N = 256
FAST = Bandwidth(bytes_per_second=1e9, size=1, variants={})


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A model small enough for a CPU, and a bandwidth that needs no measuring."""
    monkeypatch.setitem(speed_bench.MODELS, "tiny", lambda: CONFIG)
    monkeypatch.setattr(speed_bench, "measure_bandwidth", lambda: FAST)


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """`python -m experiments.speed` on the tiny model: what it prints, and its record."""

    def run(*arguments):
        out = tmp_path / "speed.json"
        fixed = ["--model", "tiny", "--methods", "full", "--lengths", N, "--tokens", 3, "--repeats", 2, "--out", out]
        code = speed.main(list(map(str, [*fixed, *arguments])))
        if code:
            raise SystemExit(code)
        return capsys.readouterr().out, json.loads(out.read_text())

    return run


def test_variants_cover_the_registry():
    assert {variant.method for variant in VARIANTS.values()} == set(registry.classes())
    at_128k = {name: setting(name, 131072, shapes.llama31_8b()).method for name in VARIANTS}
    assert at_128k["snapkv"].budget == at_128k["sentencekv"].budget == 1024
    assert at_128k["quest"].budget == at_128k["tokenselect"].budget == 2048
    assert (at_128k["pariskv"].budget, at_128k["mosaickv_6"].fraction) == (100, 0.0625)
    assert knobs_of(at_128k["snapkv_again"])["evict"].startswith("SnapKV(budget=1024, ")
    assert json.dumps(knobs_of(at_128k["minference"])).count("Pattern(kind='vertical_slash', columns=1000") == 1
    for name in ("xattention", "flexprefill"):
        assert json.dumps(knobs_of(at_128k[name])).count(f"Pattern(kind='{name}', ") == 1 and at_128k[name].block == 128
    with pytest.raises(ValueError, match="'nope'"):
        setting("nope", N, CONFIG)


FILLED = [group(name) for name, variant in VARIANTS.items() if name == variant.method]


def check_filled(name, config):
    """Assert that a filled cache and one that read a prompt are alike, and that the filled one decodes."""
    method = setting(name, N, config).method
    params = random_params(config, jax.random.key(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, N)), jnp.int32)
    read = jax.jit(run_prefill, static_argnames=("model", "max_new_tokens", "chunk_size"))
    lengths = jnp.full((2,), N, jnp.int32)
    want = read(params, tokens, lengths, method, model=config, max_new_tokens=8, chunk_size=N)
    got = filled_cache(method, config, length=N, batch=2, max_new_tokens=8, weights=want.weights)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    same = jax.tree.map(lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype), got, want)
    assert jax.tree.all(same), jax.tree.leaves_with_path(same)
    costs = [jax.jit(measure)(cache) for cache in (got, want)]
    # What is attended is fixed by sizes, but for sentences, whose number is random.
    np.testing.assert_allclose(costs[0].attended, costs[1].attended, rtol=0.05)
    np.testing.assert_array_equal(got.length, want.length)
    end = jax.jit(
        lambda p, c: run_decode(
            p, c, Sampler(), None, jnp.zeros((0,), jnp.int32), jnp.zeros((2,), bool), steps=2, stop_early=False
        )
    )(params, got)
    assert (np.asarray(end.bad_step) < 0).all() and np.isfinite(end.cache.logits).all()
    if name not in ("sentencekv", "mosaickv", "chess"):
        leaf = next(x for x in jax.tree.leaves(got.layers) if x.shape[:2] == (2, config.num_kv_heads))
        assert not np.array_equal(leaf[0], leaf[1])  # rows differ


@pytest.mark.parametrize("name", repeated(FILLED, but=("quest",)))
def test_a_filled_cache_is_what_a_prefill_leaves(name):
    """The same tree of the same shapes and dtypes, the same lengths and stored tokens; and it decodes."""
    check_filled(name, CONFIG)


@pytest.mark.thorough
@pytest.mark.parametrize("window", [40, N])
def test_a_filled_cache_has_the_windows_of_its_model(window):
    check_filled("quest", dataclasses.replace(CONFIG, num_layers=2, windows=(window, None)))


@pytest.mark.thorough
def test_a_filled_cache_has_the_states_of_linear_layers():
    linear = LinearLayers(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6, conv_width=4, layers=(0,))
    check_filled("quest", dataclasses.replace(CONFIG, num_layers=2, linear=linear))


@pytest.mark.thorough
def test_every_method_has_a_row_with_its_bytes(command, tmp_path):
    said, record = command("--methods", "all", "--no-split")
    assert [m["method"] for m in record["metrics"]] == list(VARIANTS)
    shapes = jax.tree.leaves(param_shapes(CONFIG))
    everything = sum(x.size * x.dtype.itemsize for x in shapes)
    for row in record["metrics"]:
        assert row["error"] is None, row["error"]
        weights = everything - CONFIG.vocab_size * CONFIG.hidden_size * 4 + CONFIG.hidden_size * 4
        assert row["weight_bytes_read"] == weights and row["weight_bytes"] == everything
        assert row["least"] <= row["value"] <= row["most"]
        np.testing.assert_allclose(row["floor"], (weights + row["cache_bytes_read"]) / 1e9)
        np.testing.assert_allclose(row["ratio"], row["value"] / row["floor"])
        np.testing.assert_allclose(row["achieved_bandwidth"] * row["value"], weights + row["cache_bytes_read"])
        assert row["program_bytes"] >= row["cache_bytes"] + everything
    rows = {row["method"]: row for row in record["metrics"]}
    full = rows["full"]
    assert full["cache_bytes_read"] == 2 * CONFIG.num_layers * 2 * 8 * 4 * (N + 9)
    most = {name: 4 if name == "shadowkv" else 2 for name in rows}  # it reads 160 numbers for a key of 8 channels
    assert all(row["cache_bytes_read"] <= most[name] * full["cache_bytes_read"] for name, row in rows.items())
    assert rows["tokenselect_miss"]["counters"]["hit_rate"] == 0 < rows["tokenselect_hit"]["counters"]["hit_rate"]
    table = (tmp_path / "speed.md").read_text()
    assert "## Decode, tiny" in table and "| SnapKV | 256 | 1 |" in table and "1.00x" in table
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    assert said.count("\n") >= len(VARIANTS)


@pytest.mark.slow
def test_rows_with_keys_and_values_in_8_bits(command, capsys):
    said, record = command("--methods", "full,quest", "--kv-dtype", "int8", "--no-plot")
    rows = {row["method"]: row for row in record["metrics"]}
    assert list(rows) == ["full", "full@int8", "quest", "quest@int8"] and "full@int8" in said
    assert [row["error"] for row in rows.values()] == [None] * 4
    assert rows["full@int8"]["cache_bytes_read"] == 2 * CONFIG.num_layers * 2 * (8 + 2) * (N + 9)
    with pytest.raises(SystemExit):
        command("--methods", "mosaickv", "--kv-dtype", "int8", "--no-plot")
    assert "MosaicKV has a storage of its own and cannot run with kv_dtype='int8'" in capsys.readouterr().err


TIMES = {
    "value": 1.0, "unit": "s/token", "least": 1.0, "most": 1.0, "floor": 0.5, "ratio": 2.0, "achieved_bandwidth": 1e9,
    "weight_bytes_read": 1, "cache_bytes_read": 1, "cache_bytes": 1, "program_bytes": 1, "tokens_per_second": 1.0,
    "compile_seconds": 0.0, "counters": {},
}  # fmt: skip
LACKS = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")


@pytest.fixture
def asked(monkeypatch):
    """What is asked for, method and batch; nothing is timed. ``problem`` of the list fails batches above ``most``."""

    class Asked(list):
        most, problem = 1 << 30, LACKS

    every = Asked()

    def figures(self, method, length, batch, *more):
        every.append((type(method).__name__, batch))
        if batch > every.most:
            raise every.problem
        return dict(TIMES), None

    monkeypatch.setattr(speed_bench.Bench, "decode_figures", figures)
    return every


def test_a_split_joins_a_row(command, asked, tmp_path):
    """A step without its method is timed once for all methods; a row without a split is measured again for one."""
    _, record = command("--no-split", "--no-plot")
    assert "split" not in record["metrics"][0]
    _, record = command("--methods", "snapkv", "--no-plot")
    assert [row["split"] for row in record["metrics"]] == [{"rest": 1.0, "method": 0.0}] * 2
    assert asked == [("Full", 1), ("Full", 1), ("Nothing", 1), ("SnapKV", 1)] and len(record["notes"]["rest"]) == 1
    assert "| 1000.000 / 0.000 |" in (tmp_path / "speed.md").read_text()


def test_a_finished_row_is_not_run_again(command, asked):
    _, first = command("--no-split", "--no-plot")
    said, second = command("--methods", "snapkv", "--no-split", "--no-plot")
    assert asked == [("Full", 1), ("SnapKV", 1)] and said.count("from the record") == 1
    assert second["metrics"][0] == first["metrics"][0]
    assert [m["method"] for m in second["metrics"]] == ["full", "snapkv"]
    # A row of other knobs gives way, and a note says what was set.
    _, third = command("--methods", "snapkv", "--set", "snapkv.budget=100", "--no-split", "--no-plot")
    assert len(asked) == 3 and [m["knobs"].get("budget") for m in third["metrics"]] == [None, 100]
    assert third["metrics"][1]["note"] == "budget=100"


def test_running_out_of_memory_is_a_row(command, asked, tmp_path):
    asked.most, search = 2, ["--methods", "snapkv", "--largest-batch", "--most-rows", 4, "--no-plot"]
    said, record = command(*search)
    assert asked == [(name, batch) for name in ("Full", "SnapKV") for batch in (4, 3, 2)]
    assert [m["out_of_memory"] for m in record["metrics"]] == [True, True, False] * 2
    assert record["metrics"][0]["value"] is None and "RESOURCE_EXHAUSTED" in record["metrics"][0]["error"]
    assert [(x["method"], x["batch"]) for x in record["notes"]["largest_batch"]] == [("full", 2), ("snapkv", 2)]
    assert "out of memory" in said and "| tiny | SnapKV | 256 | 2 |" in (tmp_path / "speed.md").read_text()
    asked.clear()
    command(*search)
    assert not asked


def test_a_row_without_memory_is_tried_again_with_more(command, asked, monkeypatch):
    monkeypatch.setattr(speed_bench, "bytes_limit", lambda: asked.most << 40)
    for asked.most, capped in ((1, False), (2, True)):
        _, record = command("--largest-batch", "--most-rows", 2, "--no-plot")
        assert [(x["batch"], x["capped"]) for x in record["notes"]["largest_batch"]] == [(asked.most, capped)]
    assert [m["out_of_memory"] for m in record["metrics"]] == [False, False]


def test_only_rows_that_a_prompt_can_reach_are_tried(command, asked, monkeypatch):
    """Its caches are small, but they are read whole."""
    asked.most = 8
    monkeypatch.setattr(speed_bench, "bytes_limit", lambda: 1 << 40)
    monkeypatch.setattr(speed_bench.Bench, "_to_read", lambda self, method, length, batch, kind: batch << 38)
    command("--methods", "snapkv", "--largest-batch", "--most-rows", 8, "--no-plot")
    assert {batch for _, batch in asked} == {4}


def test_another_error_is_a_row_that_is_run_again(command, asked, tmp_path):
    asked.most, asked.problem = 0, ZeroDivisionError("a | b")
    with pytest.raises(SystemExit, match="1 rows failed"):
        command("--no-split", "--no-plot")
    assert "ZeroDivisionError: a / b" in (tmp_path / "speed.md").read_text()
    asked.most = 1
    _, record = command("--no-split", "--no-plot")
    assert [m["error"] for m in record["metrics"]] == [None]


def test_a_cache_that_cannot_fit_is_not_tried(command, monkeypatch):
    monkeypatch.setattr(token_loop, "filled_cache", None)  # a call would be another error
    monkeypatch.setattr(speed_bench, "bytes_limit", lambda: 1_500_000)
    _, record = command("--batches", 64, "--no-split", "--no-plot")
    (row,) = record["metrics"]
    assert row["out_of_memory"] and "the cache of Full needs" in row["error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "record.md"], "'record.md'"),
        (["--lengths", "1k"], "--lengths"),
        (["--methods", "snapkv", "--set", "snapkv.nope=3"], "nope"),
        (["--methods", "snapkv", "--set", "quest.budget=16"], "'quest'"),
        (["--methods", "tokenselect", "--set", "tokenselect.theta=nan"], "theta"),
        (["--methods", "snapkv", "--lengths", "16"], "SnapKV: budget"),
        (["--prefill", "--largest-batch"], "--largest-batch has no meaning with --prefill"),
        (["--largest-batch", "--batches", "4"], "--largest-batch has no meaning with --batches"),
        (["--most-rows", "4"], "--most-rows has no meaning without --largest-batch"),
        (["--split", "--prefill"], "--split has no meaning with --prefill"),
        (["--split", "--mesh", "model=2"], "--split has no meaning with --mesh"),
    ],
)
def test_requests_are_refused_before_anything_is_measured(command, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        command(*arguments)
    assert message in capsys.readouterr().err


def test_a_step_on_a_mesh_stays_whole(command, asked):
    _, record = command("--mesh", "data=1", "--no-plot")
    assert "split" not in record["metrics"][0] and record["metrics"][0]["mesh"] == "data=1,model=1"
    assert SpeedSettings(mesh="model=2", beside_one=True, split=True)  # the rows on one device are split


def test_without_a_model_the_device_says_which_shape_and_length(monkeypatch):
    for device, chosen in (("cpu", ("small", (4096,))), ("gpu", ("llama-3.1-8b", (131072,)))):
        monkeypatch.setattr(jax, "default_backend", lambda device=device: device)
        settings = SpeedSettings().on_device()
        assert (settings.model, settings.lengths) == chosen
        assert SpeedSettings(model="qwen3-8b", lengths=(8,)).on_device().lengths == (8,)


def test_the_figure_of_prompts_alone_has_no_panels():
    assert not beside_floors([]).axes


def test_prompts_have_rows_with_chunks_and_one_that_cannot_fit_is_not_tried(command, monkeypatch):
    """Its row says what it needs, and the next method's is measured."""
    needed = memory.memory_needed("full", CONFIG, batch=1, prompt_slots=N, max_new_tokens=3, chunk_size=128)

    class Device:
        @staticmethod
        def memory_stats():
            return {"bytes_limit": needed.peak - 1, "bytes_in_use": 0}

    monkeypatch.setattr(memory, "device_of", lambda: Device)
    knobs = ["--set", "streamingllm.budget=16", "--set", "streamingllm.num_sink=2", "--chunk-size", 128]
    said, record = command("--methods", "streamingllm", *knobs, "--prefill", "--no-plot")
    full, small = record["metrics"]
    assert full["out_of_memory"] and "Full needs" in full["error"] and "of free device memory" in full["error"]
    assert small["error"] is None and small["value"] > 0 and "out of memory" in said
    assert [(row["name"], row["chunk_size"]) for row in (full, small)] == [("prefill", 128)] * 2


def test_a_step_without_attention_keeps_the_projections():
    """The step without attention has every matrix product of a whole step, except the products of the attention."""
    params = random_params(CONFIG, jax.random.key(0))
    cache = filled_cache(Nothing(), CONFIG, length=1, batch=1, max_new_tokens=8)
    done = jnp.zeros((1,), bool)
    loop = jax.jit(
        lambda p, c: run_decode(p, c, Sampler(), None, jnp.zeros((0,), jnp.int32), done, steps=2, stop_early=False)
    )
    text = loop.lower(params, cache).compile().as_text()
    assert f"{CONFIG.hidden_size},{CONFIG.num_kv_heads * (CONFIG.group_size + 2) * CONFIG.head_dim}" in text


def test_bandwidth_is_measured():
    measured = measure_bandwidth(2**20)
    assert measured.bytes_per_second == max(measured.variants.values()) > 0 and measured.size == 2**20
    assert FAST.seconds(3e9) == 3.0


def test_tied_weights_are_read_whole():
    tied = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    params = random_params(tied, jax.random.key(0))
    assert tied.weight_bytes(params, 4) == sum(x.nbytes for x in jax.tree.leaves(params))


def test_clock_grows_with_the_work():
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(192, 192)), jnp.float32)

    def times(count):
        def run(x, w):
            for _ in range(count):
                x = jnp.tanh(x @ w)
            return x, x.sum()

        return device_time.loop_seconds(run, jnp.ones((64, 192), jnp.float32), weight, chain=2, iterations=10, repeats=5)

    few, many = times(4), times(64)
    assert 0 < few.least <= few.median <= few.most and few.compile > 0
    assert few.least < many.least  # how much is for a quiet machine to say


def test_clock_does_not_subtract_a_slow_host():
    measured = device_time.over([0.5, 0.625, 0.75], [0.375, 0.25, 7.0], 2, 0.0)
    assert (measured.least, measured.median, measured.most) == (0.125, 0.1875, 0.25)


def test_clock_leaves_nothing_out():
    """Work that does not depend on the first argument, and results that nobody reads, are done in every run."""
    wide = jnp.asarray(np.random.default_rng(0).normal(size=(64, 4096)), jnp.float32)

    def run(x, w):
        return x[:1], jnp.sin(w) @ jnp.cos(w).T

    loop = jax.jit(device_time._loop, static_argnums=(0, 1, 2))
    measured = loop.lower(run, 3, 2, jnp.ones((4,)), wide).compile().cost_analysis()
    once = jax.jit(run).lower(jnp.ones((4,)), wide).compile().cost_analysis()
    # A loop's cost counts its body once.
    np.testing.assert_allclose(measured["flops"], 3 * once["flops"], rtol=0.01)
    np.testing.assert_allclose(measured["transcendentals"], 3 * once["transcendentals"], rtol=0.01)
