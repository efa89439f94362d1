"""What all experiments that ask a model share: budgets, batches, intervals."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import models
from experiments import answering
from experiments.answering.ask import READ_AFTER
from experiments.heads.prompts import PromptSettings, encode_prompts
from experiments.records import Results, percent_interval
from tests.tiny_models import BUILTIN
from tests.tiny_models import SHIPPED as CONFIG
from tests.tiny_models import run as dense_logits

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_texts_beyond_the_positions_are_refused_before_they_are_made():
    """This model has neither parameters nor a tokenizer."""
    model = answering.LoadedModel("small", {}, CONFIG, None, pathlib.Path("nowhere"))
    with pytest.raises(ValueError, match="--length must be at most 2048 tokens, the positions of small, got 2049"):
        encode_prompts(model, PromptSettings(length=2049))


def test_records_tell_the_dtypes_of_codes():
    for weight_dtype in ("int8", "int4"):
        shapes = models.param_shapes(dataclasses.replace(models.shapes.llama31_8b(), num_layers=1), weight_dtype)
        model = answering.LoadedModel("small", shapes, CONFIG, None, pathlib.Path("nowhere"), kv_dtype="int8")
        assert model.dtypes == f"{CONFIG.dtype}, weights {weight_dtype}, keys and values int8"


def test_scores_along_a_text_under_full_equal_one_pass():
    """Of rows that end early, too, behind whose text nothing is fed."""
    params = models.random_params(CONFIG, jax.random.key(2))
    texts = np.random.default_rng(3).integers(0, CONFIG.vocab_size, (3, 49)).astype(np.int32)
    counts, targets = np.array([8, 3, 6]), jnp.asarray(texts[:, 41:])
    cache = kvjax.prefill(params, texts[:, :40], config=CONFIG, method="full", max_new_tokens=9)
    run = jax.jit(lambda *given: answering.follow(*given, lambda at, logits: answering.score(logits, targets[:, at])))
    (likely, top), cache = run(params, cache, jnp.asarray(texts[:, 40:]), jnp.asarray(counts, jnp.int32))
    logits = np.asarray(dense_logits(CONFIG, params, jnp.asarray(texts)), np.float64)[:, 40:-1]
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = np.take_along_axis(logits, texts[:, 41:, None], axis=-1)[..., 0]
    for row, count in enumerate(counts):
        np.testing.assert_allclose(likely[:count, row], expected[row, :count], atol=2e-3)
        np.testing.assert_array_equal(top[:count, row], (logits[row].argmax(-1) == texts[row, 41:])[:count])
    np.testing.assert_array_equal(cache.length, 40 + counts)
    assert not likely[8:].any(), "the loop ends with the longest text"


def test_what_is_read_does_not_depend_on_an_answers_length():
    """Two calls, whose tokens are those of one; a short answer, and one that ends with a token, count as they end."""
    params, contexts = models.random_params(CONFIG, jax.random.key(2)), [list(range(3, 40)), list(range(50, 75))]
    cache = kvjax.prefill(params, contexts, config=CONFIG, method="quest", max_new_tokens=20)
    whole = kvjax.generate(params, cache, max_new_tokens=20, eos_token_ids=()).rows()
    for limits, ends in (((20, 12), ()), ((9, 4), ()), ((20, 20), (whole[1][2],))):
        config, each = dataclasses.replace(CONFIG, eos_token_ids=ends), [[most] for most in limits]
        asked = answering.ask(params, config, contexts, kvjax.methods.Quest(), answering.Shape(128, 2, 20), limits=each)
        stops = [
            next((i + 1 for i, token in enumerate(row) if token in ends), most)
            for row, most in zip(whole, limits, strict=True)
        ]
        assert asked.ids == [[row[:stop]] for row, stop in zip(whole, stops, strict=True)]
        read = [len(text) + min(stop, READ_AFTER) for text, stop in zip(contexts, stops, strict=True)]
        np.testing.assert_array_equal(asked.stats[0][1].length, read)


def test_batches_are_equal_and_bounded():
    assert answering.batch_rows(8192, 131072, 25) == 13
    assert answering.batch_rows(8192, 131072, 8) == 8
    assert answering.batch_rows(10**6, 131072, 3) == 1


@pytest.mark.parametrize("share", ["inf", "nan", "0", "3/2", "x"])
def test_a_budget_that_is_no_share_is_refused(share):
    with pytest.raises(ValueError, match="a budget is a share such as 1/8"):
        answering.budget_tokens(share, 512)


def test_an_interval_covers_the_mean():
    assert percent_interval([1.0] * 5) == [100, 100]
    low, high = percent_interval([0.0, 1.0] * 50)
    assert 35 < low < 45 and 55 < high < 65


def test_a_note_of_a_budget_goes_with_it():
    for given, note in (({}, "1/8 of the context"), ({"budget": 512}, ""), ({"page_size": 8}, "1/8 of the context")):
        assert answering.paper_method("quest", 4096, tokenizer=None, config=CONFIG, given=given).note == note


@pytest.mark.parametrize("name", ["pi", "ntk"])
def test_positions_are_divided_by_no_more_than_the_length_needs(name):
    window = CONFIG.max_position_embeddings
    for times, factor in ((0.5, 1.0), (1, 1.0), (1.5, 1.5), (4, 4.0)):
        made = answering.paper_method(name, int(times * window), tokenizer=None, config=CONFIG)
        assert made.method.factor == factor
        assert made.note.startswith("as Full") == (factor == 1)  # within the window nothing is to be divided
    assert answering.paper_method(name, window, tokenizer=None, config=CONFIG, given={"factor": 2.0}).method.factor == 2.0


@pytest.mark.parametrize("attended, read, full", [(100, 500, 500), (100, 520, 500), (100, 400, 500), (99.9, 500, 500)])
def test_what_reads_fewer_bytes_of_all_tokens_has_an_effect(attended, read, full):
    tokens = {"attended_tokens": attended, "length_tokens": 100}
    found = answering.reads_all({**tokens, "bytes_read_per_step": read, "full_bytes_read_per_step": full})
    assert found == (attended == 100 and read >= full)


@pytest.mark.parametrize("length", [512, 65536])
@pytest.mark.parametrize("name", answering.METHODS)
def test_paper_methods_fit_the_context(name, length):
    tokenizer = models.load_tokenizer(BUILTIN)
    made = answering.paper_method(name, length, tokenizer=tokenizer, config=CONFIG)
    method, knobs = made.method, vars(made.method)
    scaled = {"tokenselect": 8192, "pariskv": 4096, "sentencekv": 4096, "chess": 1024}
    if name in scaled:
        assert bool(made.note) == (length < scaled[name])
    if name == "tokenselect":
        assert knobs["num_sink"] + knobs["budget"] + knobs["num_local"] <= length // 2
        if not made.note:
            assert (knobs["budget"], knobs["num_sink"], knobs["num_local"], knobs["chunk"]) == (2048, 128, 512, 256)
    if name == "infllm" and not made.note:
        assert (method.num_sink, method.num_local, method.budget) == (128, 4096, 2048) and length == 65536
    elif name in ("retrievalattention", "socket", "freekv", "infllm"):
        assert method.num_sink + method.num_local + method.budget == length // 8
    elif name == "shadowkv":
        assert 8 * (method.outlier_chunks + method.local_chunks) + method.budget == length // 8
    elif name in answering.BASELINES and "budget" in knobs:
        assert method.budget == length // 8


@pytest.mark.parametrize("length, taken", [(1024, 1024), (2048, 1536), (65536, 1536)])
def test_calibration_leaves_room_in_the_window(tmp_path, monkeypatch, length, taken):
    seen = []

    def calibrate(params, tokens, *, method, **given):
        seen.append((tokens.shape, given["max_new_tokens"]))
        return kvjax.methods.Chess(tau_entropy=1.0, tau_varentropy=2.0)

    monkeypatch.setattr(answering.calibration, "calibrate_chess", calibrate)
    model = answering.LoadedModel("tiny", None, CONFIG, models.load_tokenizer(BUILTIN), BUILTIN)
    results = Results(tmp_path / "record.json", "test", {})
    thresholds = answering.chess_thresholds(model, answering.Calibration(("passkey",), length, 2, 512, 0), results)
    assert thresholds == {"tau_entropy": 1.0, "tau_varentropy": 2.0}
    assert seen == [((2, taken), 512)]


def test_weights_tell_models_of_the_same_name_apart():
    first, second = (models.random_params(CONFIG, jax.random.key(seed)) for seed in (0, 1))
    quantised = jax.tree.map(lambda x: jnp.round(x * 64) / 64, first)
    digests = [
        answering.LoadedModel("model", params, CONFIG, None, BUILTIN).weights for params in (first, second, quantised, first)
    ]
    assert digests[0] == digests[3] and len(set(digests)) == 3
