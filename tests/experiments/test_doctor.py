"""`kvjax doctor`: all operations are right on this machine; a wrong and a failing kernel are named, and the others go on."""

from __future__ import annotations

import contextlib
import re

import jax
import pytest

import pallas_kernels
from experiments.cli import doctor
from experiments.cli.main import main
from experiments.speed.kernels import small_runs
from experiments.speed.kernels.cases import small_cases
from pallas_kernels.dispatch import Implementation, added_implementation
from pallas_kernels.machine import assume_machine
from pallas_kernels.score.page_score.reference import page_score

FEW = ("merge_splits", "page_score", "store_ids")


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(small_runs, "small_cases", lambda: [case for case in small_cases() if case.operation.name in FEW])


def test_every_operation_has_a_case_and_takes_what_it_takes_in_full_size():
    """Without running anything: a check of a shape that no kernel takes would test plain JAX alone."""
    made = small_cases()
    assert [case.operation.name for case in made] == [name for _, name in pallas_kernels.operations()]


def test_what_is_wrong_or_fails_is_named(few, monkeypatch, capsys):
    def wrong(*args, **kwargs):
        return 1.5 * page_score(*args, **kwargs)

    def failing(*args, **kwargs):
        raise RuntimeError("no such instruction\nsecond line")

    def refusing(*args, **kwargs):
        raise NotImplementedError("needs a card")

    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert f"jax {jax.__version__}" in told and "python 3" in told and f"{len(FEW)} of {len(FEW)} right" in told
    assert re.search(r"xla \(not pallas_triton: needs a platform in \('gpu',\).*\): .*page_score", told)
    refused = Implementation(page_score, (), refusing)
    with contextlib.ExitStack() as stack:
        for operation, name, entry in (
            ("page_score", "mine", Implementation(wrong)),
            ("page_score", "other", refused),
            ("merge_splits", "broken", Implementation(failing)),
        ):
            stack.enter_context(added_implementation(operation, name, entry))
        assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert f"{len(FEW) - 2} of {len(FEW)} right" in told and "other: needs a card" in told
    assert re.search(r"WRONG: page_score \(mine\): \d+ of \d+ values, first at .*: got .*, expected ", told)
    assert "FAILS: merge_splits (broken): RuntimeError: no such instruction\n" in told and "second line" not in told
    monkeypatch.setattr(doctor, "FAULTS", (doctor.Fault(lambda: True, "known sentence", serious=True),))
    assert main(["doctor"]) == 1 and "known fault: known sentence" in capsys.readouterr().out
    monkeypatch.setattr(jax, "local_devices", refusing_backend)
    assert main(["doctor", "--no-run"]) == 1 and "JAX finds none: no backend" in capsys.readouterr().out


def refusing_backend(*args, **kwargs):
    raise RuntimeError("no backend")


@pytest.mark.slow
def test_all_operations_are_right_here(capsys):
    assert main(["doctor"]) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_the_small_run_is_of_the_implementation_that_the_full_size_takes(capability):
    """Traced only, for a GPU that is not there."""
    with assume_machine("gpu", capability):
        for case in small_cases():
            arguments = jax.eval_shape(case.make)
            taken = {}
            for name, entry in case.operation.implementations.items():
                with contextlib.suppress(NotImplementedError):
                    jax.eval_shape(lambda *given, case=case, name=name: case.defined(case.run(*given, implementation=name)), *arguments)
                    taken[name] = entry
            kernels = [name for name, entry in case.operation.implementations.items() if "gpu" in entry.platforms]
            print(case.operation.name, [*taken], kernels)
