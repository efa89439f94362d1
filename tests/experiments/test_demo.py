"""The demo on a tiny random model: table, record, figure, protocol, nothing half-written when it fails."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import threading

import pytest

import kvjax
import models
from experiments.answering import LoadedModel
from experiments.cli.main import main
from experiments.demo.play import make_contexts, run_demo
from experiments.demo.report import table, write
from experiments.demo.settings import DemoOutput, DemoSettings, runs, with_budgets
from experiments.records import write_bytes
from tests.experiments.test_cost import LARGE, compilations
from tests.tiny_models import BUILTIN, SHIPPED, vivid_params, write_model

pytestmark = pytest.mark.usefixtures("quick_compile")
CONFIG = dataclasses.replace(SHIPPED, num_layers=3)
SMALL = [
    "--length",
    "512",
    "--samples",
    "2",
    "--questions",
    "2",
    "--methods",
    "snapkv,quest",
    "--budget",
    "1/4",
]


@pytest.fixture(scope="module")
def finished(directory, tmp_path_factory):
    """A demo from the command line: exit code, the directory it wrote, its standard output."""
    out, shown = tmp_path_factory.mktemp("demo") / "new" / "run", io.StringIO()
    with contextlib.redirect_stdout(shown):
        code = main(["demo", "--model", str(directory), *SMALL, "--out", str(out)])
    return code, out, shown.getvalue()


@pytest.mark.slow
def test_record_is_complete(finished, directory):
    code, out, _ = finished
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == ["demo.json", "demo.png"]
    result = json.loads((out / "demo.json").read_text())
    assert result["settings"]["length"] == 512 and result["settings"]["model"] == directory.name
    assert result["compile_seconds"] < result["wall_seconds"]
    full, snapkv, quest = result["metrics"]
    assert [m["method"] for m in (full, snapkv, quest)] == ["full", "snapkv", "quest"]
    assert [m["question"] for m in (full, snapkv, quest)] == ["extend", "prefill", "extend"]
    for metric in (full, snapkv, quest):
        assert metric["samples"] == 4 and 0 <= metric["value"] <= 100 and not metric["no_effect"]
        assert metric["tokens_per_second"] > 0 and metric["compile_seconds"] > 0
    assert full["agreement_percent"] == 100 and full["attended_tokens"] == full["length_tokens"] < 512
    assert snapkv["budget_tokens"] == quest["budget_tokens"] == 128
    assert snapkv["kv_bytes_per_row"] < full["kv_bytes_per_row"] <= quest["kv_bytes_per_row"]
    assert (
        snapkv["bytes_read_per_step_per_row"]
        < quest["bytes_read_per_step_per_row"]
        < full["bytes_read_per_step_per_row"]
    )
    assert [len(entry["answers"]) for entry in result["answers"]] == [4, 4, 4]
    assert all(answer["expected"] for answer in result["answers"][0]["answers"])


def test_figure_is_a_png(finished):
    data = (finished[1] / "demo.png").read_bytes()
    assert data.startswith(b"\x89PNG") and data.endswith(b"IEND\xaeB`\x82") and len(data) > 10_000


def test_table_names_methods_and_marks_no_effect(finished):
    """The table is what the command ends in, for people and for pipes."""
    result = json.loads((finished[1] / "demo.json").read_text())
    text = table(result)
    assert finished[2] == text + "\n"
    assert "1/4 = 128" in text and "in prompt" in text and "no effect" not in text
    assert "4 answers from 2 contexts of 512 tokens" in text
    result["metrics"][2]["no_effect"] = True
    marked = [line for line in table(result).splitlines() if line.endswith("no effect at this length")]
    assert len(marked) == 1 and marked[0].startswith("Quest")


@pytest.mark.slow
def test_no_effect_is_measured_and_json_is_a_line(tmp_path, capsys):
    small = write_model(tmp_path / "small", dataclasses.replace(CONFIG, num_layers=1))
    code = main(["demo", "--model", str(small), "--length", "384", "--samples", "1",
                     "--questions", "1", "--methods", "streamingllm", "--budget", "512", "--tasks", "passkey",
                     "--question", "prefill",
                     "--no-plot", "--quiet", "--json", "--out", str(tmp_path / "out")])  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 0 and err == "" and out.count("\n") == 1
    full, last = json.loads(out)["rows"]
    assert last["no_effect"] and last["agreement_percent"] == 100 and not full["no_effect"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["demo.json"]


@pytest.mark.thorough
def test_methods_that_do_not_use_the_question_answer_alike_wherever_it_stands():
    """Full and StreamingLLM answer alike whether the question is prefilled or follows a forked cache."""
    config = dataclasses.replace(CONFIG, num_layers=1)
    tokenizer = models.load_tokenizer(BUILTIN, config)
    model = LoadedModel("tiny", vivid_params(config), config, tokenizer, BUILTIN / "tokenizer.json")
    told = []
    for question in ("prefill", "extend"):
        settings = DemoSettings(
            length=384, samples=1, questions=2, methods=("streamingllm",), budgets=("1/4",), question=question
        )
        result = run_demo(model, settings, progress=False)
        assert all(m["question"] == question for m in result["metrics"])
        told.append([answer["text"] for entry in result["answers"] for answer in entry["answers"]])
    assert told[0] == told[1]
    assert len(set(told[0])) > 1  # the model does tell questions and methods apart


def test_a_chat_template_stands_around_context_and_question(tmp_path):
    """The context is read behind the template's beginning, each question before its end, at the same length in tokens."""
    tokenizer = models.load_tokenizer(BUILTIN)
    settings = DemoSettings(length=384, samples=1, questions=2, tasks=("niah_single_1",))
    (plain,), (chat,) = make_contexts(settings, tokenizer), make_contexts(settings, tokenizer, ("user: ", " model: "))
    assert [tokenizer.decode(c.tokens).startswith("user: ") for c in (plain, chat)] == [False, True]
    question = chat.questions[0]
    assert tokenizer.decode(chat.asked[0]) == question.question + " model: " + question.answer_prefix
    longest = [len(c.tokens) + max(map(len, c.asked)) for c in (plain, chat)]
    assert abs(longest[0] - longest[1]) < 40 and max(longest) <= 384


def test_larger_models_on_a_cpu_have_a_single_budget():
    plain = DemoSettings(methods=("keydiff",))
    assert with_budgets(plain, 15_000_000, "cpu").budgets == with_budgets(plain, 135_000_000, "gpu").budgets == ("1/8", "1/4")
    assert with_budgets(plain, 135_000_000, "cpu").budgets == ("1/4",)
    assert with_budgets(DemoSettings(budgets=("64",)), 135_000_000, "cpu").budgets == ("64",)


def test_budgets_are_shares_or_tokens():
    def tokens(*budgets):
        settings = DemoSettings(length=1024, methods=("keydiff",), budgets=budgets)
        return [run.budget for run in runs(settings)]

    assert tokens("1/8", "0.25", "300") == [None, 128, 256, 300]


def test_tasks_of_one_question_share_shapes_with_others():
    tokenizer = models.load_tokenizer(BUILTIN)
    settings = DemoSettings(length=512, samples=1, questions=3, tasks=("passkey", "niah_single_1"))
    contexts = make_contexts(settings, tokenizer)
    assert [len(context.questions) for context in contexts] == [1, 3]
    again = make_contexts(settings, tokenizer)
    assert contexts == again


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--methods", "quets"], "unknown method 'quets' (did you mean 'quest'?)"),
        (["--tasks", "niah_single_9"], "unknown task 'niah_single_9', did you mean 'niah_single_"),
        (["--budget", "1/0"], "a budget is a share such as 1/8 or a number of tokens such as 256, got '1/0'"),
        (["--budget", "1/8,3/2"], "got '3/2'"),
        (["--budget", "2"], "budget must be a whole number of at least"),
        (["--samples", "0"], "--samples must be at least 1, got 0"),
        (["--length", "64", "--methods", "full"], "too short"),
        (["--length", "4096", "--methods", "full"], "--length must be at most 2048 tokens, the positions of "),
        (["--haystack", "file:nowhere.txt"], "haystack file not found: nowhere.txt"),
        (["--haystack", "novel"], "unknown haystack 'novel'"),
        (["--model", "nowhere"], "no model directory nowhere"),
    ],
)
def test_bad_input_writes_nothing(arguments, expected, directory, tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["demo", "--model", str(directory), *SMALL, "--quiet", "--json", "--out", str(out), *arguments]
    assert main(argv) == 2
    told = capsys.readouterr()
    assert expected in told.err and told.err.count("\n") == 1 and told.out == ""
    assert not out.exists()


def test_out_must_be_a_directory(directory, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    assert main(["demo", "--model", str(directory), "--out", str(file)]) == 2
    assert "--out must be a directory" in capsys.readouterr().err


def test_missing_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["plot", str(tmp_path)]) == 2  # the demo goes on without its figure
    assert "kvjax[plot]" in capsys.readouterr().err


def test_interrupt_leaves_nothing(directory, tmp_path, capsys, monkeypatch):
    calls = []

    def interrupted(*args, **kwargs):
        calls.append(args)
        raise KeyboardInterrupt

    monkeypatch.setattr(kvjax, "generate", interrupted)
    out = tmp_path / "out"
    assert main(["demo", "--model", str(directory), *SMALL, "--out", str(out)]) == 130
    assert calls and not out.exists()
    assert capsys.readouterr().err.endswith("kvjax: interrupted\n")


@pytest.mark.slow
def test_interrupt_while_writing_leaves_no_partial_file(finished, tmp_path, monkeypatch):
    result = json.loads((finished[1] / "demo.json").read_text())

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(result, DemoOutput(out=tmp_path).files)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(tmp_path / "demo.png", b"x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "question", [pytest.param("extend", marks=pytest.mark.slow), pytest.param("prefill", marks=pytest.mark.thorough)]
)
def test_programs_of_a_method_are_compiled_side_by_side(question):
    """All of them, and none by the thread that asks."""
    config = dataclasses.replace(CONFIG, num_layers=1)
    tokenizer = models.load_tokenizer(BUILTIN, config)
    model = LoadedModel("tiny", vivid_params(config), config, tokenizer, BUILTIN / "tokenizer.json")
    settings = DemoSettings(
        length=384, samples=1, questions=2, methods=("snapkv",), budgets=("1/4",), question=question
    )
    with compilations() as found:
        result = run_demo(model, settings, progress=False)
    large = LARGE if question == "extend" else LARGE[::2]
    assert sum(found.values()) == 2 * len(large) and {name for name, _ in found} == set(large)
    assert threading.get_ident() not in {thread for _, thread in found}
    assert result["compile_seconds"] > 0
