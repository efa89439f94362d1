"""The demo on a tiny random model: its rows are the evaluation's; table, record, figure; nothing is half-written."""

import contextlib
import dataclasses
import io
import json

import pytest

from experiments.cli.main import main
from experiments.demo.__main__ import DemoSettings
from experiments.demo.report import table
from experiments.evaluation.runner import Runner
from tests.tiny_models import SHIPPED, write_model

pytestmark = pytest.mark.usefixtures("quick_compile")
CONFIG = dataclasses.replace(SHIPPED, num_layers=1)
SMALL = "--length 512 --samples 2 --questions 2 --methods snapkv --budget 1/4".split()


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
    full, snapkv = result["metrics"]
    assert [(m["method"], m["question"]) for m in (full, snapkv)] == [("full", "extend"), ("snapkv", "prefill")]
    for metric in (full, snapkv):
        assert metric["samples"] == 4 and 0 <= metric["value"] <= 100 and not metric["no_effect"]
        assert metric["tokens_per_second"] > 0 and metric["compile_seconds"] > 0
    assert full["agreement_percent"] == 100 and full["attended_tokens"] == full["length_tokens"]
    assert snapkv["budget_tokens"] == 128
    assert all(snapkv[name] < full[name] for name in ("kv_bytes_per_row", "bytes_read_per_step_per_row"))
    assert [len(entry["answers"]) for entry in result["answers"]] == [4, 4]
    assert all(answer["answers"] for answer in result["answers"][0]["answers"])
    data = (out / "demo.png").read_bytes()
    assert data.startswith(b"\x89PNG") and data.endswith(b"IEND\xaeB`\x82") and len(data) > 10_000


def test_table_names_methods_and_marks_no_effect(finished):
    """The table is what the command ends in, for people and for pipes."""
    result = json.loads((finished[1] / "demo.json").read_text())
    text = table(result)
    assert finished[2] == text + "\n"
    assert "1/4 = 128" in text and "in prompt" in text and "no effect" not in text
    assert "4 answers from 2 contexts of 512 tokens" in text
    result["metrics"][1]["no_effect"] = True
    marked = [line for line in table(result).splitlines() if line.endswith("no effect at this length")]
    assert len(marked) == 1 and marked[0].startswith("SnapKV")


@pytest.mark.slow
def test_no_effect_is_measured_and_json_is_a_line(tmp_path, capsys):
    small = write_model(tmp_path / "small", CONFIG)
    flags = "--length 384 --samples 1 --questions 1 --methods streamingllm --budget 512 --tasks passkey --no-plot --quiet"
    assert main(["demo", "--model", str(small), *flags.split(), "--json", "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    full, last = json.loads(out)["rows"]
    assert last["no_effect"] and last["agreement_percent"] == 100 and not full["no_effect"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["demo.json"]


def test_larger_models_on_a_cpu_have_a_single_budget_and_none_needs_a_calibration():
    """CHESS' usual trigger would need thresholds."""
    plain = DemoSettings.from_mapping({"methods": "chess"}, "a test")
    assert plain.with_budgets(15_000_000, "cpu").budgets == plain.with_budgets(135_000_000, "gpu").budgets == ("1/8", "1/4")
    assert plain.with_budgets(135_000_000, "cpu").budgets == ("1/4",)
    assert dataclasses.replace(plain, budgets=("64",)).with_budgets(135_000_000, "cpu").budgets == ("64",)
    assert plain.choices[1].knobs == {"trigger": "fixed"}


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--methods quets", "'quest'"),
        ("--budget 1/8,3/2", "'3/2'"),
        ("--length 64 --methods full", "too short"),
        ("--length 4096 --methods full", "2048"),
        ("--haystack file:nowhere.txt", "nowhere.txt"),
        ("--haystack novel", "'novel'"),
        ("--model nowhere", "nowhere"),
        ("--out {file}", "--out"),
    ],
)
def test_bad_input_is_a_line_and_writes_nothing(arguments, words, directory, tmp_path, capsys):
    out, file = tmp_path / "out", tmp_path / "file"
    file.touch()
    argv = ["--model", str(directory), *SMALL, "--quiet", "--json", "--out", str(out)]
    assert main(["demo", *argv, *arguments.format(file=file).split()]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert not out.exists()


def test_missing_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["plot", str(tmp_path)]) == 2  # the demo goes on without its figure
    assert "kvjax[plot]" in capsys.readouterr().err


def test_interrupt_leaves_nothing(directory, tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "_run", interrupted)
    out = tmp_path / "out"
    assert main(["demo", "--model", str(directory), *SMALL, "--out", str(out)]) == 130
    assert not out.exists() and capsys.readouterr().err.endswith("kvjax: interrupted\n")
