"""Recall against exact attention: known values, float64 loops, every method, the command."""

import dataclasses
import json
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest
from tqdm import tqdm

import kvjax
from experiments.answering import LoadedModel
from experiments.answering.presets import POSITIONS
from experiments.lab.insight import Watched, WatchedLayer, coverage, readings
from experiments.lab.insight.__main__ import main
from experiments.lab.insight.run import InsightSettings, answer_length, watch
from kvjax.protocol.typing import EMPTY
from tests.harness import ALL, TINY, any_example, drive, example, frequencies, prompts, random_tokens, read, tiny_params
from tests.kvjax.cases import ONE
from tests.kvjax.wrappers.test_compose import check_answers
from tests.oracles.plain import rotate_all, softmax
from tests.tiny_models import SHIPPED, write_model

pytestmark = pytest.mark.usefixtures("quick_compile")
TOP = (1, 4, 64)
N = 10  # decode steps of the tiny model, as many as tests/kvjax has compiled
CONFIG = dataclasses.replace(SHIPPED, num_q_heads=4, num_kv_heads=2)


def watched(name):
    return Watched(method=any_example(name), top=TOP, steps=N)


def run(method, tokens=N):
    cache = read(method)
    return kvjax.generate(tiny_params(), cache, max_new_tokens=tokens, eos_token_ids=(), limits=[tokens] * cache.batch)


@pytest.mark.parametrize(
    ("chosen", "mass", "recall", "own"),
    [
        ([[3, 2, EMPTY]], (0.8 + 0.2) / 2, ((1 + 0) / 2, (1 + 0) / 2, 0.5), (1 + 0) / 2),
        ([[3, 0, EMPTY]], (0.6 + 0.6) / 2, (1.0, 0.5, 0.5), 0.5),
        ([[3, 2, 1, 0]], 1.0, (1.0, 1.0, 1.0), 1.0),
        ([[3, 2], [0, 1]], 0.8, (1.0, 1.0, 0.5), 1.0),  # a list of its own for each query head
    ],
)
def test_values_worked_out_by_hand(chosen, mass, recall, own):
    """Weights 1, 2, 4, 8 for one query head and their inverses for the other; a fifth token is not seen yet."""
    key = jnp.zeros((1, 1, 5, 4)).at[0, 0, :, 0].set(2 * jnp.log(jnp.array([1.0, 2.0, 4.0, 8.0, 100.0])))
    query = jnp.zeros((1, 1, 2, 4)).at[0, 0, :, 0].set(jnp.array([1.0, -1.0]))
    got = coverage(query, key, jnp.array([3]), jnp.array([chosen], jnp.int32), (1, 2, 16))
    np.testing.assert_allclose(got["mass"], [[mass]], rtol=1e-6)
    np.testing.assert_allclose(got["recall"], [[recall]], rtol=1e-6)
    np.testing.assert_allclose(got["own"], [[own]], rtol=1e-6)
    np.testing.assert_array_equal(got["attended"], [[np.mean([sum(x >= 0 for x in one) for one in chosen])]])


@pytest.mark.parametrize("name", ["quest", pytest.param("h2o", marks=pytest.mark.thorough)])
def test_one_layer_equals_float64_loops(name):
    lengths, steps, group, dim = (21, 9), 3, 2, 8
    q, k, v = random_tokens(5, 2, 2, group, max(lengths) + steps, dim)
    method = Watched(method=example(name), top=TOP, steps=steps)
    got = drive(method, q, k, v, lengths, prompt=max(lengths))
    rotated_q, rotated_k = (rotate_all(x, frequencies(dim)) for x in (q, k))
    left_out = 0
    for row, head, step in np.ndindex(2, 2, steps):
        at = lengths[row] + step
        chosen = {int(x) for x in got.chosen[step, row, head] if x >= 0}
        mass, recall, own = [], [], []
        for g in range(group):
            p = softmax(rotated_k[row, head, : at + 1] @ rotated_q[row, head, g, at] / np.sqrt(dim))
            best = sorted(range(at + 1), key=lambda s: -p[s])  # noqa: B023
            mass.append(sum(p[s] for s in chosen))
            recall.append([len(chosen & set(best[:size])) / min(size, at + 1) for size in TOP])
            own.append(len(chosen & set(best[: len(chosen)])) / len(chosen))
        np.testing.assert_allclose(got.state.mass[row, head, step], np.mean(mass), atol=1e-5)
        np.testing.assert_allclose(got.state.recall[row, head, step], np.mean(recall, axis=0), atol=1e-6)
        np.testing.assert_allclose(got.state.own[row, head, step], np.mean(own), atol=1e-6)
        assert got.state.attended[row, head, step] == len(chosen)
        left_out += at + 1 - len(chosen)
    assert left_out > 0


@pytest.mark.slow
def test_full_finds_everything_after_an_extend_too():
    cache = kvjax.extend(tiny_params(), read(watched("full"), config=ONE), [[1, 2, 3], [4], []])
    length = np.asarray(cache.length)
    found = readings(kvjax.generate(tiny_params(), cache, max_new_tokens=N, eos_token_ids=()).cache)
    for values in (found.mass, found.recall, found.own):
        np.testing.assert_allclose(values, 1, atol=1e-6)
    np.testing.assert_array_equal(found.attended[0, :, 0], length[:, None] + 1 + np.arange(N)[None])
    np.testing.assert_array_equal(found.steps, [N] * 3)  # several tokens at once are no decode step


ALWAYS = ("streamingllm",)  # of which the programs are those of the last test


@pytest.mark.parametrize(
    "name",
    [
        x if x.values[0] in ALWAYS else pytest.param(*x.values, marks=[*x.marks, pytest.mark.thorough])
        for x in ALL
        if x.values[0] not in ("full", "verified")
    ],
)
def test_watching_changes_nothing_and_every_method_can_be_watched(name):
    plain, seen = run(any_example(name)), run(watched(name))
    np.testing.assert_array_equal(seen.tokens, plain.tokens)
    np.testing.assert_allclose(seen.cache.logits, plain.cache.logits, atol=1e-5)
    found = readings(seen.cache)
    assert found.mass.shape == (2, 3, 2, N) and found.recall.shape == (2, 3, 2, N, len(TOP))
    for values in (found.mass, found.recall, found.own):
        assert (values > 0).any() and (values >= 0).all() and (values <= 1 + 1e-6).all()
    attends_to_all = name in (*POSITIONS, "think")
    assert (found.mass[:, 0].mean() < 1 - 1e-6) != attends_to_all, "something of the longest row is left out"
    # All k tokens at once, k beyond what is stored: the share of everything that is attended to.
    stored = np.array([41, 24, 10])[:, None] + np.arange(N)[None]
    np.testing.assert_allclose(found.recall[..., 2], found.attended / stored[None, :, None], rtol=1e-5)


def test_rows_that_stand_still_and_steps_beyond_the_room_are_not_measured():
    cache = read(Watched(method=example("snapkv"), top=TOP, steps=2))
    for step in range(4):
        active = jnp.array([True, step == 1, False])
        cache = kvjax.decode_step(tiny_params(), cache, jnp.ones((3,), jnp.int32), active=active)
    found = readings(cache)
    np.testing.assert_array_equal(found.steps, [4, 1, 0])
    assert ((found.attended > 0).all(axis=(0, 2)) == [[True, True], [True, False], [False, False]]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "quest"}, "method must be a kvjax method, got the name 'quest': kvjax.make it"),
        ({"method": kvjax.Verified(draft=kvjax.make("quest"))}, "method must choose tokens in every step"),
        ({"top": (4, 0)}, "top must be a tuple of whole numbers, each of at least 1, got (4, 0)"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
    ],
)
def test_wrong_fields_of_watched_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Watched(**{"method": kvjax.make("full"), **change})


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="did you mean 'quest'"):
        InsightSettings(methods=("qest",))
    with pytest.raises(ValueError, match="unknown task"):
        InsightSettings(methods=("quest",), task="paskey")


@pytest.mark.parametrize("kind", [Watched, WatchedLayer])
def test_watched_methods_answer_every_declaration(kind):
    check_answers(kind)


def test_an_answer_ends_with_its_end_token():
    assert answer_length(np.array([5, 6, 0, 7, 0]), (0, 9)) == 3
    assert answer_length(np.array([5, 6]), (0,)) == 2


@pytest.mark.slow
def test_command_writes_record_and_figure_and_goes_on(tmp_path, capsys):
    out = tmp_path / "made" / "insight"

    def command(*arguments):
        assert main([*arguments, "--out", str(out)]) == 0
        return capsys.readouterr().out

    directory = write_model(tmp_path, CONFIG)
    common = ("--model", str(directory), "--task", "passkey", "--length", "256", "--new-tokens", "3")
    common += ("--samples", "2", "--top", "4,16", "--set", "snapkv.budget=40")
    command("--methods", "snapkv", *common)
    first = json.loads(out.with_suffix(".json").read_text())["metrics"][0]
    printed = command("--methods", "full,snapkv", *common)
    assert "| Full |" in printed and "| SnapKV |" in printed
    made = json.loads(out.with_suffix(".json").read_text())
    assert made["metrics"][0] == first, "a finished method is not run again"
    snapkv, full = made["metrics"]
    assert (snapkv["method"], full["method"], snapkv["knobs"]["budget"]) == ("snapkv", "full", 40)
    assert (snapkv["note"], full["note"]) == ("budget=40", "")
    assert full["value"] == full["own_k"] == full["agreement"] == 100 and full["top_k"] == {"4": 100, "16": 100}
    assert 0 < snapkv["value"] < 100 and snapkv["attended_tokens"] == 42  # 40 of the prompt, and 1, 2, 3 new ones
    shape = np.asarray(snapkv["mass_by_layer_head_step"]).shape
    assert shape == (1, 2, 3)
    assert np.mean(snapkv["mass_by_layer_head_step"]) == pytest.approx(snapkv["value"], abs=0.1)
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert main(["--methods", "full", *common, "--text", "own", "--out", str(out)]) == 2
    assert "choose another --out" in capsys.readouterr().err


@pytest.mark.slow
def test_own_text_is_what_the_method_generates():
    model = LoadedModel("tiny", tiny_params(), TINY, None, pathlib.Path())
    plan = InsightSettings(methods=("streamingllm",), length=48, new_tokens=4, text="own")
    text = np.full(4, 5, np.int32)  # Full's, which is then not read
    with tqdm(disable=True) as bar:
        found, said = watch(model, prompts()[0], text, example("streamingllm"), plan, bar)
    np.testing.assert_array_equal(said, run(example("streamingllm")).tokens[0, :4])
    assert found.mass.shape == (2, 1, 2, 4)
