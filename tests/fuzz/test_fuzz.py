"""The fuzz command: its judgement on made-up cases, bad inputs that compile nothing, and random draws under --thorough."""

from __future__ import annotations

import functools
import subprocess
import sys

import numpy as np
import pytest

from experiments.cli import fuzz
from experiments.cli.main import main as kvjax_main
from kvjax.methods import Quest
from tests.fuzz import laws, suites
from tests.fuzz.__main__ import main
from tests.fuzz.arguments import World, fields_of_methods
from tests.fuzz.files import Files
from tests.fuzz.names import check as texts_of_methods
from tests.fuzz.paths import Paths
from tests.fuzz.report import GOOD, RAW, SILENT, WRONG, Outcome, Tally, report
from tests.fuzz.structures import names, random_method, redraw
from tests.fuzz.tables import Tables
from tests.fuzz.texts import Texts
from tests.fuzz.tokenizers import Tokenizers
from tests.fuzz.values import shown
from tests.fuzz.verdicts import judge, verify


def refuse():
    raise ValueError("got 3, expected 4")


@pytest.mark.parametrize(
    ("call", "verdict"),
    [
        (lambda: Quest(budget=-1), GOOD),  # a sentence of the library
        (lambda: None, SILENT),
        (lambda: False, GOOD),  # it did no harm
        (lambda: 1 + None, RAW),
        (lambda: np.zeros(3).reshape(2), RAW),
        (refuse, RAW),  # the sentence is not of the project: tests are not
    ],
)
def test_verdicts_tell_refusals_from_crashes(call, verdict):
    assert judge("a case", call, (ValueError, TypeError), ()).verdict == verdict


def test_each_failure_is_shown_with_the_command_that_repeats_it():
    tally = Tally("inputs", seconds=1.5)
    for number, verdict in enumerate((GOOD, GOOD, RAW, SILENT)):
        tally.add(number, Outcome(verdict, "Quest(budget=...) given nan"))
    head, row, *failures = report([tally], seed=7).splitlines()
    assert head.split() == ["cases", WRONG, SILENT, RAW, "seconds"]
    assert row.split() == ["inputs", "4", "0", "1", "1", "1.5"]
    assert failures[1] == "silent: Quest(budget=...) given nan  [kvjax fuzz --only inputs --seed 7 --case 3]"
    assert not tally.passes()
    assert not Tally("laws", counts=tally.counts.__class__({GOOD: 98, RAW: 2})).passes()


def test_no_field_of_a_method_takes_a_bad_value():
    rng, bad = np.random.default_rng(5), []
    for argument in fields_of_methods():
        for _ in range(3):
            value = argument.bad_value(rng)
            outcome = judge(
                f"{argument.where} given {shown(value)}", functools.partial(argument.call, value), (ValueError, TypeError), ()
            )
            bad += [outcome.text] * (outcome.verdict != GOOD)
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("name", names())
def test_random_methods_of_one_structure_differ_in_numbers_only(name):
    rng = np.random.default_rng(2)
    made = random_method(name, rng)
    other = redraw(made, rng)
    assert type(other) is type(made)
    same = {
        key: vars(made)[key] == vars(other)[key]
        for key, field in made.__dataclass_fields__.items()
        if field.metadata.get("static")
    }
    assert all(same.values()), same


@pytest.mark.parametrize(
    ("flags", "told"), [(["--seconds", "0"], "seconds"), (["--case", "3"], "--only"), (["--seed", "-1"], "seed")]
)
def test_wrong_settings_are_refused(flags, told, capsys):
    assert main(flags) == 2
    assert told.strip("-") in capsys.readouterr().err


EDGES = [(Tables, 150), (Texts, 100), (Tokenizers, 9), pytest.param(Paths, 40, marks=pytest.mark.thorough)]


@pytest.mark.parametrize(("kind", "cases"), EDGES)
def test_edges_of_files_give_right_values_or_refusals(kind, cases, tmp_path):
    check = kind(3, tmp_path).check
    bad = [outcome.text for number in range(cases) for outcome in check(number) if outcome.verdict != GOOD]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("call", "right", "named", "verdict"),
    [
        (lambda: 3, lambda value: None, None, GOOD),
        (lambda: 3, lambda value: f"expected 4, got {value}", None, WRONG),
        (lambda: 3, None, "budget", SILENT),  # it must be refused
        (lambda: Quest(budget=-1), None, "budget", GOOD),
        (lambda: Quest(budget=-1), None, "page_size", RAW),  # the message names something else
        (lambda: Quest(budget=-1), lambda value: None, None, WRONG),  # it must be taken
        (lambda: 1 + None, None, "", RAW),
    ],
)
def test_verdicts_tell_right_values_from_wrong_ones(call, right, named, verdict):
    assert verify("a case", call, right=right, named=named).verdict == verdict


def test_methods_are_what_their_texts_name():
    bad = [outcome.text for number in range(300) for outcome in texts_of_methods(3, number) if outcome.verdict != GOOD]
    assert not bad, "\n".join(bad)


def test_no_value_of_a_suites_file_makes_every_answer_right_or_wrong(tmp_path):
    made = (outcome for number in range(200) for outcome in suites.check(3, number, tmp_path))
    bad = [outcome.text for outcome in made if outcome.verdict != GOOD]
    assert not bad, "\n".join(bad)


@pytest.mark.thorough
def test_damaged_files_are_refused(tmp_path):
    files, rng, bad = Files(World(), tmp_path), np.random.default_rng(1), []
    for _ in range(300):
        damaged = files.damage(rng)
        outcome = judge(damaged.about, damaged.read, (ValueError, TypeError, OSError), (str(tmp_path),))
        bad += [outcome.text] * (outcome.verdict != GOOD)
    assert not bad, "\n".join(bad)


@pytest.mark.thorough
def test_the_laws_hold_for_random_draws():
    for number in range(3):
        assert [x.text for x in laws.check(1, number) if x.verdict != GOOD] == []


def test_an_installation_says_that_it_has_no_cases(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fuzz, "_CLONE", tmp_path)
    assert kvjax_main(["fuzz"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("kvjax: error: kvjax fuzz needs a clone of the repository: this installation has no ")


def test_a_clone_finds_its_cases_in_any_directory_and_beside_other_tests(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; sys.path += [{str(fuzz._CLONE)!r}]; "
        "from experiments.cli.main import main; main(['fuzz', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("usage: kvjax fuzz "), done.stderr[-2000:]
