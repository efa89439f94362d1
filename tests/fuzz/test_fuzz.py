"""The fuzz command: it finds planted faults. Some cases of the kinds that compile nothing; the others under --thorough."""

import subprocess
import sys

import numpy as np
import pytest

import kvjax
from experiments.cli import fuzz
from experiments.cli.main import main as kvjax_main
from kvjax.methods import Quest, SnapKV
from tests.fuzz import arguments, files
from tests.fuzz.__main__ import KINDS, main, run
from tests.fuzz.structures import names as structures
from tests.fuzz.structures import random_method, redraw
from tests.fuzz.verdicts import Broken, judge


def refuse():
    raise ValueError("got 3, expected 4")


@pytest.mark.parametrize(
    ("call", "right", "named", "verdict"),
    [
        (lambda: 3, lambda value: None, (), None),
        (lambda: 3, lambda value: f"expected 4, got {value}", (), "wrong"),
        (lambda: 3, None, ("budget",), "silent"),  # it must be refused
        (lambda: Quest(budget=-1), None, ("budget",), None),  # by a sentence of the library
        (lambda: Quest(budget=-1), None, ("page_size",), "raw"),  # the message names something else
        (lambda: Quest(budget=-1), lambda value: None, (), "wrong"),  # it must be taken
        (lambda: 1 + None, None, ("",), "raw"),
        (lambda: np.zeros(3).reshape(2), None, ("",), "raw"),
        (refuse, None, ("",), "raw"),  # the sentence is not of the project: tests are not
    ],
)
def test_verdicts_tell_refusals_from_crashes_and_right_values_from_wrong_ones(call, right, named, verdict):
    if verdict is None:
        judge("a case", call, right=right, named=named)
    else:
        with pytest.raises(Broken, match=f"^{verdict}: a case"):
            judge("a case", call, right=right, named=named)


PLANTED = {  # a fault by the kind of cases that shall find it: an owner, a name there, and a replacement made of the original
    "arguments": (kvjax, "make", lambda original: lambda *args, **knobs: SnapKV(budget=64), "silent"),
    "files": (files, "from_pretrained", lambda original: lambda folder: 1 / 0, "raw"),
}


@pytest.mark.parametrize("kind", [pytest.param(x, marks=pytest.mark.slow) if x == "arguments" else x for x in PLANTED])
def test_a_planted_fault_is_found_and_the_next_run_begins_with_it(kind, tmp_path, monkeypatch):
    owner, name, replacement, verdict = PLANTED[kind]
    monkeypatch.chdir(tmp_path)  # where failing cases are remembered
    monkeypatch.setattr(owner, name, replacement(getattr(owner, name)))
    tally = run(kind, tmp_path, seed=1, cases=500, remember=True)
    assert [text for text in tally.failures if text.startswith(f"{verdict}: ")], tally
    assert run(kind, tmp_path, cases=1, remember=True).failures


FEW = {"arguments": 100, "files": 100}  # CI runs a minute of `kvjax fuzz`


@pytest.mark.parametrize(("kind", "cases"), [*FEW.items(), pytest.param("laws", 2, marks=pytest.mark.thorough)])
def test_no_law_is_broken(kind, cases, tmp_path):
    tally = run(kind, tmp_path, seed=3, cases=cases)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.laws


def test_no_argument_takes_a_value_that_is_known_to_be_bad():
    broken = []
    for argument in arguments.arguments():
        for value in argument.known:
            try:
                argument.refuse(value)
            except Broken as error:
                broken.append(str(error))
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("name", structures())
def test_random_methods_of_one_structure_differ_in_numbers_only(name):
    rng = np.random.default_rng(2)
    method = random_method(name, rng)
    other = redraw(method, rng)
    assert type(other) is type(method)
    static = [key for key, field in method.__dataclass_fields__.items() if field.metadata.get("static")]
    assert all(vars(method)[key] == vars(other)[key] for key in static)


@pytest.mark.parametrize(("flags", "named"), [(["--seconds", "0"], "seconds"), (["--seed", "-1"], "seed")])
def test_wrong_settings_are_refused(flags, named, capsys):
    assert main(flags) == 2
    assert named in capsys.readouterr().err


def test_the_command_reports_each_kind_and_fails_where_a_law_is_broken(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--only", "files", "--cases", "20"]) == 0
    assert "seed 0" in capsys.readouterr().out
    monkeypatch.setattr(files, "from_pretrained", lambda folder: 1 / 0)
    assert main(["--only", "files", "--cases", "100"]) == 1
    assert "kvjax fuzz --only files --seed 0" in capsys.readouterr().out
    assert {*KINDS} == {*FEW, "laws"}


def test_an_installation_says_that_it_has_no_cases(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fuzz, "_CLONE", tmp_path)
    assert kvjax_main(["fuzz"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("kvjax: error: kvjax fuzz needs a clone of the repository: this installation has no ")


@pytest.mark.slow
def test_a_clone_finds_its_cases_in_any_directory_and_beside_other_tests(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; sys.path += [{str(fuzz._CLONE)!r}]; "
        "from experiments.cli.main import main; main(['fuzz', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("usage: kvjax fuzz "), done.stderr[-2000:]
