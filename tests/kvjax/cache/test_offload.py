"""Offloaded caches: the same tokens as resident ones, whatever the method, the batch, the chunks and the calls."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.accounting import memory
from kvjax.accounting.memory import memory_needed
from kvjax.cache.quantised import KV_DTYPES
from kvjax.decoding.layer_bytes import placed_bytes
from kvjax.decoding.layers import is_offloaded
from kvjax.wrappers import DenseBelow, Periodic, PerLayer, Stages, Twilight
from tests.harness import NAMES, TINY, TRACES, WRAPPERS, example, group, prompts, read, repeated, tiny_params
from tests.kvjax.cases import N, ask, base, ended, go_on, model

pytestmark = pytest.mark.usefixtures("quick_compile")

ROOM = 25  # of no other file: a program traced there would sync less often than `sync_often` says
KNOBS = {"mosaickv": {"strategy": "dynamic", "buffer": 16, "segment": 32, "lifetime": 4.0}}
OFFLOADED = {name: KNOBS.get(name, {}) for name in NAMES if example(name).offloaded(True) is not None}
VALUES_ONLY = ("magicpig", "retrievalattention", "tokenselect")  # written out: their keys are to stay on the device
QUANTISABLE = [name for name in OFFLOADED if "codes" not in example(name).lacks]
CODES = {("quest", "int8"): pytest.mark.slow}  # the others thoroughly; the storage itself: test_quantised.py
# A choice for speed.
ALWAYS = ("quest",)  # ParisKV and SentenceKV offload as Quest does; the others have tests of their own below


@pytest.fixture(autouse=True)
def sync_often(monkeypatch):
    """So that few steps show what many do."""
    monkeypatch.setattr(kvjax.cache.offload, "_SYNC_EVERY", 8)


def memory_kinds(cache):
    kinds = [x.sharding.memory_kind for state in cache.layers for x in jax.tree.leaves(state)]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def layer_kinds(state):
    return {x.sharding.memory_kind.replace("unpinned_host", "device") for x in jax.tree.leaves(state)}


def make(name, **knobs):
    return example(name, **OFFLOADED[name], **knobs)


def chunked(method, rows=None, chunk_size=16, config=TINY, **options):
    """A cache after a prompt of several chunks, with a room of its own: see `ROOM`."""
    return read(method, rows, max_new_tokens=ROOM, chunk_size=chunk_size, config=config, **options)


def turns(cache):
    """Tokens [B, 2 * N] of two calls behind a question, and the second call; consumes the given cache."""
    first = go_on(ask(cache))
    head = np.asarray(first.tokens)
    second = go_on(first.cache)
    return np.concatenate([head, second.tokens], axis=1), second


@functools.cache
def resident_turns(name, config=TINY):
    """`turns` of a resident cache, whose prompt is read at once: programs that `tests.kvjax.cases` shares."""
    return turns(read(make(name), config=config))


@pytest.mark.parametrize(
    ("name", "chunk"),
    [pytest.param(x, 16, marks=pytest.mark.xdist_group(x)) for x in ALWAYS]
    + [
        pytest.param(x, chunk, marks=[pytest.mark.xdist_group(x), pytest.mark.thorough])
        for x in OFFLOADED
        for chunk in (16, 512)
        if (x, chunk) not in [(name, 16) for name in ALWAYS]
    ],
)
def test_offloaded_equals_resident(name, chunk):
    """Ragged rows, several chunks, a question, more steps than one sync writes, and then as many again.

    One layer, or as many as the method needs; two under --thorough.
    """
    config = model(name) if chunk == 16 else TINY
    got, end = turns(chunked(make(name, offload=True), chunk_size=chunk, config=config))
    want, kept = resident_turns(name, config)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(end.cache.logits, kept.cache.logits, atol=1e-4)
    assert memory_kinds(end.cache).get("pinned_host", 0) >= len(end.cache.layers)
    assert "pinned_host" not in memory_kinds(kept.cache)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.xdist_group(name), CODES.get((name, kind), pytest.mark.thorough)])
        for name in QUANTISABLE
        for kind in KV_DTYPES
    ],
)
def test_offloaded_codes_equal_resident_codes(name, kind, tmp_path):
    """Bit for bit, through what the first test has, and from a saved cache too; and what the accounting says."""
    caches = [chunked(make(name, offload=share), config=model(name), kv_dtype=kind) for share in (True, False)]
    kvjax.save_cache(tmp_path / "cache", caches[0])
    loaded = kvjax.load_cache(tmp_path / "cache", config=model(name), method=make(name, offload=True))
    hosted = [x for x in jax.tree.leaves(loaded.layers) if x.sharding.memory_kind == "pinned_host"]
    assert len(hosted) == len(loaded.layers)
    assert {str(x.dtype) for x in hosted} == {kind if kind == "float8_e4m3fn" else "int8"}
    want, kept = turns(caches[1])
    for cache in (caches[0], loaded):
        got, end = turns(cache)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(end.cache.logits, kept.cache.logits)
    for count in ("attended", "kv_bytes", "bytes_read", "full_bytes_read"):
        np.testing.assert_array_equal(getattr(end.stats, count), getattr(kept.stats, count))
    sizes = {"k8v4": (1, 0.5), "int4": (0.5, 0.5)}.get(kind, (1, 1))
    width = sizes[1] if name in VALUES_ONLY else sum(sizes)
    assert end.stats.host_bytes == sum(x.size for x in hosted) and hosted[0].shape[3] == width * TINY.head_dim
    assert kept.stats.host_bytes == 0 and not np.asarray(kept.stats.bus_bytes).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quest", "tokenselect"])
def test_both_orders_of_layers_and_chunks_leave_the_same_rows(name):
    """By layers a layer is on the device while its prompt is read, by chunks in host memory."""
    first, second = (chunked(make(name, offload=True), config=model(name), order=order) for order in ("layers", "chunks"))
    assert memory_kinds(first) == memory_kinds(second)
    np.testing.assert_array_equal(go_on(first).tokens, go_on(second).tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", repeated([group(name) for name in OFFLOADED], but=("quest",)))
def test_a_share_of_the_layers(name):
    """Only the last layers have their rows in host memory, and the tokens are the same."""
    got = go_on(chunked(make(name, offload=0.5)))
    np.testing.assert_array_equal(got.tokens, go_on(read(make(name))).tokens)
    assert [layer_kinds(x) for x in got.cache.layers] == [{"device"}, {"device", "pinned_host"}]


def offloaded_layers(method, num_layers):
    return [is_offloaded(method.for_layer(layer, num_layers), layer, num_layers) for layer in range(num_layers)]


def test_a_share_is_the_nearest_number_of_last_layers():
    """To the nearest layer, and inside of wrappers too; where a method keeps a layer as it is, so does a share."""
    quest = example("quest", num_dense_layers=2, offload=0.7)
    made = offloaded_layers(quest, 4)
    assert made == [False, False, True, True]
    paris = example("pariskv", offload=0.34)
    wrapped = PerLayer(
        layers={-1: DenseBelow(length=9, method=paris)},
        default=Stages(evict=kvjax.methods.SnapKV(budget=9, obs_window=5), retrieve=paris),
    )
    assert offloaded_layers(wrapped, 6) == [False] * 4 + [True] * 2
    mixed = PerLayer(layers={0: kvjax.methods.Full()}, default=example("pariskv", offload=True))
    assert mixed.offload and offloaded_layers(mixed, 2) == [False, True]
    assert not PerLayer(layers={}, default=kvjax.methods.Full()).offload
    assert not any(offloaded_layers(example("pariskv", offload=0.01), 6))


@pytest.fixture
def needed(monkeypatch):
    """`memory_needed`, which `offload_share` asks again and again: equal arguments are computed once."""
    known = {}

    def once(method, config, *, mesh=None, chunk_size=8192, kv_dtype=None, **sizes):
        key = repr(method), *sizes.values()
        if key not in known:
            known[key] = memory_needed(method, config, **sizes)
        return known[key]

    monkeypatch.setattr(memory, "memory_needed", once)
    return once


def test_the_least_share_that_fits(monkeypatch, needed):
    """The share itself fits, and a share of one layer less does not; at the ends the share is all layers or none."""
    sizes = {"batch": 2, "prompt_slots": 1024, "max_new_tokens": 8}
    model = dataclasses.replace(TINY, num_layers=4)

    def total(share):
        bytes_of = needed(example("pariskv", offload=share), model, **sizes)
        return bytes_of.peak

    def share(size, method="pariskv"):
        made = example(method) if method == "pariskv" else method
        return kvjax.offload_share(made, model, **sizes, device_bytes=size + 100, spare=100)

    assert share(total(3 / 4)) == share(total(2 / 4) - 1) == 3 / 4
    assert share(total(0)) == 0 and share(total(1)) == 1
    with pytest.raises(MemoryError, match=r"ParisKV with offload=True needs .* and 0.00 MiB to spare, got [\d.]+ MiB"):
        share(total(1) - 1)
    for wrong in ("full", Periodic(evict=example("snapkv")), PerLayer(layers={}, default=example("snapkv"))):
        with pytest.raises(ValueError, match=r"a field offload, or a wrapper around one, got (Full|P\w+); .*: .*, ParisKV"):
            share(1 << 40, wrong)
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: total(3 / 4) + 100)
    assert kvjax.offload_share(example("pariskv"), model, **sizes, spare=100) == 3 / 4
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: None)
    with pytest.raises(ValueError, match="does not say how much memory is free: pass device_bytes"):
        kvjax.offload_share(example("pariskv"), model, **sizes)


def test_a_wrapper_has_the_least_share_of_its_method(needed):
    """The wrapper's bytes count, because a wrapper may store more than its method."""
    sizes = {"batch": 2, "prompt_slots": 1024, "max_new_tokens": 8}
    model, paris = dataclasses.replace(TINY, num_layers=4), example("pariskv")

    def wrapped(method):
        yield Twilight(method=method)
        yield Stages(evict=example("snapkv", budget=1000, capacity=1000), retrieve=method)
        yield PerLayer(layers={0: kvjax.methods.Full()}, default=method)

    for made, half in zip(wrapped(paris), wrapped(dataclasses.replace(paris, offload=1 / 2)), strict=True):
        size = needed(half, model, **sizes).peak
        assert made.offloaded(1 / 2) == half and not made.offload
        assert kvjax.offload_share(made, model, **sizes, device_bytes=size, spare=0) == 1 / 2
        assert kvjax.offload_share(half, model, **sizes, device_bytes=size - 1, spare=0) == 3 / 4


@pytest.mark.parametrize(
    ("name", "knobs", "rows"),
    [
        pytest.param("mosaickv", {}, None, marks=[pytest.mark.xdist_group("mosaickv_dynamic"), pytest.mark.slow]),
        pytest.param("chess", {}, None, marks=[pytest.mark.xdist_group("chess"), pytest.mark.slow]),
        pytest.param(  # the last page ends behind the cache
            "chess", {"page_size": 64}, [[1] * 40, list(range(30)), [2]], marks=pytest.mark.thorough
        ),
        # A chunk of the prompt with a single token.
        pytest.param("tokenselect", {}, [[3], [4] * 8, [5] * 9], marks=pytest.mark.slow),
    ],
)
def test_prompts_of_any_length(name, knobs, rows):
    """One turn; None: the three prompts of other tests."""
    want = go_on(read(make(name, **knobs), rows, config=model(name))).tokens
    got = go_on(chunked(make(name, offload=True, **knobs), rows, config=model(name))).tokens
    np.testing.assert_array_equal(got, want)


def test_memory_of_layers_that_differ():
    """Also where the prompt is read at once, whichever layer has most on the device."""
    mosaic = example("mosaickv", offload=True, **OFFLOADED["mosaickv"])
    mixed = PerLayer(layers={0: kvjax.methods.Full()}, default=mosaic)
    sizes = {"batch": 2, "prompt_slots": 128, "max_new_tokens": 8}
    whole, pieces = (memory_needed(mixed, TINY, **sizes, chunk_size=chunk, order="chunks") for chunk in (8192, 16))
    assert whole.host == pieces.host > 0


def test_offload_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="Stages: offload belongs to retrieve, .* got evict with offload=0.5"):
        Stages(evict=example("sentencekv", offload=0.5), retrieve=example("quest"))


@pytest.mark.xdist_group("quest")
def test_near_keys_are_where_the_device_has_them():
    cache = chunked(make("quest", offload=True), config=model("quest")).layers[0].cache
    slots = cache.cursor[:, None] - 1 - jnp.arange(3)[None]
    want = jnp.take_along_axis(cache.resident().key, slots[:, None, :, None], axis=2)
    np.testing.assert_array_equal(cache.keys_at(slots), want)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", repeated([group(name) for name in ("stages", "dense_below", "twilight")], but=("stages",)))
def test_wrappers_offload_what_they_wrap(wrap):
    wrapper = WRAPPERS[wrap]
    inner = "retrieve" if wrap == "stages" else "method"
    offloaded = dataclasses.replace(wrapper, **{inner: dataclasses.replace(vars(wrapper)[inner], offload=True)})
    got = go_on(chunked(offloaded, config=model(wrap)))
    np.testing.assert_array_equal(got.tokens, base(wrap)[1].tokens)
    assert memory_kinds(got.cache)["pinned_host"] == len(got.cache.layers)


@pytest.mark.slow
@pytest.mark.parametrize("name", repeated([group("quest"), group("pariskv")], but=("quest",)))
def test_forks_and_streams_go_on_alike_from_host_memory(name):
    method = make(name, offload=True)
    alone, cache = (chunked(method, rows, config=model(name)) for rows in ([prompts()[0]], None))
    again = kvjax.fork(cache)
    want = np.asarray(go_on(cache).tokens)
    got = go_on(kvjax.fork(alone, 3))
    np.testing.assert_array_equal(got.tokens, want[[0, 0, 0]])
    assert memory_kinds(got.cache)["pinned_host"] == len(got.cache.layers)
    pieces = list(kvjax.stream(tiny_params(), again, max_new_tokens=N, eos_token_ids=(), block=5))
    assert [sum((piece[row] for piece in pieces), []) for row in range(3)] == want.tolist()


@pytest.mark.slow
@pytest.mark.xdist_group("quest")
def test_two_caches_decoded_in_turn():
    """More steps than one sync writes, a token of each in turn; each gets the tokens that it gets alone."""

    def tokens(*prompts):
        caches = [chunked(make("quest", offload=True), rows, config=model("quest")) for rows in prompts]
        found = []
        for _ in range(20):
            found.append([np.argmax(cache.logits, axis=1).astype(np.int32) for cache in caches])
            caches = [kvjax.decode_step(tiny_params(), cache, x) for cache, x in zip(caches, found[-1], strict=True)]
        return np.asarray(found).swapaxes(0, 1)

    one, other = prompts(), prompts()[::-1]
    np.testing.assert_array_equal(tokens(one, other), [*tokens(one), *tokens(other)])


@pytest.mark.xdist_group("quest")
def test_generation_stops_early():
    """EOS is met in the middle of what one sync writes."""
    free = base("quest")[1].tokens
    ends = tuple(int(row[5]) for row in free)
    got = go_on(chunked(make("quest", offload=True), config=model("quest")), ends)
    want, counts = ended(free, ends)
    np.testing.assert_array_equal(got.tokens, want)
    assert got.num_tokens.tolist() == counts and max(counts) < 8


def test_sweeps_refuse_offloaded_methods():
    with pytest.raises(ValueError, match="offload must be False, got Quest"):
        kvjax.sweep(tiny_params(), [[1, 2, 3]], [example("quest", offload=True)], config=TINY, max_new_tokens=2)


@pytest.mark.parametrize("name", repeated([group("pariskv"), group("tokenselect")], but=("pariskv",)))
def test_memory_is_counted_by_where_it_is(name):
    """To the byte of what a prefill leaves."""
    method, config = make(name, offload=True), model(name)
    needed = memory_needed(method, config, batch=3, prompt_slots=48, max_new_tokens=ROOM, chunk_size=16)
    device, host = placed_bytes(chunked(method, config=config).layers)
    assert needed.device >= device and needed.host >= host
    if name == "pariskv":
        hidden = 3 * 48 * config.hidden_size * 4  # as long as the prompt is read
        assert needed.host == host + hidden and needed.staged >= host // config.num_layers


def test_too_little_memory_is_said_before_the_prompt_is_read(monkeypatch):
    """Bytes needed, bytes there are, and what to change; nothing is compiled."""
    method = example("pariskv", offload=True)
    said = {"bytes_limit": 10_000, "bytes_in_use": 4_000}

    class Device:
        def memory_stats(self):
            return said

    monkeypatch.setattr(memory, "device_of", Device)
    TRACES.clear()
    with pytest.raises(MemoryError, match=r"ParisKV needs 0.0. MiB of device .* got 0.01 MiB of free device memory; shorten"):
        read(method)
    said["bytes_limit"] = 1 << 40
    monkeypatch.setattr(memory, "pin_host", lambda size, free: size // 2)
    with pytest.raises(MemoryError, match="of pinned host memory; .*XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):
        read(method)
    assert not TRACES
    monkeypatch.undo()
    assert memory.pin_host(1000) == 1000 and memory.pin_host(0) == 0
    assert memory.link_bandwidth(1 << 16, repeats=1) > 0
