"""Tokenizer, training data, loss, resuming, and that what is learned is what generation uses."""

import dataclasses
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
from experiments.lab.training import data, trainer
from experiments.lab.training.checkpoint import restore_checkpoint, save_checkpoint
from experiments.lab.training.course import Course
from experiments.lab.training.loss import choose, forward, initial_state, losses, make_step, optimizer, schedule
from experiments.lab.training.mixture import BUILTIN, CHAT_RECIPES, PROSE, ROW_TASKS, chat_mixture
from experiments.lab.training.subject import Adapter, WholeModel, stack_layers
from experiments.lab.training.tokenizer import save_tokenizer, train_tokenizer
from experiments.tasks import GROUPS, Words
from tests.tiny_models import FAMILIES

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENIZER = pathlib.Path(models.__file__).parent / "builtin"
TINY = models.ModelConfig(
    vocab_size=5120, hidden_size=32, intermediate_size=64, num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=16,
    max_position_embeddings=512, tie_word_embeddings=True, qk_norm=True, eos_token_ids=(0,), rope_theta=1e4,
)  # fmt: skip


@pytest.fixture(scope="module")
def maker():
    return data.RowMaker(TOKENIZER / "tokenizer.json", [], BUILTIN)


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
    assert row.tokens[-1] == BUILTIN.form.end
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
    padding = first.tokens == BUILTIN.form.pad
    assert (np.diff(padding.astype(int), axis=1) >= 0).all()  # right padding only
    assert (first.roles[padding] == 0).all()


def test_batches_mix_lengths_and_question_counts(maker):
    batch = maker.batch(0, 0, 64, 1024)
    lengths = (batch.tokens != BUILTIN.form.pad).sum(axis=1)
    questions = np.where(batch.roles.max(axis=1) > 1, batch.roles.max(axis=1) - 1, 0)
    assert lengths.min() < 800 and lengths.max() > 900
    assert (questions == 1).sum() > 10 and (questions > 2).sum() > 5


@pytest.mark.slow
def test_workers_deliver_what_one_process_makes(maker):
    course = Course(4, (256, 512), 512, BUILTIN)
    loader = data.Loader(TOKENIZER / "tokenizer.json", [], course, 0, 1, workers=2)
    try:
        for step in (1, 2, 3):
            np.testing.assert_array_equal(loader.next().tokens, maker.batch(0, step, *course.bucket(step, 0)).tokens)
        with pytest.raises(StopIteration):
            loader.next()
    finally:
        loader.close()


def test_lengths_grow_and_none_is_forgotten():
    course = Course(1000, (512, 1024, 2048, 4096), 16384, BUILTIN)
    assert {course.bucket(step, 0)[1] for step in range(140)} == {512}
    late = [course.bucket(step, 0)[1] for step in range(600, 1000)]
    assert set(late) == {512, 1024, 2048, 4096}
    assert all(rows * length == 16384 for rows, length in (course.bucket(step, 0) for step in range(0, 1000, 7)))
    assert course.lm_weight_at(0) == course.lm_weight_first and course.lm_weight_at(999) == course.lm_weight


@pytest.mark.parametrize(
    ("steps", "lengths", "tokens", "message"),
    [
        (0, (512,), 512, "steps"),
        (1, (512, 256), 512, "lengths must increase"),
        (1, (64,), 512, "lengths must be at least 224"),
        (1, (256,), 500, "tokens_per_step"),
    ],
)
def test_a_course_that_cannot_run_is_refused(steps, lengths, tokens, message):
    with pytest.raises(ValueError, match=message):
        Course(steps, lengths, tokens, BUILTIN)


def test_losses_equal_numpy(key):
    tokens = jnp.array([[5, 6, 7, 0, 1, 1], [4, 3, 2, 9, 8, 0]], jnp.int32)
    roles = jnp.array([[0, 0, 2, 2, 0, 0], [0, 1, 1, 2, 3, 3]], jnp.int32)
    logits = jax.random.normal(key, (2, 6, 10))
    logits = logits.at[1, 2, 9].set(50.0)  # question 0 of row 1 is answered rightly
    at, target, role = choose(tokens, roles, 6)
    assert at.tolist() == [list(range(6))] * 2
    got = jax.jit(losses, static_argnums=4)(logits, target, role, jnp.array([0, 3], jnp.int32), 6)
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
    tokens = np.full((2, 256), BUILTIN.form.pad, np.int32)
    roles = np.zeros((2, 256), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)], roles[index, : len(row.tokens)] = row.tokens, row.roles
    subject, course = WholeModel(TINY, TOKENIZER), Course(200, (256,), 512, BUILTIN)
    state = initial_state(subject, course, seed=0)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    step = jax.jit(make_step(subject, course, "xla", mesh), donate_argnums=0)
    tasks = jnp.zeros(2, jnp.int32)
    answers = []
    for _ in range(200):
        state, metrics = step(state, (), jnp.asarray(tokens), jnp.asarray(roles), tasks, jnp.float32(0.0))
        answers.append(float(metrics["answer"]))
    assert all(map(math.isfinite, answers)) and answers[-1] < 0.2 * answers[0]
    assert int(metrics["right"][0]) == 2
    starts = [row.roles.index(data.FIRST_QUESTION_ROLE) for row in rows]
    cache = kvjax.prefill(
        state["params"], [row.tokens[:start] for row, start in zip(rows, starts, strict=True)], config=TINY, max_new_tokens=16
    )
    out = kvjax.generate(state["params"], cache, max_new_tokens=16)
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        assert out.rows()[index] == row.tokens[start:]


def _run(out, **options):
    course = Course(6, (256,), 512, BUILTIN)
    return trainer.train(out, subject=WholeModel(TINY, TOKENIZER), course=course, tokenizer=TOKENIZER, workers=0, **options)


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
    with pytest.raises(ValueError, match="checkpoint was made with seed 0, this run has seed 1"):
        _run(tmp_path / "parts", resume=True, seed=1)


def test_time_limit_saves_and_exports(tmp_path):
    _run(tmp_path, minutes=0.0)
    assert {path.name for path in tmp_path.iterdir()} >= {trainer.CHECKPOINT, "train_log.jsonl"}
    assert (tmp_path / "export" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("lengths", "options", "error", "message"),
    [
        ((256, 1024), {}, ValueError, "at most 512 tokens, the model's context, got 1024"),
        ((256,), {"texts": [pathlib.Path("absent.txt")]}, FileNotFoundError, "no text file absent.txt"),
        ((256,), {"resume": True}, ValueError, "nothing to resume"),
    ],
)
def test_what_cannot_run_writes_nothing(tmp_path, lengths, options, error, message):
    course = Course(6, lengths, 1024, BUILTIN)
    subject = WholeModel(TINY, TOKENIZER)
    with pytest.raises(error, match=message):
        trainer.train(tmp_path / "run", subject=subject, course=course, tokenizer=TOKENIZER, workers=0, **options)
    assert not list(tmp_path.iterdir())
    many = WholeModel(dataclasses.replace(TINY, vocab_size=70000), TOKENIZER)
    with pytest.raises(ValueError, match="token ids below 65536, the model has a vocabulary of 70000"):
        trainer.train(tmp_path / "run", subject=many, course=Course(6, (256,), 512, BUILTIN), tokenizer=TOKENIZER, workers=0)


def test_a_run_is_not_written_over(tmp_path):
    (tmp_path / trainer.CHECKPOINT).touch()
    with pytest.raises(ValueError, match="holds a run: continue it"):
        _run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [trainer.CHECKPOINT]


def test_a_run_goes_on_with_its_own_base_and_rank(tmp_path, key):
    """A checkpoint of before a setting was kept does not know it, and is taken."""
    params = models.random_params(TINY, key)
    first, other = (Adapter.of(name, params, TINY, rank, 1.0) for name, rank in (("one", 4), ("two", 5)))
    state = {"params": jnp.arange(6.0).reshape(2, 3).T, "count": jnp.int32(7)}
    file = tmp_path / "run[1]" / "state"
    save_checkpoint(file, 3, state, {"seed": 0, **first.identity})
    for settings in ({"seed": 0, **first.identity}, {"seed": 0, **first.identity, "later": 1}):
        step, restored = restore_checkpoint(file, state, settings)
        assert step == 3 and restored["count"].shape == ()
        np.testing.assert_array_equal(restored["params"], state["params"])
    with pytest.raises(ValueError, match="made with base one, rank 4, this run has base two, rank 5"):
        restore_checkpoint(file, state, {"seed": 0, **other.identity})


@pytest.mark.thorough
def test_tokenizer_can_be_trained(tmp_path):
    tokenizer = train_tokenizer(["The whale swam on. It was white."] * 3, vocab_size=600)
    save_tokenizer(tokenizer, tmp_path)
    text = "VAR ABC = 12. “Déjà vu”\n\tend"
    assert models.load_tokenizer(tmp_path).decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id("<|endoftext|>") == BUILTIN.form.end and tokenizer.token_to_id("<|pad|>") == BUILTIN.form.pad


def test_schedule_warms_up_and_ends_at_five_percent():
    course = Course(3000, (256,), 512, BUILTIN)
    rate = schedule(course)
    assert float(rate(0)) == 0.0
    np.testing.assert_allclose([float(rate(200)), float(rate(3000))], [2e-3, 1e-4], rtol=1e-4)
    assert isinstance(optimizer(course), optax.GradientTransformation)


def test_sizes_have_their_parameters_and_steps():
    config, course = trainer.builtin_course("full")
    assert config.group_size == 4 and course.steps == 6000
    leaves = jax.tree.leaves(models.param_shapes(config))
    assert 14e6 < sum(math.prod(leaf.shape) for leaf in leaves) < 15.5e6
    with pytest.raises(ValueError, match="unknown size 'huge'"):
        trainer.builtin_course("huge")


@pytest.mark.slow
def test_scanned_layers_equal_the_decoder(key):
    config = dataclasses.replace(TINY, num_layers=2)
    params = models.random_params(config, key)
    tokens = jax.random.randint(key, (2, 24), 0, config.vocab_size)
    at = jnp.array([[0, 5, 23], [1, 2, 3]], jnp.int32)
    got = forward(config, stack_layers(params), tokens, at, "xla")
    cache = kvjax.prefill(params, tokens[:1], config=config, method="full", max_new_tokens=1)
    np.testing.assert_allclose(got[0, 2], cache.logits[0], atol=2e-5)
    cache = kvjax.prefill(params, tokens[1:, :3], config=config, method="full", max_new_tokens=1)
    np.testing.assert_allclose(got[1, 1], cache.logits[0], atol=2e-5)


def test_chosen_positions_predict_answers_first():
    roles = jnp.array([[0] + [1] * 20 + [2, 2, 3, 0, 0, 0]], jnp.int32)
    tokens = jnp.arange(27, dtype=jnp.int32)[None]
    at, target, role = choose(tokens, roles, 7)
    assert {20, 21, 22} <= set(at[0].tolist()) and (jnp.diff(at[0]) > 0).all()
    assert (role[0] >= 1).all() and target[0].tolist() == (at[0] + 1).tolist()
    assert at[0, :4].tolist() != [0, 1, 2, 3]  # the others are scattered, not the first ones
    assert choose(tokens, roles, 27)[0].tolist() == [list(range(27))]


@pytest.fixture(scope="module")
def chat():
    """A mixture in the form of ChatML, whose special texts the built-in tokenizer spells with several tokens."""
    before, after = "<s>system\nYou answer.</s>\n<s>user\n", "</s>\n<s>assistant\n"
    mixture = chat_mixture((before, after), "</s>", end_id=0, pad_id=1)
    return before, after, data.RowMaker(TOKENIZER / "tokenizer.json", [], mixture)


@pytest.mark.parametrize("task", ["niah_single_2", "kv_retrieval"])
def test_chat_rows_have_the_template(chat, task):
    before, after, maker = chat
    row = maker.row(random.Random(0), task, 800, 2)
    assert len(row.tokens) <= 800
    first = row.roles.index(data.FIRST_QUESTION_ROLE)
    second = row.roles.index(data.FIRST_QUESTION_ROLE + 1)
    prompt = maker.tokenizer.decode(row.tokens[:first], skip_special_tokens=False)
    assert prompt.startswith(before) and prompt.count(after) == 1
    start = row.roles.index(0, first)  # behind the first answer
    assert row.tokens[start - 1] == 0
    between = maker.tokenizer.decode(row.tokens[start:second], skip_special_tokens=False)
    assert between.startswith("\n<s>user\n") and after in between
    assert data.LM_ROLE not in row.roles  # only rows of prose have language-model loss


def test_chat_mixture_refuses_a_template_that_does_not_close_messages():
    with pytest.raises(ValueError, match="must close a message with '</s>'"):
        chat_mixture(("", "[/INST]"), "</s>", 0, 1)
    assert set(CHAT_RECIPES) == {*GROUPS["trained"], PROSE}


def test_untrained_adapter_changes_nothing(key):
    config = dataclasses.replace(TINY, num_layers=2)
    params = models.random_params(config, key)
    subject = Adapter.of("tiny", params, config, rank=4, stretch=2.0)
    made = subject.params(subject.frozen, subject.initial(0))
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(stack_layers(params)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert subject.config.rope_scaling.factor == 2 and subject.config.max_position_embeddings == 1024


@pytest.mark.slow
def test_teacher_replaces_the_text(key):
    """Against its own predictions the loss on prose is 0; against others' it is their divergence."""
    logits, other = (jax.random.normal(k, (1, 4, 10)) for k in jax.random.split(key))
    target, role, tasks = jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), jnp.int32), jnp.zeros(1, jnp.int32)
    same = losses(logits, target, role, tasks, 4, taught=logits)
    np.testing.assert_allclose(same["lm"], 0.0, atol=1e-6)
    got = losses(logits, target, role, tasks, 4, taught=other)
    p, q = (np.asarray(jax.nn.softmax(x), np.float64) for x in (other, logits))
    np.testing.assert_allclose(got["lm"], (p * np.log(p / q)).sum(-1).mean(), rtol=1e-5)


@pytest.mark.slow
def test_parts_of_a_batch_add_up(key):
    logits = jax.random.normal(key, (2, 6, 10))
    target, role = jnp.ones((2, 6), jnp.int32), jnp.array([[0, 1, 1, 2, 2, 3], [0, 0, 2, 2, 0, 0]], jnp.int32)
    tasks = jnp.array([0, 3], jnp.int32)
    whole = losses(logits, target, role, tasks, 6)
    count = np.array([3.0, 2.0])
    totals = iter([np.sum(count**0.5), 2.0] * 2)  # the denominators of both parts: answers, prose
    parts = [
        losses(logits[i : i + 1], target[i : i + 1], role[i : i + 1], tasks[i : i + 1], 6, lambda x: next(totals))
        for i in range(2)
    ]
    for name in ("answer", "lm"):
        np.testing.assert_allclose(parts[0][name] + parts[1][name], whole[name], rtol=1e-5)


@pytest.mark.parametrize("part", [{"attention_sinks": True}, {"attention_softcap": 30.0}])
def test_training_refuses_an_attention_that_it_does_not_compute(part):
    config = dataclasses.replace(FAMILIES["llama"], **part)
    with pytest.raises(ValueError, match="training computes attention without sink logits and soft cap"):
        forward(config, {}, jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 1), jnp.int32), None)


def test_rows_name_the_trained_tasks_prose_and_copies():
    assert ROW_TASKS == (*GROUPS["trained"], "prose", "copy") and {*ROW_TASKS} == {*BUILTIN.recipes}
