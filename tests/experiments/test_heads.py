"""What is measured for budgets of heads and layers, beside float64 loops; the commands on a tiny model."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from experiments.answering import LoadedModel, choices_of
from experiments.benchmarks import Example
from experiments.heads import heads, kept, layers, sharing
from kvjax.methods import HeadKV, KVzip, ParisKV, Quest, SnapKV
from kvjax.protocol.typing import EMPTY
from kvjax.wrappers import LayerBudgets, Reuse, layer_shares
from models import ModelConfig, random_params
from tests.oracles.plain import softmax
from tests.tiny_models import write_model

pytestmark = pytest.mark.usefixtures("quick_compile")
CONFIG = ModelConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=4, num_q_heads=4, num_kv_heads=2, head_dim=8,
    max_position_embeddings=2048, eos_token_ids=(0,),
)  # fmt: skip


@pytest.mark.slow
def test_attention_to_a_sentence_equals_float64_loops():
    rng = np.random.default_rng(0)
    query, key = (rng.normal(size=shape).astype(np.float32) * 2 for shape in ((2, 2, 3, 8), (2, 2, 12, 8)))
    position = np.where(np.arange(12) < 10, np.arange(12), EMPTY)[None, None].repeat(2, axis=0).repeat(2, axis=1)
    first, last = 3, 6
    got = heads.on_sentence(query, key, jnp.asarray(position), jnp.int32(first), jnp.int32(last))
    left_out = 0
    for row, h, g in np.ndindex(2, 2, 3):
        share = softmax(key[row, h, :10].astype(np.float64) @ query[row, h, g] / np.sqrt(8))
        best = sorted(range(10), key=lambda i: -share[i])[: last - first + 1]  # noqa: B023
        want = sum(share[i] for i in best if first <= i <= last)
        left_out += len([i for i in range(first, last + 1) if i not in best])
        np.testing.assert_allclose(got[row, h, g], want, atol=1e-6)
    assert left_out


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("A cat. The number is 1234. A dog.", "The number is 1234."),
        ("Look\nthe number is 1234\nand so on", "the number is 1234\n"),
        ("1234 it is! Yes", "1234 it is!"),
        ("Why? It is 1234", "It is 1234"),
    ],
)
def test_the_sentence_of_an_answer(text, sentence):
    given = {"task": "mine", "question": "", "answer_prefix": "", "max_new_tokens": 4, "scorer": "passkey"}
    begin, end = heads.sentence_of(Example(context=text, answers=("1234",), **given))
    assert text[begin:end] == sentence
    with pytest.raises(ValueError, match="the answers of a task must stand in its text, got '99' of mine"):
        heads.sentence_of(Example(context=text, answers=("99",), **given))


@pytest.mark.thorough
def test_similarity_of_layers_equals_float64():
    """A prompt of one token attends to its own value, so the first layer can be worked out; no update turns nothing."""
    params = jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, random_params(CONFIG, jax.random.key(0)))
    got = layers.attention_similarity(params, [[5], [7]], CONFIG)
    weights = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    weights = weights.get("params", weights)
    attention = weights["layers_0"]["attention"]
    want = []
    for token in (5, 7):
        x = weights["embed"]["embedding"][token]
        normed = x / np.sqrt(np.mean(x**2) + CONFIG.rms_norm_eps) * weights["layers_0"]["attention_norm"]["scale"]
        qkv = (normed @ attention["qkv"]["kernel"]).reshape(2, 4, 8)
        after = x + np.repeat(qkv[:, 3], 2, axis=0).reshape(-1) @ attention["out"]["kernel"]
        want.append(x @ after / np.linalg.norm(x) / np.linalg.norm(after))
    assert len(got) == 4 and got[0] == pytest.approx(np.mean(want), abs=1e-5) and got[0] < 0.99
    shares = layer_shares(got, 0.3)
    assert LayerBudgets(method=kvjax.methods.Knorm(budget=100), shares=shares).for_layer(0, 4).budget in (30, 123, 170)


@pytest.mark.thorough
def test_shares_count_the_attention_to_the_sentence_alone():
    """A sentence of the whole prompt gets all attention to the prompt, in every head of every layer."""
    params = random_params(CONFIG, jax.random.key(0))
    model = LoadedModel("tiny", params, CONFIG, None, None)
    tokens = np.random.default_rng(0).integers(1, 60, 40).tolist()
    answer, shares = heads.answered(model, tokens, 0, 39, 1, 64)
    assert len(answer) == 1 and shares.shape == (4, 4)
    np.testing.assert_allclose(shares, 1, atol=1e-5)
    few = heads.answered(model, tokens, 10, 12, 3, 64)[1]
    assert (few >= 0).all() and 0 < few.max() < 3


@pytest.mark.slow
def test_heads_are_measured_on_right_answers(tmp_path, monkeypatch, capsys):
    write_model(tmp_path / "model", dataclasses.replace(CONFIG, vocab_size=5120))
    given = ["--model", str(tmp_path / "model"), "--length", "256", "--samples", "2"]
    out = tmp_path / "heads.json"
    assert heads.main([*given, "--out", str(out)]) == 2
    assert "heads are measured on right answers, got none from model in 2 samples" in capsys.readouterr().err
    monkeypatch.setattr(heads, "score", lambda example, prediction: 1.0)
    assert heads.main([*given, "--out", str(out)]) == 0
    assert "16 heads, 2 of 2 samples" in capsys.readouterr().out
    assert [len(x) for x in json.loads(out.read_text()).values()] == [2] * 16
    method = HeadKV(budget=64, scores=kvjax.head_scores(out, CONFIG))
    assert np.mean([method.for_layer(layer, 4).budget for layer in range(4)]) == pytest.approx(64, abs=1)
    assert layers.main([*given, "--share", "0.25"]) == 0
    printed = capsys.readouterr().out
    assert "| layer | cosine | share |" in printed and "shares=(" in printed
    assert heads.main(["--samples", "0"]) == layers.main(["--length", "0"]) == 2


def test_anchors_are_searched_for_together():
    """Two layers are worth nothing alone and much together, so no sum over single layers finds them."""
    selecting = (1, 2, 4, 5, 7, 8)

    def lost(sets):
        return np.array([3 * (not {4, 7} <= set(x)) + 0.1 * sum(x) + (1 not in x) * 100 for x in sets])

    for count, want in ((3, (1, 4, 7)), (4, (1, 2, 4, 7)), (6, selecting), (1, (1,))):
        assert sharing.search(lost, selecting, count) == want
    moved = sharing.search(lambda sets: np.array([abs(len(x) - 2) and -x[-1] or abs(x[-1] - 4) for x in sets]), selecting, 2)
    assert moved == (1, 4), "the last anchor was 7"
    own = np.arange(18).reshape(9, 2)
    got = sharing.followed(own, selecting, (2, 5), {(2, 4): np.array([1, 1])})
    assert got[[1, 2, 4, 5, 7, 8]].tolist() == [[2, 3], [4, 5], [5, 5], [10, 11], [10, 11], [10, 11]]


@pytest.mark.slow
def test_a_loss_of_sharing_is_that_of_reuse():
    """A head that takes another layer's list loses what `Reuse` loses with these anchors and heads; with its own, nothing."""
    rng = np.random.default_rng(0)
    params, inner = random_params(CONFIG, jax.random.key(0)), Quest(budget=12, page_size=4, num_dense_layers=1)
    prompts, answers = rng.integers(0, 60, (2, 40)).tolist(), [[3, 5, 8], [7, 2]]
    anchors, heads = (1, 3), ((0, 1), (0, 1), (1, 0), (0, 1))

    def lost(method, sources):
        cache = kvjax.prefill(params, prompts, config=CONFIG, method=method, max_new_tokens=4, pad_multiple=1)
        if sources is not None:
            return sharing.losses(params, cache, answers, np.array(sources), rows=4)
        logs = np.asarray(kvjax.score(params, cache, answers), np.float64)
        return np.minimum(-logs, 6).sum(axis=1).mean()

    own = [[0, 1], [2, 3], [4, 5], [6, 7]]
    follow = [own[0], own[1], [3, 2], own[3]]
    got = lost(sharing.Swapped(method=inner, layers=4), [own, follow, own])
    want = [lost(method, None) for method in (inner, Reuse(method=inner, anchors=anchors, head_map=heads))]
    np.testing.assert_allclose(got, [*want, want[0]], rtol=1e-5)
    assert got[0] != got[1]
    with pytest.raises(ValueError, match="every=4 .*SnapKV|SnapKV"):
        sharing.Swapped(method=SnapKV())
    with pytest.raises(FloatingPointError, match="losses are not finite"):
        cache = kvjax.prefill(
            params, prompts, config=CONFIG, method=sharing.Swapped(method=inner, layers=4), max_new_tokens=4
        )
        sharing.losses(jax.tree.map(lambda x: x * np.nan, params), cache, answers, np.array([own]))


@pytest.mark.slow
def test_ways_to_share_are_scored_on_one_copy_of_the_rows():
    params, method = random_params(CONFIG, jax.random.key(0)), sharing.Swapped(method=ParisKV(dense_below=64), layers=4)
    cache = kvjax.prefill(params, [[1] * 2000] * 2, config=CONFIG, method=method, max_new_tokens=4)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 3), (2,), (4, 4, 2))]
    took = sharing.score_ways.lower(params, cache, *shapes).compile().memory_analysis().temp_size_in_bytes
    row = sum(x.nbytes for x in jax.tree.leaves(cache.layers)) / 2
    assert 8 * row < took < 12 * row, "two rows under four ways to share"


SHARED = "--length 256 --samples 2 --steps 2 --every 2 --task vt,niah_single_2"


@pytest.mark.slow
def test_sharing_is_measured_on_a_model(tmp_path, capsys):
    write_model(tmp_path / "model", dataclasses.replace(CONFIG, vocab_size=5120))
    given = ["--model", str(tmp_path / "model"), *SHARED.split()]
    for method in ("quest(budget=64)", "socket(budget=1/8)"):
        assert sharing.main([*given, "--method", method, "--out", str(tmp_path / "sharing.json")]) == 0
        assert "under layer -1" in capsys.readouterr().out
        told = json.loads((tmp_path / "sharing.json").read_text())
        text = f"reuse({method}, anchors=({told['anchors'][0]}, 3), head_map={tmp_path / 'sharing.json'})"
        if "quest" in method:
            made = choices_of(text)[0].at(256, None, CONFIG).method
            assert made.anchors == (2, 3) and made.head_map == tuple(map(tuple, told["head_map"]))
        assert told["anchors"][0] == (2 if "quest" in method else 0) and len(told["anchors"]) == (
            1 if "quest" in method else 2
        )
    assert (
        sharing.main([*given, "--method", "quest,oracle"]) == 2 and "unknown method 'quest,oracle'" in capsys.readouterr().err
    )
    assert sharing.main([*given, "--method", "full", "--out", str(tmp_path / "none.json")]) == 2
    assert "selects in a layer" in capsys.readouterr().err and not (tmp_path / "none.json").exists()


@pytest.mark.slow
def test_what_heads_keep_without_a_bound_bounds_them(tmp_path, capsys):
    write_model(tmp_path / "model", dataclasses.replace(CONFIG, vocab_size=5120))
    given = ["--model", str(tmp_path / "model"), "--length", "256", "--samples", "2", "--out", str(tmp_path / "kept.json")]
    assert kept.main([*given, "--method", "kvzip(budget=1/8, chunk=64)"]) == 0
    assert "slots allocated" in capsys.readouterr().out
    text = f"kvzip(budget=1/8, chunk=64, head_factor={tmp_path / 'kept.json'})"
    method = choices_of(text)[0].at(256, None, CONFIG).method
    assert len(method.head_factor) == CONFIG.num_layers and 1 <= np.mean(method.head_factor) < 8
    cache = kvjax.prefill(random_params(CONFIG, jax.random.key(0)), [[1] * 200], config=CONFIG, method=method)
    room = {state.cache.num_slots - max(int(32 * x), 5) for x, state in zip(method.head_factor, cache.layers, strict=True)}
    assert len(room) == 1, "each layer has its own number of slots, and all have the same room"
    with pytest.raises(ValueError, match="one for each layer .* got 1; 4 of the model's 4 layers"):
        kvjax.prefill(random_params(CONFIG, jax.random.key(0)), [[1]], config=CONFIG, method=KVzip(head_factor=(2.0,)))
    with pytest.raises(ValueError, match="none.json must hold"):
        choices_of(f"kvzip(head_factor={tmp_path / 'none.json'})")[0].at(256, None, CONFIG)
    assert kept.main([*given, "--method", "snapkv"]) == 2


@pytest.mark.slow
def test_layers_with_a_window_are_left_out(tmp_path, capsys):
    """The last layer has a window: it is no anchor and follows none, and all layers keep their numbers."""
    config = dataclasses.replace(CONFIG, vocab_size=5120, qkv_bias=True, windows=(16, None, None, 16))
    write_model(tmp_path / "model", config)
    given = ["--model", str(tmp_path / "model"), *SHARED.split()]
    out = tmp_path / "sharing.json"
    assert sharing.main([*given, "--method", "oracle(budget=16)", "--out", str(out)]) == 0
    assert re.findall(r"\| (\d) \| left out \|", capsys.readouterr().out) == ["0", "3"]
    told = json.loads(out.read_text())
    assert told["anchors"] == [1] and len(told["head_map"]) == 4
    reuse = choices_of(f"reuse(oracle(budget=16), anchors=(1,), head_map={out})")[0].at(256, None, config).method
    kvjax.prefill(random_params(config, jax.random.key(0)), [[1, 2, 3]], config=config, method=reuse)
