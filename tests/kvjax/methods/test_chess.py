"""CHESS as the model sees it: recorded q, k, v and logits through the library's driver, against the float64 oracle."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.api.measure import measure
from kvjax.cache import PlainCache
from kvjax.methods.chess import page_tree
from kvjax.methods.chess.method import PRESETS, PRINTED, Chess
from tests import tape
from tests.oracles import chess as oracle
from tests.oracles.plain import attend_to, rotate_all

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("chess")]
STEPS = 14
LENGTHS = (*oracle.LENGTHS, 90)
ROWS, TOTAL = len(LENGTHS), max(LENGTHS) + STEPS

# The printed form and its points one by one, then the default's. The prompt's list and the step's list have few pages to win.
TOGETHER = {"anchor_pages": 1}
READINGS = {
    "printed": PRINTED,
    "together": TOGETHER,
    "flat, together": {**TOGETHER, "hierarchy": False},
    "centred": {**PRINTED, "centred": True},
    "flat": {**PRINTED, "hierarchy": False},
    "history": {**PRINTED, "candidates": "history"},
    "short anchor": {**PRINTED, "anchor_pages": 1},
    "long anchor": {"anchor_pages": 5},
    "never": {"trigger": "never"},
    "moderate": {"ratios": "moderate"},
    "odd sizes": {
        "ratios": (0.3, 1.0, 0.25), "pages_per_chunk": 3, "chunks_per_grid": 1, "num_sink_pages": 0, "window": 1,
    },
    "one page to a chunk": {"pages_per_chunk": 1, "chunks_per_grid": 4, "num_sink_pages": 2, "window": 3, "interval": 1},
}  # fmt: skip


def method(**knobs):
    """CHESS at the oracle's small setting, some knobs changed."""
    return Chess(**{**oracle.KNOBS, **knobs})


@functools.cache
def recording(seed, layers, heads, groups, dim, batch=ROWS, total=TOTAL, vocab=64):
    """Random q, k, v and logits, whose entropy level and unrest change every few tokens; the vocabulary is the ids."""
    rng = np.random.default_rng(seed)
    vocab = max(vocab, total)
    q = rng.normal(size=(layers, batch, heads, groups, total, dim)) * 1.5
    k, v = (rng.normal(size=(layers, batch, heads, total, dim)) for _ in range(2))
    # Six tokens at a time share one of four topics, so that old pages can resemble the newest more than their neighbours.
    topics = rng.normal(size=(layers, 1, heads, 4, dim)) * 2
    subject = np.repeat(rng.integers(0, 4, (batch, -(-total // 6))), 6, axis=1)[:, :total]
    k = k + np.take_along_axis(topics, subject[None, :, None, :, None], axis=3)
    level, unrest = (np.repeat(rng.uniform(size=(batch, -(-total // 3))), 3, axis=1)[:, :total] for _ in range(2))
    sharpness = np.exp(2 * level + unrest * rng.normal(size=(batch, total)))
    logits = rng.normal(size=(batch, total, vocab)) * sharpness[..., None]
    return tuple(x.astype(np.float32) for x in (q, k, v, logits))


def lists(cache):
    """The page lists of a cache, and what accounting says of its next step."""
    s = cache.shared
    lists = {"active": s.active, "count": s.count, "complete": s.complete, "reconstructions": s.reconstructions}
    return {**lists, "attended": measure(cache).attended}


def drive(knobs, data, lengths=LENGTHS, *, active=None, poison=False, fields=None, tape_fields=None, **options):
    """Prefill and decode; returns the tape and what `tape.decode` returns, the lists after the last step appended."""
    player, params = tape.record(*data, **(tape_fields or {}))
    steps = data[0].shape[-2] - max(lengths) if active is None else len(active)
    active = np.ones((steps, len(lengths)), bool) if active is None else active
    cache = tape.read(player, params, lengths, method(**knobs, **(fields or {})), steps, **options)
    cache, outputs, seen = tape.decode(params, cache, active, poison, watch=lists)
    seen = jax.tree.map(lambda x, last: np.concatenate([np.asarray(x), np.asarray(last)[None]]), seen, lists(cache))
    return player, cache, np.asarray(outputs), seen


def listed(seen, step, row):
    """Active pages of a row before ``step``."""
    pages = seen["active"][step, row, : seen["count"][step, row]].tolist()
    assert len(set(pages)) == len(pages), "a page is listed twice"
    return set(pages)


def expected(knobs, player, data, row, length, steps):
    """The oracle's trace of one row."""
    q, k, v, logits = data
    end = length + steps
    knobs = {**oracle.KNOBS, **knobs}
    return oracle.run(
        q[:, row, :, :, :end], k[:, row, :, :end], v[:, row, :, :end], logits[row], length, player.inv_freq, **knobs
    )


def compare(knobs, data, lengths=LENGTHS, **options):
    """Run a ragged batch and `check` it."""
    return check(knobs, data, lengths, drive(knobs, data, lengths, **options), options.get("active"))


def check(knobs, data, lengths, driven, active=None):
    """Every row of what `drive` returned against the oracle: outputs, lists, reconstructions, vectors; the traces."""
    player, cache, outputs, seen = driven
    active = np.ones((len(outputs), len(lengths)), bool) if active is None else active
    page_size = oracle.KNOBS["page_size"]
    traces = []
    for row, length in enumerate(lengths):
        steps = np.flatnonzero(active[:, row])
        want = expected(knobs, player, data, row, length, len(steps))
        rebuilt = np.diff(seen["reconstructions"][:, row])
        assert np.flatnonzero(rebuilt).tolist() == steps[want.reconstructed].tolist(), f"row {row}: reconstructions"
        for at, step in enumerate(steps):
            label = f"row {row} (prompt {length}), step {step}"
            page = (length + at) // page_size
            assert seen["complete"][step, row] == page, label
            assert listed(seen, step, row) | {page} == want.pages_attended[at], label
            stored = len(want.attended[at]) - 1  # accounting is made before the step's own token is stored
            assert seen["attended"][step, row] == stored, label
            np.testing.assert_allclose(outputs[step, :, row], want.outputs[at], atol=1e-4, rtol=1e-3, err_msg=label)
        complete = len(want.pages)
        assert seen["complete"][-1, row] == complete and listed(seen, -1, row) - {complete} == want.active
        for name in ("pages", "chunks", "grids"):
            vectors = np.asarray(getattr(cache.shared.tree, name))[row]
            assert vectors.dtype == np.float32
            for index, vector in enumerate(vars(want)[name]):
                np.testing.assert_allclose(vectors[index], vector, atol=1e-5, rtol=1e-5, err_msg=f"row {row}: {name} {index}")
        traces.append(want)
    return traces


@pytest.mark.thorough
@pytest.mark.parametrize("name", READINGS)
def test_every_reading_equals_the_oracle(name):
    """Keys have a large mean in common, as a model's keys do, so that centring moves every list."""
    traces = compare({"ratios": (0.7, 0.7, 0.6), **READINGS[name]}, with_a_common_mean(recording(24, 2, 2, 2, 16)))
    assert name == "never" or all(trace.reconstructed for trace in traces if trace.statistics[1:])
    left_out = [set(range(len(trace.pages))) - trace.active for trace in traces]
    assert name == "never" or sum(map(len, left_out)) > 10, "nothing was left out"


def with_a_common_mean(data):
    """The recording with keys that have a large mean in common."""
    q, k, v, logits = data
    return q, k + np.random.default_rng(6).normal(size=(2, 1, 2, 1, 16)).astype(np.float32) * 4, v, logits


def test_the_oracles_constants_are_the_methods():
    assert (oracle.PRESETS, oracle.PRINTED) == (PRESETS, PRINTED)
    assert vars(Chess()).keys() >= PRINTED.keys() and all(vars(Chess())[x] != value for x, value in PRINTED.items())


def test_centring_finds_the_page_that_resembles_the_newest():
    """A short page of the newest subject loses to long pages by the raw product, and wins once the mean is subtracted."""
    rng = np.random.default_rng(8)
    pages, topic = rng.normal(size=(40, 64)), rng.normal(size=64) * 4
    common = 20 * rng.normal(size=64)
    vectors = common * np.linspace(0.9, 1.1, 40)[:, None] + pages
    vectors[5] += topic
    anchor = common + topic

    @jax.jit
    def best(vectors, anchor):
        nodes = page_tree.Nodes(mean_keys=vectors, shape=page_tree.Shape(page_size=4, fan=None))
        mean = page_tree.mean_page(nodes, jnp.array([40]))
        scores = [page_tree.score_nodes(nodes, anchor - centre)[0] for centre in (0, mean)]
        return mean, [page_tree.best_pages(score, jnp.ones((1, 40), bool), (0.5, 0.5, 0.1)) for score in scores]

    mean, found = best(*(np.float32(x[None]) for x in (vectors, anchor)))
    np.testing.assert_allclose(mean[0], vectors.mean(axis=0), rtol=1e-5)
    assert [np.flatnonzero(pages[0]).tolist() for pages in found] == [[39], [5]]


@pytest.mark.slow
def test_what_a_reconstruction_reads_is_counted():
    """The mean reads the vectors of pages once more."""
    data, lengths = recording(25, 1, 1, 1, 4, batch=3, total=40), (38, 31, 6)
    _, cache, _, _ = drive({"trigger": "fixed", "interval": 1}, data, lengths, active=np.ones((2, 3), bool))
    pages, rebuilt = (np.asarray(x) for x in (cache.shared.complete, cache.shared.reconstructions))
    chunks = -(-pages // 2)
    nodes = (pages + chunks + -(-chunks // 2)) + pages
    row_bytes = 4 * 4  # one layer and one head of 4 channels in float32
    assert rebuilt.any()
    np.testing.assert_allclose(measure(cache).metadata_bytes / row_bytes, nodes * rebuilt / 2)


def test_devices_that_divide_heads_have_parts_of_a_page_vector():
    """In the order of the heads, so a saved cache has the same vectors on every mesh."""
    _, key, value, *_ = recording(14, 2, 2, 2, 16)

    def layers(heads):
        position = jnp.broadcast_to(jnp.arange(key.shape[3], dtype=jnp.int32), key[0][:, heads].shape[:3])
        cursor = jnp.full((key.shape[1],), key.shape[3], jnp.int32)
        stored = zip(key[:, :, heads], value[:, :, heads], strict=True)
        return [PlainCache(key=k, value=v, position=position, cursor=cursor) for k, v in stored]

    @jax.jit
    def vectors():
        pages = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (key.shape[1], 3))
        return [page_tree.page_vectors(layers(heads), pages, 4, None) for heads in (slice(None), slice(1), slice(1, 2))]

    whole, *parts = vectors()
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=2), whole)


def thresholds(data):
    """Thresholds between the statistics of the middle pages of all rows."""
    player, _ = tape.record(*data)
    pages = [s for row, n in enumerate(LENGTHS) for s in expected({}, player, data, row, n, STEPS).statistics]
    found = []
    for values in zip(*pages):
        values = sorted(values)
        gap, at = max((values[i + 1] - values[i], i) for i in range(len(values) // 3, 2 * len(values) // 3))
        assert gap > 1e-3, "a statistic too close to its threshold to be told apart in float32"
        found.append(values[at] + gap / 2)
    return {"tau_entropy": found[0], "tau_varentropy": found[1]}


@pytest.mark.parametrize("trigger", ["and", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("or", "never", "fixed"))])
def test_every_trigger_reconstructs_when_the_oracle_does(trigger):
    """On keys with a mean in common, in a reading whose list of a prompt has few pages to win."""
    data = recording(12, 2, 2, 2, 16)
    knobs = {**TOGETHER, "ratios": (0.7, 0.7, 0.6), "trigger": trigger, "interval": 3, **thresholds(data)}
    traces = compare(knobs, with_a_common_mean(data))
    counts = [len(trace.reconstructed) for trace in traces]
    pages = sum(len(trace.statistics) for trace in traces)
    if trigger == "never":
        assert sum(counts) == 0
    else:
        assert 0 < sum(counts) < pages
        left_out = [set(range(len(trace.pages))) - trace.active for trace in traces]
        assert sum(map(len, left_out)) > 10, "nothing was left out"


@pytest.mark.parametrize("knobs", [{}, PRINTED])
@pytest.mark.thorough
def test_driver_options_change_nothing(knobs):
    """Unused slots full of NaN, a prompt in pieces, a longer padding."""
    options = {"poison": True, "chunk_size": 7, "pad_multiple": 64}
    compare(knobs, recording(16, 2, 2, 2, 16), **options)


def same_vectors(grown, built, rows):
    """Assert that the vectors of two caches over the same tokens are equal to the last bit."""
    for row in range(rows):
        complete = int(grown.shared.complete[row])
        assert complete == int(built.shared.complete[row])
        flat = grown.shared.tree.shape.fan is None
        for name, per in (("pages", 1), *(() if flat else (("chunks", 2), ("grids", 4)))):
            used = -(-complete // per)
            a, b = (np.asarray(getattr(cache.shared.tree, name))[row, :used] for cache in (grown, built))
            np.testing.assert_array_equal(a, b, err_msg=f"row {row}: {name}")


@pytest.mark.parametrize(
    "steps, reading",
    [
        (120, {}),
        *(pytest.param(2000, x, marks=pytest.mark.thorough) for x in ({}, PRINTED, {"centred": False})),
        pytest.param(120, {"hierarchy": False}, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.slow
def test_many_steps_equal_a_state_built_from_scratch(steps, reading):
    """The state after all steps is the one built from scratch, bit for bit, and every step is the oracle's."""
    lengths = (37, 6)
    data = recording(21, 2, 1, 1, 4, batch=2, total=37 + steps, vocab=2037)  # entropies do not depend on the steps
    knobs = {"trigger": "or", "ratios": (0.5, 0.2, 0.1), "tau_entropy": 6.6, "tau_varentropy": 6.0, **reading}
    player, params = tape.record(*data)
    driven = drive(knobs, data, lengths, active=np.ones((steps, 2), bool))
    traces = check(knobs, data, lengths, driven)
    for trace in traces:
        assert steps / 100 < len(trace.reconstructed) < steps / 8, len(trace.reconstructed)
        assert max(map(len, trace.attended)) < 60 + 0.42 * steps
    built = tape.read(player, params, [n + steps for n in lengths], method(**knobs), 1)
    same_vectors(driven[1], built, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "printed", "flat, together"])
def test_several_tokens_at_once_leave_the_list_of_a_prompt(name):
    """Several tokens at once, ragged: pages complete in the middle of a call, and the list equals a prompt's last list."""
    q, k, v, _ = data = recording(22, 2, 2, 2, 16)
    player, params = tape.record(*data)
    knobs = READINGS.get(name, {})
    more = np.resize(np.array([9, 0, 2, 4, 11]), ROWS)
    cache = tape.read(player, params, LENGTHS, method(**knobs), STEPS)
    before = jax.tree.map(lambda x: np.array(x)[None], lists(cache))
    tokens = np.array(LENGTHS)[:, None] + np.arange(11)
    grown = kvjax.extend(params, cache, tokens, lengths=more)
    after = np.array(LENGTHS) + more
    same_vectors(grown, tape.read(player, params, after, method(**knobs), 1), ROWS)
    _, outputs, seen = tape.decode(params, grown, np.ones((3, ROWS), bool), watch=lists)
    seen = jax.tree.map(np.asarray, seen)
    tree = {name: value for name, value in oracle.KNOBS.items() if name not in ("trigger", "interval")}
    for row, length in enumerate(after):
        rotated = [rotate_all(x[:, row, ..., : length + 1, :], player.inv_freq) for x in (q, k)]
        pages = listed(seen, 0, row)
        described = rotated[1] if name == "printed" else k[:, row, :, :length].astype(np.float64)
        reading = {name: value for name, value in knobs.items() if name != "page_vec_rope"}
        want = oracle.select(described, length, **tree, **reading)
        assert pages == (want if more[row] else listed(before, 0, row))
        positions = [i for i in range(length + 1) if i // 4 in pages | {length // 4}]
        for layer in range(2):
            want = attend_to(*(x[layer] for x in rotated), v[layer, row], length, [positions] * 2)
            np.testing.assert_allclose(outputs[0, layer, row], want, atol=1e-4, rtol=0)


def test_refuses_an_event_trigger_without_thresholds():
    data = recording(23, 1, 1, 1, 16)
    player, params = tape.record(*data)
    for trigger in ("and", "or"):
        for tau, missing in (
            ({}, "tau_entropy"),
            ({"tau_varentropy": 1.0}, "tau_entropy"),
            ({"tau_entropy": 1.0}, "tau_varentropy"),
        ):
            with pytest.raises(ValueError, match=missing):
                tape.read(player, params, LENGTHS, method(trigger=trigger, **tau), STEPS)


def cascade(score_grids, score_chunks, score_pages, candidate, ratios, pages_per_chunk, chunks_per_grid):
    """The method's own cascade on NumPy arrays, over ``candidate`` bool [B, P] or the first so many pages: bool [B, P]."""
    run = jax.jit(page_tree.cascade, static_argnums=(5, 6))
    scores = [jnp.asarray(x, jnp.float32) for x in (score_grids, score_chunks, score_pages)]
    if np.ndim(candidate) == 1:
        candidate = np.arange(scores[2].shape[1]) < np.asarray(candidate)[:, None]
    return np.asarray(run(*scores, jnp.asarray(candidate), ratios, pages_per_chunk, chunks_per_grid))


@pytest.mark.parametrize("ratios", [(0.6, 0.5, 0.4), (1.0, 1.0, 1.0), (1e-9, 1e-9, 1e-9)])
def test_the_cascade_keeps_the_best_of_every_count(ratios):
    """Every count up to 50, first pages or any; scores of both signs with many ties, and high ones where there is nothing."""
    rng, pages = np.random.default_rng(3), 50
    counts = np.arange(pages + 1)
    candidate = np.concatenate(
        [counts[:-1] < counts[:, None], rng.uniform(size=(20, pages)) < np.linspace(0, 1, 20)[:, None]]
    )
    scores = []
    for per in (6, 3, 1):
        score = rng.integers(-4, 5, (len(candidate), -(-pages // per))).astype(np.float64)
        some = np.pad(candidate, [(0, 0), (0, -pages % per)]).reshape(len(candidate), -1, per).any(axis=2)
        scores.append(np.where(some, score, 1e9))
    got = cascade(*scores, candidate, ratios, 3, 2)
    for row, some in enumerate(candidate):
        want = (
            oracle.cascade(*(score[row] for score in scores), ratios, 3, 2, set(np.flatnonzero(some)))
            if some.any()
            else set()
        )
        assert set(np.flatnonzero(got[row]).tolist()) == want, f"{some.sum()} pages"


@pytest.mark.parametrize("ratio", ["0.05", "0.3", "0.7"])
def test_counts_are_exact(ratio):
    """The ceiling of ratio * count in whole numbers, whatever float32 makes of the product."""
    whole = np.arange(0, 4096, Fraction(ratio).denominator)[1:]  # counts whose share is a whole number
    counts = np.concatenate([np.random.default_rng(5).choice(whole, 100), np.arange(1, 41), [4095, 4096]])
    scores = np.zeros((len(counts), 4096), np.float32)
    wanted = [math.ceil(Fraction(ratio) * int(count)) for count in counts]
    got = cascade(scores, scores, scores, counts, (float(ratio), 1.0, 1.0), 1, 1).sum(axis=1)
    np.testing.assert_array_equal(got, wanted)
    assert [oracle.share(float(ratio), int(count)) for count in counts] == wanted
