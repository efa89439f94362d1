"""Offloaded caches: the same tokens as resident ones, whatever the method, the batch, the chunks and the calls."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from experiments.speed import bench as speed_bench
from experiments.speed import offload as experiment
from experiments.speed import roofline as speed_floor
from kvjax import memory
from kvjax.memory import memory_needed, placed_bytes
from kvjax.method import num_bytes
from kvjax.offload import is_offloaded
from kvjax.typing import pytree
from models import ModelConfig, random_params
from tests.harness import TINY, TRACES, example, read, tiny_params

pytestmark = pytest.mark.usefixtures("quick_compile")

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


@pytest.fixture(autouse=True)
def sync_often(monkeypatch):
    """So that few steps show what many do."""
    monkeypatch.setattr(kvjax.offload, "_SYNC_EVERY", 8)


def memory_kinds(cache):
    kinds = [x.sharding.memory_kind for state in cache.layers for x in jax.tree.leaves(state)]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def layer_kinds(state):
    return {x.sharding.memory_kind.replace("unpinned_host", "device") for x in jax.tree.leaves(state)}


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


@pytest.mark.parametrize(
    ("name", "chunk"),
    [(x, 16) for x in OFFLOADED] + [pytest.param(x, 512, marks=pytest.mark.thorough) for x in OFFLOADED],
)
def test_offloaded_equals_resident(name, chunk):
    """Ragged rows, several chunks, a question, more steps than one sync writes, and then as many again."""
    resident, offloaded = both(name, **OFFLOADED[name])
    question = [[3, 1, 4, 1, 5], [9, 2], [6]]
    plain, kept = tokens_of(resident, chunk, parts=(19, 19), extend=question)
    hosted, cache = tokens_of(offloaded, chunk, parts=(19, 19), extend=question)
    np.testing.assert_array_equal(hosted, plain)
    kinds = memory_kinds(cache)
    assert kinds.get("pinned_host", 0) >= len(cache.layers)
    assert "pinned_host" not in memory_kinds(kept)


@pytest.mark.parametrize("name", OFFLOADED)
def test_a_share_of_the_layers(name):
    """The last ones are in host memory, the others are not, and nobody sees it."""
    knobs = OFFLOADED[name] | ({"num_dense_layers": 0} if name == "quest" else {})
    plain, _ = tokens_of(example(name, **knobs), parts=(9,))
    hosted, cache = tokens_of(example(name, offload=0.5, **knobs), parts=(9,))
    np.testing.assert_array_equal(hosted, plain)
    assert [layer_kinds(x) for x in cache.layers] == [{"device"}, {"device", "pinned_host"}]


def offloaded_layers(method, num_layers):
    return [is_offloaded(method.for_layer(layer, num_layers), layer, num_layers) for layer in range(num_layers)]


def test_which_layers_a_share_is():
    """To the nearest layer, and inside of wrappers too; where a method keeps a layer as it is, so does a share."""
    quest = example("quest", num_dense_layers=2, offload=0.7)
    made = offloaded_layers(quest, 4)
    assert made == [False, False, True, True]
    paris = example("pariskv", offload=0.34)
    wrapped = kvjax.PerLayer(
        layers={-1: kvjax.DenseBelow(length=9, method=paris)},
        default=kvjax.Stages(evict=kvjax.methods.SnapKV(budget=9, obs_window=5), retrieve=paris),
    )
    assert offloaded_layers(wrapped, 6) == [False] * 4 + [True] * 2
    assert not any(offloaded_layers(example("pariskv", offload=0.01), 6))


@pytest.mark.parametrize("name", OFFLOADED)
@pytest.mark.parametrize("share", [-0.1, 2, "half", None])
def test_what_is_no_share_is_refused(name, share):
    with pytest.raises(ValueError, match=rf"offload must be True, False or a share .* from 0 to 1, got {share!r}"):
        example(name, offload=share, **OFFLOADED[name])


def test_the_least_share_that_fits(monkeypatch):
    """The share itself fits, one layer less does not; all and nothing at the ends. One layer alone would be staged again."""
    sizes = {"batch": 2, "prompt_slots": 1024, "max_new_tokens": 8}
    model = dataclasses.replace(TINY, num_layers=6)

    def total(share):
        needed = memory_needed(example("pariskv", offload=share), model, **sizes)
        return needed.device + needed.staged

    def share(size, method="pariskv"):
        made = example(method) if method == "pariskv" else method
        return kvjax.offload_share(made, model, **sizes, device_bytes=size + 100, spare=100)

    assert share(total(3 / 6)) == share(total(2 / 6) - 1) == 3 / 6
    assert share(total(0)) == 0 and share(total(1)) == 1
    with pytest.raises(MemoryError, match=r"ParisKV with offload=True needs .* and 0.00 MiB for activations, got 0.\d\d MiB"):
        share(total(1) - 1)
    with pytest.raises(ValueError, match="expected a method with a field offload, got Full"):
        share(1 << 40, "full")
    monkeypatch.setattr(memory, "free_bytes", lambda: total(3 / 6) + 100)
    assert kvjax.offload_share(example("pariskv"), model, **sizes, spare=100) == 3 / 6
    monkeypatch.setattr(memory, "free_bytes", lambda: None)
    with pytest.raises(ValueError, match="does not say how much memory is free: pass device_bytes"):
        kvjax.offload_share(example("pariskv"), model, **sizes)


@pytest.mark.parametrize(
    ("name", "knobs", "rows"),
    [
        ("chess", {"page_size": 64}, [[1] * 40, list(range(30))]),  # the last page ends behind the cache
        ("tokenselect", {}, [[3]]),  # a piece of one token, in the prompt
    ],
)
def test_short_prompts(name, knobs, rows):
    got, want = (tokens_of(method, rows=rows, parts=(9,))[0] for method in reversed(both(name, **knobs)))
    np.testing.assert_array_equal(got, want)


def test_memory_of_layers_that_differ():
    """In a prompt of one piece too, whichever layer has most on the device."""
    mosaic = example("mosaickv", offload=True, **OFFLOADED["mosaickv"])
    mixed = kvjax.PerLayer(layers={0: kvjax.methods.Full()}, default=mosaic)
    sizes = {"batch": 2, "prompt_slots": 128, "max_new_tokens": 8}
    whole, pieces = (memory_needed(mixed, TINY, **sizes, chunk_size=chunk) for chunk in (8192, 16))
    assert whole.host == pieces.host > 0
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        memory_needed("pariskv", TINY, **{**sizes, "batch": 0})


def test_offload_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="Stages: offload belongs to retrieve"):
        kvjax.Stages(evict=example("sentencekv", offload=True), retrieve=example("quest"))

    @pytree
    class Joins(kvjax.methods.Quest):
        offloadable = False

    with pytest.raises(ValueError, match="Joins: offload must be False, got True; .* reads keys with `keys_at`"):
        read(Joins(budget=8, page_size=4, num_dense_layers=0, offload=True))


def test_near_keys_are_where_the_device_has_them():
    cache = read(example("quest", offload=True, num_dense_layers=0)).layers[0].cache
    slots = cache.cursor[:, None] - 1 - jnp.arange(3)[None]
    want = jnp.take_along_axis(cache.resident().key, slots[:, None, :, None], axis=2)
    np.testing.assert_array_equal(cache.keys_at(slots), want)


@pytest.fixture
def command(monkeypatch, tmp_path):
    """`python -m experiments.speed.offload` on a tiny model, without measuring bandwidths: gives its record's path."""
    monkeypatch.setitem(speed_bench.MODELS, "tiny", lambda: TINY_SPEED)
    fast = speed_floor.Bandwidth(bytes_per_second=1e9, size=1, variants={})
    monkeypatch.setattr(speed_bench, "measure_bandwidth", lambda: fast)
    monkeypatch.setattr(experiment, "link_bandwidth", lambda: 5e10)

    def run(*arguments):
        out = tmp_path / "offload.json"
        fixed = ["--model", "tiny", "--lengths", 4096, "--repeats", 1, "--methods", "full,pariskv", "--out", out]
        monkeypatch.setattr(sys, "argv", ["offload", *map(str, [*fixed, *arguments])])
        experiment.main()
        return out

    return run


def test_the_experiment(command, capsys):
    """Both ways of every method, the bytes over the bus, a table and a figure; a second run measures nothing."""
    arguments = ["--set", "pariskv.buffer=32", "--batches", 2, "--tokens", 3]
    out = command(*arguments)
    said = capsys.readouterr().out
    made = json.loads(out.read_text())
    rows = {(x["name"], x["method"], x["batch"]): x for x in made["metrics"]}
    assert len(rows) == 3 and not any(x["error"] for x in rows.values())
    paris = rows["offload", "pariskv", 2]
    # What is retrieved, at most: 100 of 2 rows x 2 heads x 2 layers, a key and a value of 8 float32 each.
    assert 0 < paris["bus_bytes"] <= 100 * 2 * 2 * 2 * 2 * 8 * 4 and 0.5 < paris["hot"] < 1
    assert paris["host_bytes"] > rows["resident", "pariskv", 2]["host_bytes"] == 0
    assert "MB over the bus" in said and "| pariskv | 4096 | 2 |" in out.with_suffix(".md").read_text()
    assert out.with_suffix(".png").stat().st_size > 10000
    command(*arguments)
    again = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("offload", "resident"))]
    assert again and all(line.endswith("from the record") for line in again)
    # A share of the layers is a row of its own.
    command(*arguments, "--share", 0.5, "--no-resident")
    said = capsys.readouterr()
    shares = {x["share"]: x for x in json.loads(out.read_text())["metrics"] if x["method"] == "pariskv"}
    assert {share: x["layers"] for share, x in shares.items()} == {1.0: 2, 0.5: 1, 0.0: 0}
    assert shares[0.5]["bus_bytes"] * 2 == shares[1.0]["bus_bytes"] and shares[0.5]["error"] is None
    assert 0 < shares[0.5]["host_bytes"] < shares[1.0]["host_bytes"] and "1 of 2 layers" in said.out
    with pytest.raises(SystemExit):
        command(*arguments, "--share", 1.5)
    assert "expected 'fit' or a number above 0 and at most 1, got '1.5'" in capsys.readouterr().err


def test_the_experiment_offloads_what_does_not_fit(command, monkeypatch, capsys):
    """`--share fit` where the device has room for one layer of four, and for another that is staged."""
    model = dataclasses.replace(TINY_SPEED, num_layers=4)
    monkeypatch.setitem(speed_bench.MODELS, "tiny", lambda: model)
    three = memory_needed(kvjax.make("pariskv", offload=0.75), model, batch=1, prompt_slots=4096, max_new_tokens=12)
    params = num_bytes(random_params(model, jax.random.key(0)))
    monkeypatch.setattr(experiment, "bytes_limit", lambda: three.device + three.staged + params)
    monkeypatch.setattr(experiment, "offload_share", functools.partial(kvjax.offload_share, spare=0))
    out = command("--tokens", 2, "--share", "fit")
    rows = {(x["name"], x["method"]): x for x in json.loads(out.read_text())["metrics"]}
    assert rows["offload", "pariskv"]["layers"] == 3 and rows["offload", "pariskv"]["share"] == 0.75
    assert ("resident", "pariskv") not in rows
    monkeypatch.setattr(experiment, "bytes_limit", lambda: params)
    command("--tokens", 3, "--share", "fit", "--methods", "pariskv")
    assert re.search(r"offload +pariskv +4096 +1 does not fit", capsys.readouterr().out)


def test_the_experiment_reads_prompts(command, capsys):
    """With --prompts: a row per method that offloads, with what it put into host memory, in a table of its own."""
    out = command("--prompts", "--chunk-size", 1024)
    assert re.search(r"full +4096 +1 has nothing to offload", capsys.readouterr().out)
    (row,) = json.loads(out.read_text())["metrics"]
    # A key and a value of 8 float32 each for every slot, 2 heads, 2 layers.
    assert row["error"] is None and row["host_bytes"] == (4096 + 32) * 2 * 2 * 2 * 8 * 4
    table = out.with_suffix(".md").read_text()
    assert "### Prompts" in table and "| pariskv | 4096 | 1 | 1024 |" in table and "TPOT" not in table
    assert not out.with_suffix(".png").exists()  # which shows decoding
    with pytest.raises(SystemExit):
        command("--chunk-size", 1024)
    assert "--chunk-size has no meaning without --prompts" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tokenselect", pytest.param("chess", marks=pytest.mark.thorough)])
def test_host_memory_has_what_a_resident_cache_has(name):
    """Key by key, after decode steps, an `extend`, and steps again; also where every step is a call of its own."""
    resident, offloaded = both(name)
    question = [[3, 1, 4, 1, 5], [9, 2], [6]]
    _, plain = tokens_of(resident, 16, parts=(5,), extend=question)
    _, hosted = tokens_of(offloaded, 16, parts=(5,), extend=question)
    for token in (7, 8):
        plain, hosted = (kvjax.decode_step(tiny_params(), x, jnp.full((3,), token)) for x in (plain, hosted))
    for one, other in zip(plain.layers, hosted.layers, strict=True):
        dim, rows = one.cache.key.shape[3], np.asarray(other.cache.host)
        held = np.asarray(one.cache.valid)
        np.testing.assert_array_equal(other.cache.valid, held)
        np.testing.assert_array_equal(rows[..., -dim:][held], np.asarray(one.cache.value)[held])
        keys = rows[..., :dim] if rows.shape[3] > dim else np.asarray(other.cache.key)
        np.testing.assert_array_equal(keys[held], np.asarray(one.cache.key)[held])
        staged = other.cache.resident()
        np.testing.assert_array_equal(np.asarray(staged.value)[held], np.asarray(one.cache.value)[held])


def test_masked_attention_reads_the_same():
    """`implementation="mask"` brings the layer to the device, newest tokens included."""
    want, _ = tokens_of(example("quest", offload=True), parts=(24,))
    got, _ = tokens_of(example("quest", offload=True, implementation="mask"), parts=(24,))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("wrap", ["stages", pytest.param("dense_below", marks=pytest.mark.thorough)])
def test_wrappers_offload_what_they_wrap(wrap):
    def make(offload):
        quest = example("quest", offload=offload)
        if wrap == "dense_below":
            return kvjax.DenseBelow(length=30, method=quest)
        return kvjax.Stages(evict=kvjax.methods.SnapKV(budget=20, obs_window=5), retrieve=quest)

    want, _ = tokens_of(make(False), parts=(9,))
    got, cache = tokens_of(make(True), parts=(9,))
    np.testing.assert_array_equal(got, want)
    assert memory_kinds(cache)["pinned_host"] == len(cache.layers)


def test_layers_of_one_model_may_differ():
    """Quest's first layers keep everything on the device; a method of its own for one layer, likewise."""
    method = kvjax.PerLayer(layers={0: kvjax.methods.Full()}, default=example("pariskv", offload=True))
    assert method.offload and not kvjax.PerLayer(layers={}, default=kvjax.methods.Full()).offload
    _, cache = tokens_of(method, parts=(3,))
    assert memory_kinds(cache)["pinned_host"] == 1


def test_forks_and_streams():
    method = example("pariskv", offload=True)
    cache = read(method, max_new_tokens=64)
    copies, again = kvjax.fork(cache, 2), kvjax.fork(cache)
    want = np.asarray(kvjax.generate(tiny_params(), cache, max_new_tokens=6, eos_token_ids=()).tokens)
    got = kvjax.generate(tiny_params(), copies, max_new_tokens=6, eos_token_ids=())
    np.testing.assert_array_equal(got.tokens, np.repeat(want, 2, axis=0))
    assert memory_kinds(got.cache)["pinned_host"] == len(cache.layers)
    pieces = list(kvjax.stream(tiny_params(), again, max_new_tokens=6, eos_token_ids=(), block=4))
    assert [sum((piece[row] for piece in pieces), []) for row in range(3)] == want.tolist()


def test_generation_stops_early():
    """EOS is met in the middle of what one sync writes."""
    for name in ("quest",):
        resident, offloaded = both(name)
        free = np.asarray(kvjax.generate(tiny_params(), read(resident), max_new_tokens=24, eos_token_ids=()).tokens)
        ends = tuple(int(row[5]) for row in free)
        out = [
            kvjax.generate(tiny_params(), read(x), max_new_tokens=24, eos_token_ids=ends) for x in (resident, offloaded)
        ]
        np.testing.assert_array_equal(out[0].tokens, out[1].tokens)
        np.testing.assert_array_equal(out[0].num_tokens, out[1].num_tokens)


def test_sweeps_refuse():
    with pytest.raises(ValueError, match="offload must be False, got Quest"):
        kvjax.sweep(tiny_params(), [[1, 2, 3]], [example("quest", offload=True)], config=TINY, max_new_tokens=2)


def test_memory_is_counted_by_where_it_is():
    """To the byte of what a prefill leaves."""
    for name in ("pariskv", "tokenselect"):
        method = example(name, offload=True, **OFFLOADED[name])
        needed = memory_needed(method, TINY, batch=3, prompt_slots=48, max_new_tokens=24, chunk_size=48)
        device, host = placed_bytes(read(method).layers)
        assert needed.device >= device and needed.host >= host
        if name == "pariskv":
            assert (needed.host, needed.staged) == (host, host // TINY.num_layers)


def test_too_little_memory_is_said_before_the_prompt_is_read(monkeypatch):
    """Bytes needed, bytes there are, and what to change; nothing is compiled."""
    method = example("pariskv", offload=True)
    said = {"bytes_limit": 10_000, "bytes_in_use": 4_000}

    class Device:
        def memory_stats(self):
            return said

    monkeypatch.setattr(memory.jax, "local_devices", lambda: [Device()])
    TRACES.clear()
    with pytest.raises(
        MemoryError, match=r"ParisKV needs 0.0. MiB of device .* got 0.01 MiB of free device memory; shorten"
    ):
        read(method)
    said["bytes_limit"] = 1 << 40
    monkeypatch.setattr(memory, "pin_host", lambda size, free: size // 2)
    with pytest.raises(MemoryError, match="of pinned host memory; .*XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):
        read(method)
    assert not TRACES
    monkeypatch.undo()
    assert memory.pin_host(1000) == 1000 and memory.pin_host(0) == 0
    assert memory.link_bandwidth(1 << 16, repeats=1) > 0
