"""Distances from Full: float64 oracle, the decode path, shared programs, texts, the command."""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import models
from experiments.answering import LoadedModel, load_model
from experiments.cli import figures
from experiments.lab.fidelity import plots, texts
from experiments.lab.fidelity.__main__ import main
from experiments.lab.fidelity.distance import Distance, distance, follow_text, shared_room
from experiments.lab.fidelity.report import difference, fidelity_tables, table
from experiments.lab.fidelity.run import Runner
from experiments.lab.fidelity.settings import FidelitySettings
from experiments.lab.fidelity.summary import along, summary, tokens_per_pass
from experiments.lab.plot import PACKAGES
from kvjax.methods import Full, Quest, SnapKV
from tests.harness import METHODS, any_example, example, oracle, padded, prompts, read, repeated, tiny_params
from tests.kvjax.cases import ONE
from tests.kvjax.cases import model as tiny_model
from tests.tiny_models import SHIPPED

pytestmark = pytest.mark.usefixtures("quick_compile")
ROOT = pathlib.Path(models.__file__).parents[1]
STEPS = 10
COUNTS = np.array([STEPS, 4, 7], np.int32)  # tokens that are fed to each row
FORCED = np.random.default_rng(7).integers(0, 60, (3, STEPS + 1)).astype(np.int32)
CONFIG = dataclasses.replace(SHIPPED, max_position_embeddings=1024)


def tiny_texts():
    """The ragged prompts of the harness, and texts of several lengths after them."""
    tokens, lengths = padded(prompts())
    return texts.Texts(tokens, lengths, FORCED[:, :-1], FORCED[:, 1:], COUNTS)


def follow(method, config=ONE):
    made = tiny_texts()
    arrays = (jnp.asarray(x) for x in (made.prompts, made.lengths, made.forced, made.counts))
    logits, stats = follow_text(tiny_params(), method, *arrays, model=config)
    return np.asarray(logits), stats


def compare(full, logits, targets):
    found = distance(jnp.asarray(full), jnp.asarray(logits), jnp.asarray(targets))
    return Distance(**{name: np.asarray(value) for name, value in vars(found).items()})


def exact(full, logits, target):
    """KL, agreement and both losses of one step in float64 loops."""
    p, q = (np.exp(x.astype(np.float64) - np.float64(x.max())) for x in (full, logits))
    p, q = p / p.sum(), q / q.sum()
    kl = sum(a * (np.log(a) - np.log(b)) for a, b in zip(p, q) if a > 0)
    return kl, p.argmax() == q.argmax(), -np.log(q[target]), -np.log(p[target])


@pytest.mark.parametrize(("scale", "noise"), [(1, 1), (3, 1e-2), (3, 1e-4), (15, 8)])
def test_distances_equal_float64(scale, noise):
    """From nearly equal to hardly overlapping distributions."""
    rng = np.random.default_rng(scale)
    full = rng.normal(0, scale, (3, 2, 300)).astype(np.float32)
    logits = full + rng.normal(0, noise, full.shape).astype(np.float32)
    targets = rng.integers(0, 300, (2, 3))
    got = compare(full, logits, targets)
    for step, row in np.ndindex(3, 2):
        kl, agrees, loss, full_loss = exact(full[step, row], logits[step, row], targets[row, step])
        np.testing.assert_allclose(got.kl[step, row], kl, rtol=1e-4, atol=1e-7)
        assert got.agrees[step, row] == agrees
        np.testing.assert_allclose(got.loss[step, row], loss, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got.full_loss[step, row], full_loss, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", repeated(METHODS, but=("quest",)))
def test_forced_decoding_equals_decode_steps(name):
    """Step by step, with rows that end early; and the row of the table is what float64 makes of the steps."""
    method = any_example(name)
    config = tiny_model(name)
    logits, stats = follow(method, config)
    full, _ = follow(Full(), config)
    cache = read(method, max_new_tokens=STEPS, config=config)
    expected = []
    for step in range(STEPS):
        cache = kvjax.decode_step(tiny_params(), cache, FORCED[:, step], active=step < COUNTS)
        expected.append(np.asarray(cache.logits))
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(np.asarray(stats.length), np.asarray(cache.length))
    found = compare(full, logits, FORCED[:, 1:])
    row = summary([(3, found)], COUNTS)
    oracle_steps = [
        [exact(full[step, text], expected[step][text], FORCED[text, step + 1]) for step in range(COUNTS[text])]
        for text in range(3)
    ]
    by_text = np.array([np.mean(np.array(steps, np.float64), axis=0) for steps in oracle_steps])
    kl, agrees, loss, full_loss = by_text.mean(axis=0)
    np.testing.assert_allclose(row["value"], kl, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(row["agreement"], 100 * agrees, rtol=1e-4)
    np.testing.assert_allclose(row["perplexity"], np.exp(loss), rtol=1e-3)
    np.testing.assert_allclose(row["perplexity_ratio"], np.exp(loss - full_loss), rtol=1e-3)
    np.testing.assert_allclose(row["by_text"]["kl"], by_text[:, 0], rtol=1e-3, atol=1e-6)
    assert row["value"] > 1e-3 or name == "full"
    assert len(row["along"]["kl"]) == min(STEPS, 16) and row["steps"] == COUNTS.sum()


@pytest.mark.parametrize("method", [Full(), SnapKV(budget=96, obs_window=5)], ids=["full", "snapkv"])
def test_a_budget_that_holds_everything_is_at_no_distance(method):
    row = summary([(3, compare(follow(Full())[0], follow(method)[0], FORCED[:, 1:]))], COUNTS)
    assert row["value"] <= 1e-6 and row["agreement"] == 100 and abs(row["perplexity_ratio"] - 1) < 1e-4


BUDGETED = [x for x in METHODS if "budget" in oracle(x.values[0]).KNOBS]


@pytest.mark.parametrize("name", repeated(BUDGETED, but=("quest",)))
def test_budgets_share_a_program_and_nothing_else(name):
    """With room for a larger budget a method gives the same logits and the same accounting, and is not compiled again."""
    large = oracle(name).KNOBS["budget"]
    methods = [example(name, budget=budget) for budget in (large - 2, large)]
    room = shared_room(methods, 50)
    assert room == large
    roomy = [example(name, budget=method.budget, capacity=room) for method in methods]
    config = tiny_model(name)
    follow(roomy[1], config)
    programs = follow_text._cache_size()
    logits, stats = follow(roomy[0], config)
    assert follow_text._cache_size() == programs, "the program of the larger budget"
    alone, alone_stats = follow(methods[0], config)
    np.testing.assert_allclose(np.asarray(logits), alone, rtol=1e-4, atol=1e-4)
    for read_stat in ("attended", "bytes_read", "full_bytes_read", "length"):
        np.testing.assert_array_equal(*(np.asarray(x) for x in (getattr(stats, read_stat), getattr(alone_stats, read_stat))))


def test_methods_share_the_room_of_the_largest_setting():
    assert shared_room([Quest(budget=16), Quest(budget=64), Quest(budget=512)], 512) == 64, "512 attends to everything"
    assert shared_room([Full()], 512) is None
    assert shared_room([example("mosaickv", fraction=f) for f in (0.1, 0.5)], 512) == 0.5
    ratios = [(0.5, 0.2, 0.1), (0.4, 0.3, 0.1)]
    assert shared_room([example("chess", ratios=shares) for shares in ratios], 512) == (0.5, 0.3, 0.1)


@pytest.fixture(scope="module")
def model(directory) -> LoadedModel:
    return load_model(directory)


def words(model, ids):
    return model.tokenizer.decode([int(token) for token in ids])


def test_prose_goes_on_where_its_context_ends(model):
    settings = FidelitySettings(samples=5, tokens=40, lengths=(300,))
    cut = texts.passages(model, settings, 300, "prose")
    assert len(cut) == 5 and cut.prompts.shape == (5, 384)
    assert (cut.lengths == 260).all() and (cut.counts == 40).all()
    np.testing.assert_array_equal(cut.forced[:, 1:], cut.targets[:, :-1])
    whole = " ".join(texts.held_out_text("prose").split())
    said = words(model, [*cut.prompts[2, 200:260], *cut.forced[2], cut.targets[2, -1]])
    assert " ".join(said.split()) in whole, "a passage of the held-out text, without a gap"
    assert len({tuple(row) for row in cut.forced.tolist()}) == 5
    everywhere = texts.passages(model, settings, 300, "prose:whole")
    assert words(model, everywhere.prompts[0, :200]).strip() not in whole, "a passage of all prose"
    again = texts.passages(model, dataclasses.replace(settings, seed=1), 300, "prose")
    assert (again.prompts != cut.prompts).any()


def test_answers_stand_behind_the_template_and_the_question(model):
    settings = FidelitySettings(samples=2, tokens=24, lengths=(512,))
    made = texts.answers(model, settings, 512, ("<user>", "<assistant>"))
    for row in range(2):
        prompt = words(model, made.prompts[row, : made.lengths[row]])
        answer = words(model, [*made.forced[row], made.targets[row, -1]])
        assert prompt.startswith("<user>") and "<assistant> The values in the records of" in prompt
        first = answer.split(",")[0].strip()
        assert len(first) == 36 and first in prompt, "the first uuid of the list stands in the context"
    assert made.forced.shape == (2, 24) and made.prompts.shape[1] >= 488
    short = texts.answers(model, dataclasses.replace(settings, task="niah_single_2", tokens=100), 512, None)
    assert short.steps < 100 and short.steps == short.counts.max(), "no steps behind the longest answer"


def test_greedy_answers_equal_full(model):
    settings = FidelitySettings(samples=2, tokens=8, lengths=(512,))
    asked = texts.answers(model, settings, 512, None)
    made = texts.greedy(model, asked, 2)
    first = [words(model, row[:size]) for row, size in zip(asked.prompts, asked.lengths)]
    for row in range(len(made)):
        prompt = made.prompts[row, : made.lengths[row]].tolist()
        assert words(model, prompt) in first
        cache = kvjax.prefill(model.params, [prompt], config=model.config, max_new_tokens=9, pad_multiple=512)
        out = kvjax.generate(model.params, cache, max_new_tokens=9)
        count = int(made.counts[row])
        expected = np.asarray(out.tokens[0])[: count + 1]
        np.testing.assert_array_equal([*made.forced[row, :count], made.targets[row, count - 1]], expected)


def test_texts_of_a_single_token_are_left_out():
    made = texts.make_texts([[1, 2], [3], [4]], [[5, 6, 7], [8], [9, 10]], 4, 5)
    assert made.prompts[:, :2].tolist() == [[1, 2], [4, 0]] and made.counts.tolist() == [2, 1]
    assert made.forced[0, :2].tolist() == [5, 6] and made.targets[0, :2].tolist() == [6, 7]
    real, last = made.rows(1, 2)
    assert real == 1 and last.forced[:, 0].tolist() == [9, 9]
    with pytest.raises(ValueError, match="at least two tokens"):
        texts.make_texts([[1]], [[2]], 4, 5)
    with pytest.raises(ValueError, match="at most 4 tokens beside 5 steps, got 6"):
        texts.make_texts([[1] * 6], [[2, 3]], 4, 5)


@pytest.mark.parametrize(
    ("agrees", "expected"),
    [
        ("1" * 15, 5),  # three whole passes
        ("1" * 17, 5),  # the end cuts the fourth
        ("0000", 1),
        ("10111101", 7 / 2),  # 1 kept, then 4, behind which Full gives a token; the end cuts the third
        ("111", 3),  # the only pass
    ],
)
def test_tokens_per_pass_count_runs_of_agreement(agrees, expected):
    assert tokens_per_pass(np.array(list(agrees), float)) == expected


def run(directory, out, *more):
    arguments = [
        "--model", directory, "--methods", "snapkv,streamingllm", "--budgets", "1/8,1/4", "--lengths", 384, "--samples", 3,
        "--tokens", 16, "--batch-tokens", 768, "--out", out, *more,
    ]  # fmt: skip
    return main(list(map(str, arguments)))


@pytest.mark.slow
def test_the_command_records_full_and_every_budget(directory, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(directory, out, "--methods", "snapkv", "--no-plot", "--quiet", "--streams", "prose") == 0
    record = json.loads((out / "metrics.json").read_text())
    assert [row["method"] for row in record["metrics"]] == ["full", "snapkv(budget=1/8)", "snapkv(budget=1/4)"]
    full, *others = record["metrics"]
    assert full["value"] == 0 and full["agreement"] == 100 and full["perplexity_ratio"] == 1 and full["accepted"] == 5
    assert all(1 <= row["accepted"] <= 5 for row in others)
    assert [row["budget"] for row in others] == [48, 96] and all(row["value"] > 0 for row in others)
    assert others[0]["bytes_read_per_step"] < others[1]["bytes_read_per_step"] < full["bytes_read_per_step"]
    assert others[0]["compile_seconds"] > 0 == others[1]["compile_seconds"], "two budgets, one program"
    for row in record["metrics"]:
        assert row["texts"] == 3 and row["steps"] == 48 and len(row["along"]["kl"]) == 16
    capsys.readouterr()
    assert run(directory, out) == 0  # the other method and stream join; the first rows are not measured again
    said = capsys.readouterr()
    joined = json.loads((out / "metrics.json").read_text())
    assert "7 rows to measure, 3 in" in said.err and joined["metrics"][:3] == record["metrics"]
    assert len(joined["notes"]["runs"]) == 2 and {row["stream"] for row in joined["metrics"]} == {"prose", "answers"}
    assert said.out.count("| StreamingLLM(budget=1/8) | 48 |") == 2 and "frontier" in said.out and "| accepted |" in said.out
    assert (out / "table.md").read_text() == fidelity_tables(joined)
    assert [name for name, _ in figures(out, [], PACKAGES)] == ["fidelity", "along"]
    for name in ("fidelity", "along"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert run(directory, out, "--seed", 1, "--no-plot") == 2
    assert "holds cells with seed=0, got 1" in capsys.readouterr().err
    assert run(directory, out, "--weight-dtype", "int8", "--no-plot") == 2
    assert "holds cells with dtype='float32', got 'float32, weights int8'" in capsys.readouterr().err


FILES = [x for x in (ROOT / "docs" / "settings").glob("*.yaml") if "experiments.lab.fidelity" in x.read_text()]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_settings_of_the_documentation_load(file):
    settings = FidelitySettings.from_yaml(file)
    assert f"python -m experiments.lab.fidelity --config docs/settings/{file.name}" in file.read_text()
    tokenizer = models.load_tokenizer(models.builtin_directory())
    for choice in settings.choices:
        thresholds = {"tau_entropy": 1.0, "tau_varentropy": 1.0} if choice.name == "chess" else {}
        choice.at(min(settings.lengths), tokenizer, models.shapes.qwen25_1_5b(), thresholds)
    assert FILES


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--lengths", "512,2048"], "lengths must be at most 1024 tokens"),
        (["--lengths", "16"], "they must be above tokens=16, got 16"),
        (["--haystack", "noise"], "haystack must be 'prose', 'prose:whole', 'code' or file:PATH, got 'noise'"),
        (["--haystack", "file:nowhere.txt"], "haystack file not found"),
        (["--streams", "poems"], "--streams: expected one of prose, code, answers, greedy"),
        (["--task", "qa_1"], "task must be a generated task without a file"),
        (["--budgets", "1/8,most"], "a budget is a share such as 1/8"),
        (["--methods", "quest", "--set", "quest.offload=true"], "offload must be False, got quest("),
        (["--set", "h2o.budget=8"], "--set names 'h2o'"),
        (["--system", "Be kind.", "--template", "none"], "system belongs to a chat template, which this run does not have"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_flags_are_refused_in_a_line(directory, tmp_path, capsys, flags, expected):
    assert run(directory, tmp_path / "out", "--no-plot", "--quiet", *flags) == 2
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1
    assert not (tmp_path / "out" / "metrics.json").exists()


def test_a_short_file_is_refused(directory, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("A short text. " * 20)
    assert run(directory, tmp_path / "out", "--quiet", "--haystack", f"file:{tmp_path / 'short.txt'}") == 2
    assert "use shorter lengths or a longer text" in capsys.readouterr().err


def test_coded_weights_are_compared_with_the_numbers_of_a_reference(directory, model, tmp_path):
    """The row of Full is the distance of the two models' logits, and not of a model from itself."""
    flags = ["--lengths", "96", "--tokens", "8", "--samples", "2", "--streams", "prose", "--methods", "full"]
    flags += ["--model", str(directory), "--weight-dtype", "int8", "--reference", str(directory), "--out", str(tmp_path)]
    assert main([*flags, "--no-plot", "--quiet"]) == 0
    record = json.loads((tmp_path / "metrics.json").read_text())
    coded = load_model(directory, weight_dtype="int8")
    made = texts.passages(model, FidelitySettings(lengths=(96,), tokens=8, samples=2), 96, "prose")
    arrays = [jnp.asarray(x) for x in (made.prompts, made.lengths, made.forced, made.counts)]
    full, logits = (follow_text(one.params, Full(), *arrays, model=one.config)[0] for one in (model, coded))
    kl = [exact(*np.asarray((full[step, row], logits[step, row])), 0)[0] for step, row in np.ndindex(8, 2)]
    (row,) = record["metrics"]
    assert row["method"] == "full" and row["value"] > 1e-7
    np.testing.assert_allclose(row["value"], np.mean(kl), rtol=1e-2)
    numbers = {"model": model.name, "weights": model.weights, "dtype": "float32"}
    assert record["settings"]["reference"] == numbers and record["settings"]["weights"] == coded.weights
    assert f"the reference's: {model.name}, float32." in (tmp_path / "table.md").read_text()


def test_a_reference_has_the_same_tokens_and_enough_positions(model, tmp_path):
    settings = FidelitySettings(lengths=(512,))
    for name, value, expected in (("vocab_size", 7, "vocabulary of"), ("max_position_embeddings", 256, "at most 256 tokens")):
        other = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_token_ids=(), **{name: value}))
        with pytest.raises(ValueError, match=expected):
            Runner(settings, model, tmp_path, reference=other)


def test_differences_pair_the_same_texts():
    ones = Distance(**dict.fromkeys(("kl", "agrees", "loss", "full_loss"), np.ones((2, 3))))

    def row(method, kl, bytes_read):
        return {
            **summary([(3, ones)], np.full(3, 2)), "method": method, "stream": "prose",
            "length": 64, "value": float(np.mean(kl)), "by_text": {"kl": kl}, "budget": None, "no_effect": False,
            "bytes_read_per_step": bytes_read, "full_bytes_read_per_step": 100.0, "attended_tokens": 3.0,
            "length_tokens": 9.0,
        }  # fmt: skip

    near, far = row("near", [1.0, 5.0, 9.0], 10.0), row("far", [1.5, 5.5, 9.5], 20.0)
    mean, (low, high) = difference(far, near)
    assert mean == low == high == 0.5, "texts differ, the difference does not"
    said = table([near, far])
    assert "| near | 3 | 5 [" in said and "frontier" in said and "**+0.5 [+0.5, +0.5]**" in said
    assert "frontier" in table([row("near", [2.0, 5.0, 9.0], 30.0), far]).splitlines()[2]
    with pytest.raises(ValueError, match="rows of the same texts"):
        difference(near, {**far, "length": 128})


def test_full_alone_has_no_usual_figure():
    rows = [{"method": "full", "value": 0.1}]
    assert plots.figures({"metrics": rows})[1] == []
    assert plots.figures({"metrics": [*rows, {"method": "quest", "value": 0.1}]})[1] == ["fidelity", "along"]


def test_pieces_average_positions_and_values():
    assert along({"kl": [1.0, 3.0]}) == {"steps": [1.0, 2.0], "kl": [1.0, 3.0]}
    made = along({"kl": list(range(32))})
    assert made["steps"][0] == 1.5 and made["kl"][0] == 0.5 and len(made["kl"]) == 16
