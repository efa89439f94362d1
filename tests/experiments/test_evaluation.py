"""Evaluation: cells, where the question stands, folders that resume, paired comparison, sweeps, a bad method."""

import csv
import dataclasses
import functools
import io
import json
import pathlib
import re
import shutil
import types

import jax
import numpy as np
import pytest

import kvjax
import models
from experiments.answering import METHODS, Choice, Shape, ask, budget_of, load_model
from experiments.benchmarks import Cell, Example, Reading, encode_cell
from experiments.cli import read_record, read_yaml
from experiments.cli.main import main
from experiments.evaluation import answers, cells, comparison, plan, plots, runner, tables
from experiments.evaluation.folder import Folder, read_predictions
from experiments.evaluation.grid import the_grid
from experiments.evaluation.settings import EvaluationSettings
from experiments.records import bootstrap_interval, method_styles
from kvjax import registry
from kvjax.api.sweep import group_by_structure

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("evaluation")]

BUILTIN = models.builtin_directory()
TOKENIZER = BUILTIN / "tokenizer.json"
OUTSIDE = "tests.outside_method:Newest"
CONFIG = models.ModelConfig(
    vocab_size=5120, hidden_size=32, intermediate_size=64, num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=16,
    max_position_embeddings=2048, tie_word_embeddings=True, qk_norm=True, eos_token_ids=(0,), rope_theta=1e4,
)  # fmt: skip


@functools.cache
def loaded(directory):
    return load_model(directory, "float32")


def make(directory, out, **given):
    given = {"tasks": ("passkey", "niah_single_2"), "lengths": (512,), "samples": 2, "workers": 0, **given}
    chosen = EvaluationSettings.from_mapping({"model": str(directory), **given}, "a test")
    return runner.Runner(chosen, loaded(directory), out, progress=False)


# ---- what is asked ------------------------------------------------------------------------------------------------


def example(**fields):
    return Example(
        **{
            "task": "t", "context": "The grass is green. " * 40, "question": "\nWhat is green?", "answer_prefix": " The",
            "answers": ("grass",), "max_new_tokens": 8, "scorer": "all", **fields,
        }
    )  # fmt: skip


def encode(found, **reading):
    return encode_cell(Reading(TOKENIZER, **reading), Cell("t", None, len(found), source="x:y", given=tuple(found)))


def test_a_template_stands_around_context_and_question():
    plain, bare = example(), example(chat=False)
    made = encode([plain, bare], around=("<user>", "</user><bot>"))
    decode = models.load_tokenizer(BUILTIN).decode
    assert decode(made.heads[0]) == "<user>" + plain.context
    assert decode(made.tails[0]) == plain.question + "</user><bot>" + plain.answer_prefix
    assert decode(made.wholes[0]) == "<user>" + plain.context + plain.question + "</user><bot>" + plain.answer_prefix
    assert decode(made.wholes[1]) == bare.prompt


def test_answers_end_where_their_suite_says():
    tokenizer = models.load_tokenizer(BUILTIN)
    ids = tokenizer.encode("\nHe is late.\nShe is not.").ids
    assert answers.answer_text(tokenizer, [*ids, 0], 99, (0,), ()) == "\nHe is late.\nShe is not."
    assert answers.answer_text(tokenizer, ids, 99, (0,), ("\n",)) == "He is late."
    assert answers.answer_text(tokenizer, ids, 3, (0,), ()) == tokenizer.decode(ids[:3])


def test_files_are_batched_by_length():
    found = [example(context="The sky is blue. " * n, group="") for n in (1, 2, 40, 41, 200)]
    made = encode(found)
    batches = answers.make_batches(made, "prefill", 4096, None)
    assert sorted(i for batch in batches for unit in batch.units for i in unit) == [0, 1, 2, 3, 4]
    for batch in batches:
        longest = max(len(made.wholes[unit[0]]) for unit in batch.units)
        assert longest <= batch.shape.length <= max(128, 1.25 * longest) and batch.shape.rows * batch.shape.length <= 4096


def test_questions_about_one_context_share_it():
    found = [example(group="a", question=f"\nNumber {i}?") for i in range(3)] + [example(group="b")]
    (batch,) = answers.make_batches(encode(found), "extend", 4096, None)
    assert batch.units == ((0, 1, 2), (3,)) and batch.shape.questions == 3 and not batch.shape.keep
    (alone,) = answers.make_batches(encode(found), "prefill", 4096, None)
    assert alone.units == ((0,), (1,), (2,), (3,)) and alone.shape.questions == 0


@pytest.mark.slow
def test_under_full_a_question_may_stand_in_the_prompt_or_after_it():
    """Under Full, asking afterwards changes nothing; turns see the questions and answers before them."""
    params = models.random_params(CONFIG, jax.random.key(1))
    rng = np.random.default_rng(0)
    contexts = [rng.integers(1, 5000, n).tolist() for n in (30, 21, 26)]
    questions = [[rng.integers(1, 5000, 5 + i).tolist() for i in range(n)] for n in (2, 3, 1)]

    def ids(given, shape, asked=()):
        return ask(params, dataclasses.replace(CONFIG, eos_token_ids=()), given, "full", shape, questions=asked).ids

    later = ids(contexts, Shape(32, 2, 6, questions=3, question_length=8), questions)
    turns = ids(contexts, Shape(32, 2, 6, questions=3, question_length=8, keep=True), questions)
    assert [len(x) for x in later] == [len(x) for x in turns] == [2, 3, 1]
    for row, context in enumerate(contexts):
        said = list(context)
        for turn, question in enumerate(questions[row]):
            (inside,) = ids([context + question], Shape(80, 1, 6))
            assert later[row][turn] == inside[0]
            said += question
            (conversation,) = ids([said], Shape(80, 1, 6))
            assert turns[row][turn] == conversation[0]
            said += turns[row][turn]
    with pytest.raises(ValueError, match="at most 32 tokens, got 33"):
        ids([[1] * 33], Shape(32, 1, 6))


# ---- keys ---------------------------------------------------------------------------------------------------------


def test_a_key_holds_all_that_decides_a_score():
    plain = encode([example()]).keys[0]
    others = [
        encode([example(**{name: value})]).keys[0]
        for name, value in {
            "task": "u", "context": "Green.", "question": "?", "answer_prefix": "", "answers": ("grass", "moss"),
            "stop": ("\n",), "max_new_tokens": 9, "scorer": "part", "classes": ("grass",), "labels": {"depth": 1},
        }.items()
    ]  # fmt: skip
    others += [encode([example()], **{name: value}).keys[0] for name, value in {
        "around": ("<user>", "</user>"), "limit": 60, "new_tokens": 3,
    }.items()]  # fmt: skip
    assert len({plain, *others}) == 1 + len(others)
    assert encode([example(group="named otherwise")]).keys[0] == plain == encode([example()], limit=9999).keys[0]
    turns = [example(group="a", question=text) for text in "?!."]
    first, again = encode(turns).keys, encode([turns[1], turns[0], turns[2]]).keys
    assert len({*first, *again}) == 6, "an answer in a conversation depends on the turns before it"


def test_examples_of_one_prompt_have_keys_of_their_own():
    made = encode([example(), example(answers=("moss",)), example()]).keys
    assert len(set(made)) == 3 and made[2] == f"{made[0]}#2"


# ---- folders ------------------------------------------------------------------------------------------------------


def test_an_interrupted_evaluation_goes_on(directory, tmp_path, monkeypatch):
    given = {"methods": ["streamingllm"], "budgets": ("1/4",), "max_new_tokens": 4}
    true, done = answers.answer_cell, []

    def stops(*arguments, **more):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(arguments)
        return true(*arguments, **more)

    monkeypatch.setattr(runner, "answer_cell", stops)
    with pytest.raises(KeyboardInterrupt):
        make(directory, tmp_path, **given).run()
    assert len(read_record(tmp_path)["metrics"]) == 3
    done.clear()
    make(directory, tmp_path, **given).run()
    assert len(done) == 1
    found = read_record(tmp_path)
    assert [(row["method"], row["name"]) for row in found["metrics"]] == [
        ("full", "passkey"), ("full", "niah_single_2"),
        ("streamingllm(budget=1/4)", "passkey"), ("streamingllm(budget=1/4)", "niah_single_2"),
    ]  # fmt: skip
    for row in found["metrics"]:
        needed = ("attended_tokens", "bytes_read_per_step", "resident_bytes_per_row", "interval_95", "question", "knobs")
        assert all(row[name] is not None for name in needed) and 0 <= row["value"] <= 100
        lines = read_predictions(tmp_path, row)
        assert len(lines) == 2 and all(line["answer_tokens"] <= 4 for line in lines)
    runs = read_record(tmp_path)["notes"]["runs"]
    assert [one["cells"] for one in runs] == [3, 1] and runs[0]["eos_token_ids"] == [0]
    assert [row["run"] for row in found["metrics"]] == [0, 0, 0, 1]
    for name, value in (("max_new_tokens", 5), ("seed", 1)):
        with pytest.raises(ValueError, match=f"{name}=., got {value}"):
            make(directory, tmp_path, **{**given, name: value})
    again = EvaluationSettings.from_mapping(read_yaml(tmp_path / "config.yaml"), "config.yaml")
    assert again.as_dict() == make(directory, tmp_path, **given).settings.as_dict()


def test_what_has_compiled_is_asked_first(directory, tmp_path, monkeypatch):
    """Else groups come cell by cell, the first of each, then the second; a cell is planned when nothing else can be asked."""
    run = make(directory, tmp_path, methods=["snapkv", "streamingllm"], budgets=("1/4",))
    monkeypatch.setattr(runner.Runner, "_add", lambda self, ahead, group: [len(group.jobs)])
    compiled, planned, groups = {1}, [], run._plan.groups
    monkeypatch.setattr(run._plan, "groups", lambda jobs: planned.append(jobs[0].cell.task) or groups(jobs))
    ahead = types.SimpleNamespace(spare=True, done=compiled.__contains__)
    found = ((len(group.jobs), group.jobs[0].cell.task) for group in run._in_order(run._jobs(run.settings.choices), ahead))
    assert next(found) == (1, "passkey") and planned == ["passkey"]
    assert next(found) == (1, "niah_single_2")
    compiled.add(2)
    assert list(found) == [(2, "passkey"), (2, "niah_single_2")]
    found = run._in_order(run._jobs(run.settings.choices), ahead)
    assert [len(group.jobs) for group in found] == [2, 2, 1, 1]


def test_more_samples_join_the_rows(directory, tmp_path, monkeypatch):
    """Only the further contexts are asked, whether the first answers are there as texts or as scores alone."""
    given = {"methods": ["snapkv"], "budgets": ("1/4",), "max_new_tokens": 4, "tasks": ("passkey", "vt")}
    whole = make(directory, tmp_path / "whole", samples=5, **given)
    whole.run()
    asked, true = [], answers.ask_in_turn
    monkeypatch.setattr(answers, "ask_in_turn", lambda *them, **more: asked.append(len(them[2])) or true(*them, **more))
    for name, text in (("texts", True), ("scores", False)):
        grown = make(directory, tmp_path / name, **given)
        grown.run()
        grown.folder.keep_examples()
        if not text:
            shutil.rmtree(tmp_path / name / "predictions")
            for row in grown.folder.rows:  # as in docs/records
                for field in (*answers.SECONDS, "counters"):
                    del row[field]
            grown.folder.results.write()
        asked.clear()
        grown = make(directory, tmp_path / name, samples=5, **given)
        grown.run()
        make(directory, tmp_path / name, samples=4, **given).run()  # it has them
        assert asked == [3, 3]
        grown.folder.keep_examples()
        both = [comparison.load([run.folder.path]) for run in (whole, grown)]
        for one, other in zip(*both, strict=True):
            assert one.examples == other.examples and other.row["samples"] == 5
            for field in one.row.keys() - {*answers.SECONDS, "run", "counters", "predictions"}:
                exact = field not in (*answers.COSTS, "mean_answer_tokens")
                assert other.row[field] == (one.row[field] if exact else pytest.approx(one.row[field], abs=0.1)), field
            if text:
                assert read_predictions(tmp_path / name, other.row) == read_predictions(tmp_path / "whole", one.row)
    fewer = make(directory, tmp_path / "fewer", **given)
    fewer.run()
    entries = [x for x in comparison.load([fewer.folder.path]) if x.row["method"] != "full"]
    pairs = comparison.beside_reference([*both[0][::2], *entries])  # Full has more
    assert [(item.contexts, item.is_reference) for item in pairs if not item.is_reference] == [(2, False)] * 2


def test_within_the_window_pi_and_ntk_read_beside_full(directory, tmp_path, monkeypatch):
    """Their factor is 1 there. A method is made once for a length, because SentenceKV reads the whole vocabulary for it."""
    made = []
    run = make(directory, tmp_path, methods=["pi", "quest", "ntk", "selfextend"])
    monkeypatch.setattr(Choice, "at", lambda self, *given, at=Choice.at: made.append(self.name) or at(self, *given))
    jobs = run._jobs(run.settings.choices)
    groups = {tuple(job.label for job in group.jobs) for group in run._plan.groups(jobs)}
    assert groups == {("full", "pi", "quest", "ntk"), ("selfextend",)}
    assert len(jobs) == 10 and sorted(made) == sorted(["full", "pi", "quest", "ntk", "selfextend"])


def test_methods_read_together_and_answer_as_alone(directory, tmp_path):
    """With two at a time the third begins with the hidden states of the first two."""
    given = {"methods": ["snapkv", "quest", "streamingllm"], "budgets": ("1/4",), "max_new_tokens": 4, "tasks": ("passkey",)}
    found = {}
    for most in (8, 2, 1):
        make(directory, tmp_path / str(most), together=most, **given).run()
        rows = {row["method"]: row for row in read_record(tmp_path / str(most))["metrics"]}
        assert len(rows) == 4
        assert [row.get("read_together") for row in rows.values()] == ([None] * 4 if most == 1 else [3, 3, 3, None])
        found[most] = {
            name: ([x["prediction"] for x in read_predictions(tmp_path / str(most), row)], row["bytes_read_per_step"])
            for name, row in rows.items()
        }
    assert found[8] == found[2] == found[1]


def test_an_interruption_keeps_what_methods_that_read_together_have_answered(directory, tmp_path, monkeypatch):
    true = answers.ask_in_turn

    def asked(*arguments, **more):
        yield next(true(*arguments, **more))
        raise KeyboardInterrupt

    monkeypatch.setattr(answers, "ask_in_turn", asked)
    monkeypatch.setattr(runner.Runner, "_add", lambda self, ahead, group: [])  # compiles what runs, and nothing else
    given = {"methods": ["snapkv", "quest"], "budgets": ("1/4",), "max_new_tokens": 4, "tasks": ("passkey",)}
    with pytest.raises(KeyboardInterrupt):
        make(directory, tmp_path, together=8, **given).run()
    kept = read_record(tmp_path)["metrics"]
    assert [(row["method"], row["read_together"]) for row in kept] == [("full", 3)]
    assert len(read_predictions(tmp_path, kept[0])) == 2


def asks(directory, out, file, monkeypatch, says=" sky", **given):
    """An evaluation of a user's file under Full, whose model says the same to everything; the runner."""

    def said(model, encoded, methods, question, batches, clock, new_tokens=None, *_):
        lines = answers.predict(model, encoded, [model.tokenizer.encode(says).ids] * len(encoded.examples), new_tokens)
        counted = dict.fromkeys((*answers.SECONDS, *comparison.ACCOUNT), 1.0) | {"no_effect": False}
        return [({**counted, **answers.summary(encoded, lines)}, lines) for _ in methods]

    monkeypatch.setattr(runner, "answer_cell", said)
    monkeypatch.setattr(runner.Runner, "_add", lambda self, ahead, group: [])  # compiles nothing
    given = {"tasks": (f"kvpress:{file}",), "lengths": (64,), "samples": 9, "together": 1, "methods": ["full"], **given}
    made = make(directory, out, **given)
    made.run()
    return made


def rows_of(*answers, question="\nWhat is blue?", task="niah_single_1", **fields):
    row = {"context": "The sky is blue. " * 30, "question": question, "answer_prefix": "", "task": task, "max_new_tokens": 4}
    return "".join(json.dumps(row | fields | {"answer": answer}) + "\n" for answer in answers)


def test_a_file_that_changed_is_never_compared_with_what_it_was(directory, tmp_path, monkeypatch):
    """Whatever was corrected, and whether or not there is a cell left to run."""
    file, out = tmp_path / "mine.jsonl", tmp_path / "out"
    file.write_text(rows_of("sky", "sea", question="\nWhich?"))
    asks(directory, out, file, monkeypatch)
    assert len(asks(directory, out, file, monkeypatch).folder.rows) == 1, "the same file again"
    changes = {
        "a reference": rows_of("sky", "the sea", question="\nWhich?"),
        "a limit": rows_of("sky", "sea", question="\nWhich?", max_new_tokens=5),
        "a scorer": rows_of("sky", "sea", question="\nWhich?", scorer="niah_number"),
        "a question": rows_of("sky", "sea", question="\nWhat?"),
        "a row less": rows_of("sky", question="\nWhich?"),
        "the order": rows_of("sea", "sky", question="\nWhich?"),
    }
    for about, text in changes.items():
        file.write_text(text)
        for more in ({}, {"methods": ["streamingllm"]}) if about == "a reference" else ({},):
            with pytest.raises(ValueError, match="mine.jsonl has changed since Full answered .*choose another --out"):
                asks(directory, out, file, monkeypatch, **more)
        other = tmp_path / about
        asks(directory, other, file, monkeypatch, methods=["streamingllm"])
        with pytest.raises(ValueError, match="different examples of niah_single_1"):
            comparison.load([out, other])
    record = read_record(out)
    record["metrics"] += read_record(tmp_path / "a reference")["metrics"]
    with pytest.raises(ValueError, match="different examples of niah_single_1: the prompts, the references"):
        plots.figures(record)


class Sized(plan.Plan):
    """A plan of jobs that need identity["needs"] bytes for 65,536 tokens; "x" is prefilled alone, "e" apart from others."""

    def __init__(self, most, limit, tokens=65536):
        self._settings, self._bytes = types.SimpleNamespace(together=most, batch_tokens=tokens), limit
        self._model = types.SimpleNamespace(mesh="any")  # on which groups stay apart

    def alone(self, job):
        return job.label == "x"

    def _kinds(self, job):
        return job.label == "e"

    def needed(self, jobs, tokens):
        return sum(job.identity["needs"] for job in jobs) * tokens / 65536


def jobs_of(labels, needs, tasks="tu"):
    return [
        plan.Job(label, None, "prefill", Cell(task, 512, 2), {"needs": size})
        for label, size in zip(labels, needs, strict=True)
        for task in tasks
    ]


def test_a_plan_has_every_job_once_in_a_group_that_fits():
    for seed in range(20):
        draw = np.random.default_rng(seed)
        jobs = jobs_of(draw.choice(list("abcdex"), 12), [int(n) for n in draw.integers(0, 9, 12)])
        most, limit, tokens = int(draw.integers(1, 6)), 12, 32768 << int(draw.integers(0, 4))
        sized = Sized(most, limit, tokens)
        groups = sized.groups(jobs)
        place = {id(job): at for at, job in enumerate(jobs)}
        assert sorted(place[id(job)] for group in groups for job in group.jobs) == list(range(len(jobs)))
        assert [place[id(group.jobs[0])] for group in groups] == sorted(place[id(group.jobs[0])] for group in groups)
        for group in groups:
            assert len({job.cell for job in group.jobs}) == 1 and min(tokens, 65536) <= group.tokens <= tokens
            assert len(group.jobs) == 1 or (len(group.jobs) <= most and sized.needed(group.jobs, group.tokens) <= limit)
            assert len(group.jobs) == 1 or not any(job.label == "x" for job in group.jobs)
            assert len({job.label == "e" for job in group.jobs}) == 1


def test_the_chat_template_is_found_and_recorded(directory, tmp_path):
    chat = tmp_path / "chat"
    shutil.copytree(directory, chat)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<bot>{% if quiet %}...{% endif %}"
    (chat / "chat_template.jinja").write_text(template)
    given = {"tasks": ("passkey",), "template_variables": {"quiet": True}, "system": "Be brief."}
    one = make(chat, tmp_path / "out", **given)
    told = one.folder.results.settings
    assert told["template"] == models.ChatTemplate(template).identity and told["template_variables"] == {"quiet": True}
    made = one.store[one.cells[0]]
    decode = models.load_tokenizer(BUILTIN).decode
    assert decode(made.heads[0]).startswith("<system>Be brief.<user>There is an important info")
    assert (
        "<bot>..." + made.examples[0].answer_prefix
        == decode(made.wholes[0])[-len("<bot>..." + made.examples[0].answer_prefix) :]
    )
    assert all(len(ids) + example.max_new_tokens <= 512 for ids, example in zip(made.wholes, made.examples))
    given |= {"system": None, "template": "none"}
    assert make(chat, tmp_path / "bare", **given).folder.results.settings["template"] is None


@pytest.mark.thorough
def test_every_method_at_its_papers_budget(directory, tmp_path):
    one = make(directory, tmp_path, tasks=("passkey",), samples=1, methods=["papers", "baselines"], max_new_tokens=4)
    one.run()
    rows = {row["method"]: row for row in one.folder.rows}
    assert sorted(rows) == sorted(METHODS)
    assert rows["quest"]["budget"] == 64 and rows["quest"]["note"] == "1/8 of the context"
    assert "2688 tokens scaled" in rows["tokenselect"]["note"] and "hit_rate" in rows["tokenselect"]["counters"]
    assert rows["sentencekv"]["knobs"]["boundary"].startswith("bool[5120], sum ")
    thresholds = one.folder.results.notes["chess_calibration"]
    assert rows["chess"]["knobs"]["tau_entropy"] == thresholds["tau_entropy"] > 0
    assert rows["full"]["bytes_read_per_step"] == rows["full"]["full_bytes_read_per_step"]


def test_a_folder_has_one_calibration_whatever_tasks_a_process_runs(directory, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "experiments.evaluation.runner.chess_thresholds",
        lambda model, calibration, results, encode: asked.append(calibration) or {},
    )
    for tasks in (("passkey",), ("vt", "niah_single_1")):
        make(directory, tmp_path, tasks=tasks, samples=1, methods=["chess"])._chess()
    assert asked[0] == asked[1]
    assert len(asked[0].tasks) == 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tasks niah_singel_1", "unknown task 'niah_singel_1'"),
        ("--tasks longbnch:x", "unknown format 'longbnch' in 'longbnch:x', expected one of questions, ruler"),
        ("--tasks mine.csv", "questions:mine.csv for a table of your own questions"),
        ("--tasks qa_1", "qa_1=file:PATH"),
        ("--tasks ruler:vt.jsonl", "vt.jsonl: expected a file, got nothing"),
        ("--tasks vt,file_turns --questions 4 --question extend", "expected question='turns' for more than one question"),
        ("--question turns", "questions must be above 1"),
        ("--depths 2", "depths must lie in"),
        ("--methods quest --budgets=-3", "a budget is a share"),
        ("--methods snapkv --set quest.budget=3", "none of the methods"),
        ("--methods qest --grid budget=1,2", "did you mean 'quest'"),
        ("--methods quest --grid bugdet=3,4", "no knob 'bugdet' (did you mean 'budget'?)"),
        ("--methods quest --grid budget", "--grid takes"),
        ("--methods quest,h2o --grid budget=64", "one in --methods, got quest, h2o"),
        ("--methods quest --grid budget=64 --grid budget=64", "--grid names budget twice"),
        ("--methods quest --grid budget=1/4,1/2000", "budget must be a whole number of at least 1, got 0"),
        ("--methods quest --set quest.budget=48 --grid budget=64", "budget is given one value and a grid of values"),
        ("--methods chess --grid ratios=aggressive;0.5,0.2", "ratios must be a tuple of 3 numbers"),
    ],
)
def test_bad_settings_are_a_line_before_anything_is_loaded(words, message, tmp_path, capsys):
    given = ["--lengths", "512", *words.split()] if "--lengths" not in words else words.split()
    tasks = [] if "--tasks" in words else ["--tasks", "passkey"]
    assert main(["eval", "--model", "absent", "--out", str(tmp_path / "out"), *tasks, *given]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == "" and not (tmp_path / "out").exists()


def test_settings_name_methods_and_make_cells():
    given = {"methods": ["papers", {"quest": {"budget": "1/8"}}], "budgets": ["1/4", 64], "depths": 0.5, "max_length": None}
    settings = EvaluationSettings.from_mapping(given, "here")
    labels = [choice.label for choice in settings.choices]
    assert labels[0] == "full" and "quest(budget=1/8)" in labels and "pariskv(budget=64)" in labels
    assert "chess" in labels  # it has no budget
    assert settings.budgets == ("1/4", "64") and settings.depths == (0.5,) and settings.max_length is None
    ruler = EvaluationSettings.from_mapping({"tasks": ["ruler"], "depths": [0.0, 1.0], "lengths": [1024]}, "here")
    found = runner.make_cells(ruler)
    assert len({cell.task for cell in found}) == 11 and sum(cell.task == "vt" for cell in found) == 1
    assert sum(cell.task == "niah_single_1" for cell in found) == 2
    for bad in ({"methods": 7}, {"haystack": {"vt": "prose"}}, {"model": 3}, {"workers": True}):
        with pytest.raises(ValueError, match=f"here: {next(iter(bad))}"):
            EvaluationSettings.from_mapping(bad, "here")


# ---- comparison ---------------------------------------------------------------------------------------------------


RECORDS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "records"


def entry(method, scores, groups=None, **row):
    full = {
        "method": method, "name": "t", "length": 512, "question": "prefill", "value": 100 * float(np.mean(scores)),
        "unit": "percent", "samples": len(scores), "interval_95": [0.0, 1.0], "attended_tokens": 10, "length_tokens": 20,
        "bytes_read_per_step": 1, "full_bytes_read_per_step": 2, "resident_bytes_per_row": 3, "no_effect": False, **row,
    }  # fmt: skip
    examples = {
        f"k{i}": {"score": score, "answer": str(score), "group": group}
        for i, (score, group) in enumerate(zip(scores, groups or [""] * len(scores)))
    }
    return comparison.Entry(pathlib.Path("somewhere"), full, examples)


def test_few_examples_that_are_all_alike_are_no_evidence():
    """Six wrong answers under a method and six right ones under Full: no interval, and nothing in bold."""
    full, _, few, many = comparison.beside_reference(
        [entry("full", [1.0] * 6), entry("few", [0.0] * 6), entry("full", [1.0] * 30, length=9),
         entry("many", [0.0] * 30, length=9)]
    )  # fmt: skip
    assert (few.difference, few.contexts, few.beyond_noise) == (-100, 6, False) and many.beyond_noise
    told = tables.cell_table([full, few])
    assert "| -100.0 (all 6 alike) |" in told and "**" not in told
    assert "**-100.0 [-100.0, -100.0]**" in tables.cell_table([many])
    paired = [entry("full", [1.0] * 6, ["c"] * 6), entry("few", [0.0] * 6, ["c"] * 6)]
    assert "-100.0 (one context)" in tables.cell_table(comparison.beside_reference(paired)), "six questions about one context"


def test_a_row_counts_the_answers_that_reached_their_limit(directory):
    model, end = loaded(directory), loaded(directory).config.eos_token_ids[0]
    asked = encode([example(scorer="ruler_all"), example(scorer="ruler_all", answers=("sky",))])
    lines = answers.predict(model, asked, [[5, 6, end], [5] * 9], None)
    assert [(line["answer_tokens"], line["ended"]) for line in lines] == [(3, True), (8, False)]
    row = answers.summary(asked, lines)
    assert (row["mean_answer_tokens"], row["unfinished"]) == (5.5, 1)
    assert row["cut_below_100"] == sum(line["score"] < 1 for line in lines if not line["ended"])


def test_a_table_has_a_column_only_if_a_row_has_something_for_it():
    rows = [{"mean_answer_tokens": 1500.2, "unfinished": 0}, {"counters": {"tokens_per_pass": 3.456}},
            {"mean_answer_tokens": 4000, "unfinished": 6, "counters": {}}]  # fmt: skip
    compared = comparison.beside_reference(
        [entry(name, [1.0] * 6, knobs={}, **row) for name, row in zip(["full", "a", "b"], rows)]
    )
    head, _, *body = tables.cell_table(compared).split("\n")
    assert "| same answer | answer tokens | accepted | tokens attended |" in head
    assert [line.split(" | ")[9:11] for line in body] == [["1,500", ""], ["", "3.46 a pass"], ["4,000 (6 unfinished)", ""]]
    assert [comparison.flat(item)["answer_tokens"] for item in compared] == [1500.2, None, 4000]
    assert "same answer | tokens attended" in tables.cell_table(comparison.beside_reference([entry("full", [1.0] * 6)]))


def test_answers_that_were_cut_at_their_limit_and_methods_without_a_mean_are_named():
    rows = [entry("full", [1.0] * 6, examples=6, cut_below_100=0), entry("h2o", [0.0] * 6, examples=6, cut_below_100=2)]
    rows += [entry("h2o", [0.0] * 4, task="u", examples=4, cut_below_100=1), entry("full", [1.0] * 4, task="u")]
    (told,) = tables.remarks(comparison.beside_reference(rows))
    assert told.startswith("Answers that reached their limit of tokens and scored below 100") and "H2O 3 of 10." in told
    cells = [entry("full", [1.0], task="t"), entry("full", [0.0], task="u", name="u"), entry("quest", [1.0], task="t")]
    nothing, left = tables.remarks(comparison.beside_reference(cells))
    assert nothing.startswith("Full scores 0 in u: there nothing is compared") and left.endswith(": Quest (prefill, 512).")
    assert tables.remarks(comparison.beside_reference([entry("full", [1.0] * 6)])) == [], "also of rows of earlier versions"
    settings = EvaluationSettings(tasks=("ruler", "vt"), lengths=(64,))
    assert runner.without_file(settings) == ["qa_1", "qa_2"]
    assert runner.without_file(dataclasses.replace(settings, haystack=("qa_1=file:x.json",))) == ["qa_2"]


def test_a_table_as_csv_has_the_papers_names_and_a_budget_in_every_row(tmp_path, capsys):
    """Of all records, whatever the method calls its budget."""
    for name in ("qwen-16k", "long-answers-4k"):
        folder, out = RECORDS / "results" / name, tmp_path / "t.csv"
        assert main(["compare", str(folder), "--out", str(out)]) == 0
        rows = list(csv.DictReader(io.StringIO(out.read_text())))
        assert len(rows) == len(read_record(folder)["metrics"])
        assert all(int(row["budget"]) > 0 and row["title"] and float(row["score"]) >= 0 for row in rows)
        assert all(
            row[cost].isdigit() for row in rows for cost in ("tokens_attended", "tokens", "bytes_read", "bytes_resident")
        )
        assert {"CHESS", "R-KV", "Ada-KV", "Expected Attention"} <= {row["title"] for row in rows} or name != "qwen-16k"
        assert all(json.loads(row["knobs"]).keys() or row["method"] == "full" for row in rows if row["knobs"])
    assert main(["compare", str(folder), "--format", "tsv"]) == 2 and "--format" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [({"budget": 64}, 64), ({"budget": [10, 20]}, 15), ({"fraction": 0.25}, 250), ({"ratios": [0.5, 0.2]}, 100),
     ({"channels": 0.6}, 900), ({"method": "Quest(budget=512)"}, 900), ({}, 900)],
)  # fmt: skip
def test_every_setting_has_a_budget(knobs, expected):
    assert budget_of({"knobs": knobs, "length_tokens": 1000.0, "attended_tokens": 900.4}) == expected


def test_differences_pair_the_same_samples():
    rng = np.random.default_rng(0)
    base = rng.random(60).round(3).tolist()
    worse = [score - 0.1 for score in base]
    shuffled = rng.permutation(base).tolist()
    full, same, lower, mixed = comparison.beside_reference(
        [entry("full", base), entry("same", base), entry("lower", worse), entry("mixed", shuffled)]
    )
    assert full.difference == same.difference == 0 and same.same == 100 and not same.beyond_noise
    # The same loss on every example has no noise, however much the examples differ from each other.
    assert lower.difference == -10 and lower.interval_95 == (-10, -10) and lower.beyond_noise and lower.same == 0
    low, high = mixed.interval_95
    deviation = np.std(np.subtract(shuffled, base)) / np.sqrt(60)
    assert not mixed.beyond_noise and high - low == pytest.approx(100 * 2 * 1.96 * deviation, rel=0.15)
    (_, _, mean, _) = comparison.averages([full, same, lower, mixed])
    assert mean["method"] == "lower" and mean["difference"] == -10


def test_a_score_is_shown_beside_what_the_oracle_reaches_with_as_many_bytes():
    """Oracles at 10 and 40 bytes of Full's 160; another at 20 is worse than the one at 10, and random ones do not count."""
    scores = {"full": (160, 1.0), "oracle(budget=1)": (10, 0.5), "oracle(budget=2)": (20, 0.4), "oracle(budget=4)": (40, 0.8),
              "oracle(budget=4,by=random)": (40, 0.9), "quest": (20, 0.65), "h2o": (80, 0.45), "tova": (9, 0.5)}  # fmt: skip
    rows = [entry(name, [score] * 30, bytes_read_per_step=read) for name, (read, score) in scores.items()]
    compared = comparison.beside_reference(rows)
    means = {mean["method"]: mean["of_oracle"] for mean in comparison.averages(compared)}
    # At 20 bytes the line stands at 65, halfway from 50 to 80; at 80 bytes at 90, halfway to Full's 100.
    want = dict.fromkeys(scores) | {"quest": 100.0, "h2o": 50.0, "oracle(budget=4,by=random)": 112.5}
    assert {name: share and round(share, 6) for name, share in means.items()} == want
    head, *table = tables.summary_cells(compared)
    assert [row[head.index("of the oracle")] for row in table if row[0] in ("Quest", "TOVA")] == ["100 %", ""]
    assert {row["method"]: row["of_oracle"] for row in comparison.flat_rows(compared)} == want
    assert "| 50 % |" in tables.cell_table(compared)
    easy = entry("oracle(budget=1)", [1.0] * 10, bytes_read_per_step=10)  # Full has 100 on the examples of the oracle
    few = [entry(name, [1.0] * 10 + [0.0] * 10, bytes_read_per_step=read) for name, read in (("full", 160), ("quest", 10))]
    assert [mean["of_oracle"] for mean in comparison.averages(comparison.beside_reference([*few, easy]))][1] == 100
    without = [item for item in compared if "oracle" not in item.row["method"]]
    assert "oracle" not in tables.summary_table(without) + tables.cell_table(without)
    (panel,) = plots.curves("pareto", [one.row for one in rows]).axes
    dotted = next(line for line in panel.lines if "Oracle" in line.get_label())
    np.testing.assert_allclose(dotted.get_xydata() * [1e6, 1], [[10, 50], [40, 80], [160, 100]])
    assert {"Quest", "H2O"} <= {line.get_label() for line in panel.lines}


def written(*methods):
    return f"tasks: [t]\nmethods: [{', '.join(methods)}]\nlengths: [8]\nbudgets: []\n"


def add(folder, method, task="t", knobs=None, **row):
    """Add a cell with one prediction; the row's identity."""
    identity = {"method": method, "knobs": knobs or {}, "question": "prefill", "task": task}
    row = {"name": task, "value": 1.0, "unit": "percent", "seconds": 1.0, "compile_seconds": 0.0, **row, **identity}
    folder.add(row, identity, [{"key": "k", "prediction": "a", "score": row["value"] / 100}])


def test_a_row_is_compared_with_full_asked_in_the_same_way():
    rows = [entry("full", [0.0, 0.0]), entry("full", [1.0, 1.0], question="turns")]
    rows += [entry("quest", [1.0, 1.0], question="turns"), entry("quest", [1.0, 1.0], question="extend")]
    found = {(one.row["method"], one.row["question"]): one.difference for one in comparison.beside_reference(rows)}
    assert found[("quest", "turns")] == found[("full", "turns")] == 0
    assert found[("quest", "extend")] == 100  # Full was not asked so: the first of its rows


def test_what_is_forced_away_stays_until_there_is_something_new(tmp_path):
    add(Folder(tmp_path, {"a": 1}, written("full"), {}), "full")
    (tmp_path / "mine.png").write_text("not ours")
    again = Folder(tmp_path, {"a": 2}, written("quest"), {}, force=True)
    assert again.rows == [] and [x["method"] for x in read_record(tmp_path)["metrics"]] == ["full"]
    assert "full" in (tmp_path / "config.yaml").read_text()
    add(again, "quest")
    assert [x["method"] for x in read_record(tmp_path)["metrics"]] == ["quest"]
    assert len(read_record(tmp_path)["notes"]["runs"]) == len(list((tmp_path / "predictions").iterdir())) == 1
    assert "full" not in (tmp_path / "config.yaml").read_text() and (tmp_path / "mine.png").exists()


def test_other_knobs_under_the_same_name_take_the_place(tmp_path):
    folder = Folder(tmp_path, {}, written("m"), {})
    for value in (10.0, 20.0):
        assert folder.find({"knobs": {"num_sink": value}}) is None
        add(folder, "m", knobs={"num_sink": value}, value=value)
    (kept,) = folder.rows
    assert kept["value"] == 20.0 and [line["score"] for line in read_predictions(tmp_path, kept)] == [0.2]
    assert len(list((tmp_path / "predictions").iterdir())) == 1


def test_two_processes_fill_one_folder(tmp_path):
    """What stands for them here are two folders that were opened before either had a cell."""
    first, second = (Folder(tmp_path, {}, written(name), {}) for name in ("full", "quest"))
    for task in "tu":
        for folder, method in ((first, "full"), (second, "quest")):
            add(folder, method, task)
    rows = read_record(tmp_path)["metrics"]
    assert [(row["method"], row["run"]) for row in rows] == [("full", 0), ("quest", 1)] * 2
    runs = read_record(tmp_path)["notes"]["runs"]
    assert [(run["cells"], run["seconds"]) for run in runs] == [(2, 2.0)] * 2
    together = comparison.beside_reference(comparison.load([tmp_path]))
    assert [one.row["method"] for one in together] == ["full", "full", "quest", "quest"]


def test_the_settings_of_a_method_stand_together_by_what_they_read(tmp_path):
    """In whatever order processes finished them."""
    folder = Folder(tmp_path, {}, written("full"), {})
    wide, narrow = "quest(budget=1/4)", "quest(budget=1/16)"
    for method, read in (("full", 9.0), (wide, 4.0), ("snapkv", 1.0), (narrow, 1.0), ("quest", 2.0)):
        add(folder, method, bytes_read_per_step=read)
    together = comparison.beside_reference(comparison.load([tmp_path]))
    assert [one.row["method"] for one in together] == ["full", "quest", narrow, wide, "snapkv"]


def test_folders_of_other_settings_are_not_compared(tmp_path):
    for name, cut in (("a", "middle"), ("b", "head")):
        Folder(tmp_path / name, {"model": "m", "truncation": cut}, "", {}).results.write()
    with pytest.raises(ValueError, match="same settings.*truncation.*middle.*head"):
        comparison.load([tmp_path / "a", tmp_path / "b"])


def test_questions_about_one_context_are_no_more_contexts():
    rng = np.random.default_rng(1)
    by_context = rng.random(30)
    repeated = np.repeat(by_context, 8)
    groups = [f"c{i}" for i in range(30) for _ in range(8)]
    widths = {}
    for name, found in (
        ("contexts", bootstrap_interval(by_context)),
        ("grouped", bootstrap_interval(repeated, groups)),
        ("as if apart", bootstrap_interval(repeated)),
    ):
        widths[name] = found[1] - found[0]
        assert found[0] < by_context.mean() < found[1]
    assert widths["grouped"] == pytest.approx(widths["contexts"], rel=0.1)
    assert widths["as if apart"] == pytest.approx(widths["contexts"] / np.sqrt(8), rel=0.1)
    _, other = comparison.beside_reference([entry("full", [0.0] * 240, groups), entry("quest", repeated.tolist(), groups)])
    assert other.interval_95[1] - other.interval_95[0] == pytest.approx(100 * widths["grouped"], rel=0.01)


def test_a_row_needs_its_baseline():
    with pytest.raises(ValueError, match="has no row of Full"):
        comparison.beside_reference([entry("quest", [1.0, 0.0])])
    with pytest.raises(ValueError, match="has no row of Full"):
        comparison.beside_reference([entry("full", [1.0, 0.0]), entry("quest", [1.0, 0.0], length=1024)])
    with pytest.raises(ValueError, match="different examples"):
        comparison.beside_reference([entry("full", [1.0, 0.0]), entry("quest", [1.0, 0.0, 1.0], samples=2)])


def test_only_whole_sets_of_tasks_are_averaged():
    rows = [entry("full", [1.0, 1.0], name=name, task=name) for name in "ab"]
    rows += [entry("half", [1.0, 1.0], name="a", task="a"), entry("all", [0.0, 1.0], name="a", task="a")]
    rows += [entry("all", [0.0, 0.0], name="b", task="b")]
    means = {one["method"]: one["score"] for one in comparison.averages(comparison.beside_reference(rows))}
    assert means == {"full": 100, "all": 25}


def test_any_method_can_be_the_reference():
    """Its differences are paired with its own examples; tables and csv name it, and say how many contexts there are."""
    base = np.random.default_rng(0).random(40).round(3).tolist()
    groups = [f"c{i // 2}" for i in range(40)]
    rows = [entry("full", base, groups), entry("snapkv(budget=8)", [x / 2 for x in base], groups), entry("h2o", base, groups)]
    assert comparison.reference_of(rows, "SnapKV") == "snapkv(budget=8)"
    compared = comparison.beside_reference(rows, "snapkv(budget=8)")
    found = {item.row["method"]: item for item in compared}
    half = bootstrap_interval([x - x / 2 for x in base], groups)
    assert found["h2o"].interval_95 == found["full"].interval_95 == pytest.approx([100 * end for end in half], abs=0.01)
    assert found["h2o"].contexts == 20 and found["snapkv(budget=8)"].is_reference and found["full"].beyond_noise
    told = tables.cell_table(compared)
    assert "| n | against SnapKV(budget=8) [95 %] |" in told and "| 20 |  |" in told, "its own row is beside nothing"
    assert "| n | against SnapKV(budget=8) |" in tables.summary_table(compared)
    flat = {item.row["method"]: comparison.flat(item) for item in compared}
    assert flat["full"]["against_snapkv"] > 0 and flat["full"]["contexts"] == 20
    for name in ("quest", "snapkv(budget=9)"):
        with pytest.raises(ValueError, match="reference must be one of .*; expected full, snapkv.budget=8., h2o"):
            comparison.reference_of(rows, name)
    with pytest.raises(ValueError, match="snapkv.budget=8., snapkv.budget=9."):
        comparison.reference_of([*rows, entry("snapkv(budget=9)", base)], "snapkv")
    with pytest.raises(ValueError, match="no row of H2O beside it"):
        comparison.beside_reference([*rows, entry("full", base, length=9)], "h2o")


def test_a_sweep_of_two_knobs_is_a_heat_map():
    """Of methods with all combinations of two knobs; a capacity follows the budget and is no knob of the sweep."""
    rows = [
        entry("full", [1.0], knobs={}),
        entry("own", [1.0], knobs={"budget": 99, "capacity": 99, "mass": 0.5, "kind": "a"}),
    ]
    for budget, mass, score in ((8, 0.5, 0.1), (8, 0.9, 0.2), (16, 0.5, 0.3), (16, 0.9, 0.4)):
        knobs = {"budget": budget, "capacity": budget, "mass": mass, "kind": "a"}
        rows.append(entry(f"own(budget={budget}, mass={mass})", [score], knobs=knobs))
    rows = [one.row for one in rows]
    assert "sweep" in plots.default_kinds(rows) and "sweep" not in plots.default_kinds(rows[:-1])
    panel = plots.KINDS["sweep"](rows).axes[0]
    np.testing.assert_allclose(panel.images[0].get_array(), [[10, 30], [20, 40]])
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("budget", "mass")
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["8", "16"]
    with pytest.raises(ValueError, match="two knobs vary"):
        plots.KINDS["sweep"](rows[:-1])


def test_a_method_looks_alike_in_every_panel_and_figure():
    """Rows of another length may come in another order, or of other methods."""
    rows = [entry("full", [1.0, 1.0], length=length) for length in (256, 512)]
    rows += [entry(name, [1.0, 0.0], length=256) for name in ("quest", "h2o")]
    rows += [entry(name, [1.0, 0.0], length=512) for name in ("h2o", "keydiff", "quest")]
    figure = plots.curves("pareto", [one.row for one in rows])
    colours = [{line.get_label(): line.get_color() for line in panel.lines} for panel in figure.axes]
    for name in ("Quest", "H2O"):
        assert colours[0][name] == colours[1][name]
    assert len({colours[1][name] for name in ("Quest", "H2O", "KeyDiff")}) == 3
    named = [{text.get_text() for text in panel.texts} for panel in figure.axes]
    assert named == [{"Full", "Quest", "H2O"}, {"Full", "Quest", "H2O", "KeyDiff"}]
    assert all(panel.get_ylim()[0] < 40 and panel.get_ylim()[1] > 100 for panel in figure.axes), "marks are inside"
    (alone,) = plots.curves("resident", [one.row for one in rows if one.row["method"] in ("full", "keydiff")][1:]).axes
    assert {line.get_color() for line in alone.lines} >= {colours[1]["KeyDiff"]}, "also without the others"
    few, many = method_styles(["h2o(budget=8)", "h2o(budget=9)"])
    assert few["color"] == many["color"] == colours[0]["H2O"] and few["linestyle"] != many["linestyle"]
    looks = [tuple(style.items()) for style in method_styles(sorted(registry.builtin()))]
    assert len(set(looks)) == len(looks)


@pytest.mark.parametrize("name", ["qwen-16k", pytest.param("qwen-32k", marks=pytest.mark.thorough)])
def test_few_curves_have_names_and_all_names_are_inside_of_their_panels(name):
    """The other curves are grey, the legend names them and says what the frontier is."""
    rows = read_record(RECORDS / "results" / name)["metrics"]
    figure = plots.curves("pareto", rows)
    figure.draw_without_rendering()
    methods = {row["method"].partition("(")[0] for row in rows}
    for panel in figure.axes:
        named = {text.get_text() for text in panel.texts}
        assert "Full" in named and len(named) <= 8 and not any(title.islower() for title in named)
        outer = panel.get_window_extent()
        boxes = [text.get_window_extent() for text in panel.texts]
        assert all(outer.x0 <= box.x0 and box.x1 <= outer.x1 for box in boxes)
        assert all(outer.y0 <= box.y0 and box.y1 <= outer.y1 for box in boxes)
        clashes = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
        assert not clashes, "no name covers another one"
        assert "score" in panel.get_ylabel() and "MB" in panel.get_xlabel()
        grey = {line.get_label() for line in panel.lines if line.get_color() == "#c4c4c4"}
        assert bool(grey) == (len(methods) > 8) and not grey & named
    (legend,) = figure.legends
    told = " ".join(text.get_text() for text in legend.get_texts())
    assert "frontier: no setting reads fewer bytes and scores as high" in told
    assert all(title in told.replace("\n", " ") for panel in figure.axes for title in grey)


def test_plots_tell_questions_apart_and_leave_out_means_over_other_tasks():
    rows = [entry("full", [1.0, 1.0], name=name) for name in "ab"]
    rows += [entry("quest", [score, score], name=name, question=question)
             for question, score in (("prefill", 0.0), ("extend", 1.0)) for name in "ab"]  # fmt: skip
    rows = [one.row for one in [*rows, entry("h2o", [1.0, 1.0], name="a")]]
    lines = {line.get_label(): line.get_ydata() for line in plots.curves("pareto", rows).axes[0].lines}
    assert lines["Quest (prefill)"] == [0.0] and lines["Quest (extend)"] == [100.0]
    assert not any("H2O" in label for label in lines)


def test_memory_is_drawn_over_lengths_a_line_for_each_setting():
    rows = [entry(label, [1.0], name=name).row | {"length": length, "length_tokens": length, "resident_bytes_per_row": held}
            for label, kept in (("full", None), ("h2o(budget=8)", 5e6), ("h2o(budget=16)", 9e6)) for name in "ab"
            for length, held in ((64, kept or 7e6), (128, kept or 14e6))]  # fmt: skip
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in plots.KINDS["memory"](rows).axes[0].lines]
    assert lines == [([64, 128], held) for held in ([7, 14], [5, 5], [9, 9])]
    with pytest.raises(ValueError, match="a plot of memory needs rows of several lengths"):
        plots.KINDS["memory"](rows[::2])


# ---- grids, the command line ---------------------------------------------------------------------------------------


def test_methods_without_caches_in_8_bits_are_refused_before_full_runs(directory, tmp_path):
    with pytest.raises(ValueError, match="MosaicKV has a storage of its own and cannot run with kv_dtype='int8'"):
        make(directory, tmp_path, methods=["mosaickv"], tasks=("passkey",), kv_dtype="int8")


@pytest.mark.parametrize(
    "method, varied",
    [
        ("snapkv", ["budget=64,1/4,128"]),
        ("mosaickv", ["fraction=0.05,0.1"]),
        ("chess(trigger=never)", ["ratios=aggressive;0.5,0.3,0.2"]),
        ("chess", ["tau_entropy=0.5,1.0", "tau_varentropy=0.1,0.2"]),
        ("tokenselect", ["theta=0.5,0.9"]),
        ("pariskv(rho=0.3)", ["budget=64,96"]),
    ],
)
def test_a_grid_is_one_program(method, varied):
    """Of as many settings as it has combinations, whose labels are texts that make them again."""
    settings = EvaluationSettings.from_mapping({"methods": method, "lengths": 2048}, "a test")
    choices, tokenizer = the_grid(settings, varied), models.load_tokenizer(BUILTIN)
    made = [choice.at(2048, tokenizer, CONFIG, {}).method for choice in choices]
    assert len(made) == np.prod([len(re.split(";" if ";" in text else ",", text)) for text in varied])
    assert len(group_by_structure(made)) == 1
    assert len({str(jax.tree.leaves(method)) for method in made}) == len(made)
    assert len({choice.label for choice in choices}) == len(made) and choices[0] == Choice.parse(
        {choices[0].name: choices[0].knobs}
    )


def test_lengths_beyond_the_model_are_asked_for_by_name(directory, tmp_path):
    with pytest.raises(ValueError, match="at most 2048 tokens, .* got 2100; max_length=2100 uses positions"):
        make(directory, tmp_path / "a", lengths=(2100,))
    one = make(directory, tmp_path / "b", lengths=(2100,), max_length=2100, tasks=("passkey",), methods=["full"])
    one.run()
    (row,) = one.folder.rows
    assert row["mean_prompt_tokens"] > 2048 and row["truncated"] == 0 and one.model.config.max_position_embeddings == 2100


def test_a_raised_limit_does_not_hide_how_long_the_model_was_trained(directory, tmp_path):
    one = make(directory, tmp_path, lengths=(2100,), max_length=2100, tasks=("passkey",), methods=["ntk", "pi"])
    settings = [one.setting(choice, one.cells[0]) for choice in one.settings.choices]
    assert {made.name: vars(made.method).get("factor") for made in settings} == {
        "full": None, "ntk": 2100 / 2048, "pi": 2100 / 2048,
    }  # fmt: skip


def test_samples_of_a_file_are_contexts_with_all_their_questions():
    asked = [("a", 1), ("b", 1), ("a", 2), ("c", 1), ("", 1), ("", 2)]
    rows = [Example("t", f"context {group or number}", f"{group}{number}", "", ("x",), 8, "qa", group=group)
            for group, number in asked]  # fmt: skip
    kept = cells._contexts(rows, 4)
    assert [row.question for row in kept] == ["a1", "a2", "b1", "c1", "1"]


@pytest.mark.slow
def test_a_users_file_is_scored(directory, tmp_path):
    lines = [
        {"context": "The sky is blue. " * n, "question": "\nWhat is blue?", "answer_prefix": " The", "answer": "sky",
         "task": "niah_single_1", "max_new_tokens": 4}
        for n in (3, 40, 90)
    ]  # fmt: skip
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    one = make(directory, tmp_path / "out", tasks=(f"kvpress:{file}",), methods=["streamingllm"], budgets=("1/2",), samples=2)
    one.run()
    file.write_text(file.read_text().replace("blue", "green"))
    with pytest.raises(ValueError, match="mine.jsonl has changed since Full answered"):
        make(directory, tmp_path / "out", tasks=(f"kvpress:{file}",), methods=["h2o"], budgets=("1/2",), samples=2).run()
    full, half = one.folder.rows
    assert full["length"] is None and full["examples"] == 2 and full["source"] == f"kvpress:{file}"
    sizes = [line["prompt_tokens"] for line in read_predictions(one.folder.path, half)]
    assert half["budget"] == round(int(np.mean(sizes)) / 2) and half["attended_tokens"] < full["attended_tokens"]


@pytest.mark.slow
def test_eval_and_its_reports_take_a_method_from_outside(directory, tmp_path, capsys):
    """Of a method that is not part of kvjax."""
    out = tmp_path / "run"
    flags = ["--model", str(directory), "--lengths", "512", "--samples", "2", "--workers", "0", "--max-new-tokens", "4"]
    flags += ["--tasks", "niah_single_2", "--depths", "0,1", "--quiet", "--out", str(out)]
    assert main(["eval", "--json", *flags, "--methods", OUTSIDE, "--set", "newest.budget=1/8"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in line["rows"]] == ["full"] * 2 + ["newest(budget=1/8)"] * 2
    assert line["rows"][2]["knobs"].items() >= {"class": OUTSIDE, "budget": 64, "capacity": 64}.items()
    assert read_yaml(out / "config.yaml")["methods"] == [{OUTSIDE: {"budget": "1/8"}}]
    for name in ("config.yaml", "metrics.json", "table.md", "resident.png", "needle.pdf", "pareto.png"):
        assert (out / name).stat().st_size > 100
    assert main(["eval", *flags, "--methods", OUTSIDE, "--set", "newest.budget=1/8"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("| method | budget | question |") and "| Newest(budget=1/8) | 64 |" in shown.out
    assert shown.err == ""  # nothing is run again, and --quiet is quiet
    assert main(["compare", str(out)]) == 0
    assert "| Newest(budget=1/8) |" in capsys.readouterr().out
    assert main(["compare", str(out), "--out", str(tmp_path / "all.csv")]) == 0
    assert [line["budget"] for line in csv.DictReader(io.StringIO((tmp_path / "all.csv").read_text()))][2:] == ["64", "64"]
    assert main(["plot", str(out), "--kind", "needle", "--format", "png", "--out", str(tmp_path / "p")]) == 0
    assert (tmp_path / "p" / "needle.png").read_bytes().startswith(b"\x89PNG")
    turns = ["--model", str(directory), "--lengths", "640", "--samples", "1", "--workers", "0", "--tasks", "kv_retrieval"]
    turns += ["--questions", "3", "--question", "turns", "--max-new-tokens", "4", "--methods", "full"]
    assert main(["eval", "--json", *turns, "--out", str(tmp_path / "turns")]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["examples"] == 3 and row["question"] == "turns" and row["length_tokens"] > row["mean_prompt_tokens"]
    assert list(row["by"]["turn"]) == ["0", "1", "2"] and (tmp_path / "turns" / "turns.png").is_file()
    for wrong, told in (
        (["plot", str(out), "--kind", "needles"], "did you mean 'needle'"),
        (["plot", str(RECORDS / "kernels.json")], "a record of 'kernels' has no figures here"),
        (["compare", str(tmp_path)], "neither a folder with a metrics.json nor a JSON record"),
        (["compare", str(out), str(RECORDS / "speed.json")], "speed.json is a file, expected a result folder of eval"),
        (["compare", *[str(RECORDS / "speed.json")] * 3], "records are compared two at a time and as text, got 3"),
    ):
        assert main(wrong) == 2
        assert told in capsys.readouterr().err


def test_a_method_that_reads_its_context_again_has_positions_for_it():
    config, shape = dataclasses.replace(CONFIG, max_position_embeddings=4096), Shape(4096, 1, 128)
    assert answers.with_room(config, shape, [kvjax.methods.SnapKV()]).max_position_embeddings == 4096 + 128
    again = kvjax.methods.KVzip()
    room = again.reread_tokens(4096)
    assert room > 128
    assert answers.with_room(config, shape, [kvjax.methods.Full(), again]).max_position_embeddings == 4096 + room
