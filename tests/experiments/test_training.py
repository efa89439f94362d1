"""Tokenizer, training data, loss, resuming, and that what is learned is what generation uses."""

from __future__ import annotations

import json
import math
import pathlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
import models
from experiments.suites import Cell, Reading, encode_cell
from experiments.tasks import GROUPS, Words
from experiments.training import data, trainer
from experiments.training.curriculum import Curriculum
from experiments.training.loss import initial_state, losses, make_step, optimizer, schedule
from experiments.training.tokenizer import save_tokenizer, train_tokenizer

TOKENIZER = pathlib.Path(models.__file__).parent / "builtin"
TINY = models.ModelConfig(
    vocab_size=5120, hidden_size=32, intermediate_size=64, num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=16,
    max_position_embeddings=512, tie_word_embeddings=True, qk_norm=True, eos_token_ids=(0,), rope_theta=1e4,
)  # fmt: skip


@pytest.fixture(scope="module")
def maker():
    return data.RowMaker(TOKENIZER / "tokenizer.json", [])


def test_tokenizer_is_position_independent(maker):
    rng = random.Random(0)
    drawn = Words("train")
    for _ in range(200):
        uuid, number, name = drawn.uuid(rng), drawn.number(rng), drawn.variable(rng)
        ids = maker.encode([uuid, f"is: {uuid}.", f'{{"{uuid}": "', number, f"is {number}.", name, f"VAR {name} = 1"])
        start = ids[2].index(ids[0][0])
        assert len(ids[0]) == 20 and ids[1][-21:-1] == ids[0] and ids[2][start : start + 20] == ids[0]
        assert len(ids[3]) == 3 and ids[4][-4:-1] == ids[3]  # seven digits: 3 + 3 + 1
        assert len(ids[5]) == 3 and ids[6][2:5] == ids[5]  # five capitals: 2 + 2 + 1


@pytest.mark.parametrize("task", GROUPS["trained"])
def test_rows_are_tokenised_as_inference_does(maker, task):
    row = maker.row(random.Random(1), task, 600, 1)
    roles = np.array(row.roles)
    start = int(np.argmax(roles >= data.FIRST_QUESTION_ROLE))
    assert len(row.tokens) == len(row.roles) <= 600
    prompt = maker.tokenizer.decode(row.tokens[:start], skip_special_tokens=False)
    answer = maker.tokenizer.decode(row.tokens[start:-1], skip_special_tokens=False)
    assert row.tokens[-1] == data.EOS_ID
    assert maker.encode([prompt])[0] == row.tokens[:start]  # the boundary is where inference has it
    assert maker.encode([prompt + answer])[0] == row.tokens[:-1]
    assert (roles[start:] == data.FIRST_QUESTION_ROLE).all()
    assert prompt.endswith(("is", "are", ": "))


def test_batch_is_a_function_of_seed_and_step(maker):
    first, again = maker.batch(0, 5, 16, 512), maker.batch(0, 5, 16, 512)
    for name in ("tokens", "roles", "tasks"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    other = maker.batch(0, 6, 16, 512)
    assert (first.tokens != other.tokens).any()
    padding = first.tokens == data.PAD_ID
    assert (np.diff(padding.astype(int), axis=1) >= 0).all()  # right padding only
    assert (first.roles[padding] == 0).all()


def test_batches_mix_lengths_and_question_counts(maker):
    batch = maker.batch(0, 0, 64, 1024)
    lengths = (batch.tokens != data.PAD_ID).sum(axis=1)
    questions = np.where(batch.roles.max(axis=1) > 1, batch.roles.max(axis=1) - 1, 0)
    assert lengths.min() < 800 and lengths.max() > 900
    assert (questions == 1).sum() > 10 and (questions > 2).sum() > 5


def test_workers_deliver_what_one_process_makes(maker):
    curriculum = Curriculum(4, 512, (256, 512), 0)
    loader = data.Loader(TOKENIZER / "tokenizer.json", [], curriculum, 0, 1, workers=2)
    try:
        for step in (1, 2, 3):
            np.testing.assert_array_equal(loader.next().tokens, maker.batch(0, step, *curriculum.bucket(step)).tokens)
        with pytest.raises(RuntimeError, match="ended with exit code"):
            loader.next()
    finally:
        loader.close()


def test_curriculum_grows_and_forgets_nothing():
    curriculum = Curriculum(1000, 16384, (512, 1024, 2048, 4096), 0)
    assert {curriculum.bucket(step)[1] for step in range(140)} == {512}
    late = [curriculum.bucket(step)[1] for step in range(600, 1000)]
    assert set(late) == {512, 1024, 2048, 4096}
    assert all(rows * length == 16384 for rows, length in map(curriculum.bucket, range(0, 1000, 7)))
    for arguments, message in (
        ((0, 512, (512,), 0), "at least 1"),
        ((1, 512, (512, 256), 0), "must increase"),
        ((1, 500, (256,), 0), "multiple"),
    ):
        with pytest.raises(ValueError, match=message):
            Curriculum(*arguments)


def test_losses_against_numpy(key):
    tokens = jnp.array([[5, 6, 7, 0, 1, 1], [4, 3, 2, 9, 8, 0]], jnp.int32)
    roles = jnp.array([[0, 0, 2, 2, 0, 0], [0, 1, 1, 2, 3, 3]], jnp.int32)
    logits = jax.random.normal(key, (2, 6, 10))
    logits = logits.at[1, 2, 9].set(50.0)  # question 0 of row 1 is answered rightly
    got = jax.jit(losses)(logits, tokens, roles, jnp.array([0, 3], jnp.int32))
    logp = np.asarray(jax.nn.log_softmax(logits))
    nll = np.array([[-logp[r, t, tokens[r, t + 1]] for t in range(5)] for r in range(2)])
    weight = np.array([[2**-0.5] * 2, [3**-0.5] * 2])
    answer = weight[0, 0] * nll[0, 1:3].sum() + weight[1, 0] * nll[1, 2:5].sum()
    np.testing.assert_allclose(got["answer"], answer / (2**0.5 + 3**0.5), rtol=1e-5)
    np.testing.assert_allclose(got["lm"], nll[1, :2].mean(), rtol=1e-5)
    assert got["asked"].tolist()[:4] == [1, 0, 0, 2]
    assert got["right"][3] >= 1


@pytest.mark.thorough
def test_learned_answers_are_generated(maker):
    """Overfits two rows, then generates from their prompts: training and inference agree on every boundary."""
    rows = [maker.row(random.Random(0), task, 256, 1) for task in ("passkey", "number_string")]
    tokens = np.full((2, 256), data.PAD_ID, np.int32)
    roles = np.zeros((2, 256), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)], roles[index, : len(row.tokens)] = row.tokens, row.roles
    state = initial_state(TINY, 200, seed=0)
    step = jax.jit(make_step(TINY, 200, "xla"), donate_argnums=0)
    tasks = jnp.zeros(2, jnp.int32)
    answers = []
    for _ in range(200):
        state, metrics = step(state, jnp.asarray(tokens), jnp.asarray(roles), tasks, jnp.float32(0.0))
        answers.append(float(metrics["answer"]))
    assert all(map(math.isfinite, answers)) and answers[-1] < 0.2 * answers[0]
    assert int(metrics["right"][0]) == 2
    starts = [row.roles.index(data.FIRST_QUESTION_ROLE) for row in rows]
    cache = kvjax.prefill(
        state["params"],
        [row.tokens[:start] for row, start in zip(rows, starts, strict=True)],
        config=TINY,
        max_new_tokens=16,
    )
    out = kvjax.generate(state["params"], cache, max_new_tokens=16)
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        assert out.tokens[index, : int(out.num_tokens[index])].tolist() == row.tokens[start:]


def _run(out, **options):
    size = trainer.Size(TINY, (256,), 512, 6)
    return trainer.train(out, size=size, steps=6, tokenizer=TOKENIZER, workers=0, **options)


@pytest.mark.thorough
def test_resumed_run_equals_uninterrupted_run(tmp_path):
    whole = _run(tmp_path / "whole")
    _run(tmp_path / "parts", stop_after=3)
    parts = _run(tmp_path / "parts", resume=True)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_array_equal(a, b)
    params, config = models.from_pretrained(tmp_path / "whole" / "export", dtype="float32")
    assert config.head_dim == TINY.head_dim
    models.load_tokenizer(tmp_path / "whole" / "export", config)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "train_log.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 6 and math.isfinite(lines[-1]["loss"])
    with pytest.raises(ValueError, match="checkpoint was made with"):
        _run(tmp_path / "parts", resume=True, seed=1)
    with pytest.raises(ValueError, match="nothing to resume"):
        _run(tmp_path / "none", resume=True)


def test_time_limit_saves_and_exports(tmp_path, monkeypatch):
    class NothingToCompile(trainer.Compiler):
        def __init__(self, step, state, shapes):
            super().__init__(step, state, [])

    monkeypatch.setattr(trainer, "Compiler", NothingToCompile)
    _run(tmp_path, minutes=0.0)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["0"]
    assert (tmp_path / "export" / "model.safetensors").is_file()


def test_evaluation_prompts_fit():
    prompts = encode_cell(Reading(TOKENIZER / "tokenizer.json"), Cell("vt", 1024, 2, 0)).wholes
    assert all(len(tokens) + 40 <= 1024 for tokens in prompts)


@pytest.mark.thorough
def test_tokenizer_can_be_trained(tmp_path):
    tokenizer = train_tokenizer(["The whale swam on. It was white."] * 3, vocab_size=600)
    save_tokenizer(tokenizer, tmp_path)
    text = "VAR ABC = 12. “Déjà vu”\n\tend"
    assert models.load_tokenizer(tmp_path).decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id("<|endoftext|>") == data.EOS_ID and tokenizer.token_to_id("<|pad|>") == data.PAD_ID


def test_schedule_warms_up_and_ends_at_five_percent():
    rate = schedule(3000)
    assert float(rate(0)) == 0.0
    np.testing.assert_allclose([float(rate(200)), float(rate(3000))], [2e-3, 1e-4], rtol=1e-4)
    assert isinstance(optimizer(10), optax.GradientTransformation)


def test_sizes():
    assert trainer.sizes("full").config.group_size == 4
    leaves = jax.tree.leaves(models.param_shapes(trainer.sizes("full").config))
    assert 14e6 < sum(math.prod(leaf.shape) for leaf in leaves) < 15.5e6
    with pytest.raises(ValueError, match="unknown size 'huge'"):
        trainer.sizes("huge")
