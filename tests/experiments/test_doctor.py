"""`kvjax doctor`: all operations are right on this machine; a wrong and a failing kernel are named, and the others go on."""

import contextlib
import functools
import re
from unittest import mock

import jax
import pytest

import pallas_kernels
from experiments.cli.main import main
from experiments.doctor import __main__ as doctor
from experiments.doctor import small_runs
from experiments.speed.kernels.cases import small_cases
from pallas_kernels.dispatch import Implementation, Operation, added_implementation
from pallas_kernels.machine import assume_machine
from pallas_kernels.score.page_score.reference import page_score
from tests.pallas_kernels.operations import Chosen, timed

FEW = ("merge_splits", "page_score", "store_ids")


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(small_runs, "small_cases", lambda: [case for case in small_cases() if case.operation.name in FEW])


def test_every_operation_has_a_case():
    assert [case.operation.name for case in small_cases()] == [name for _, name in pallas_kernels.operations()]


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
    assert re.search(r"(?s)xla \(not pallas_triton: needs a platform in \('gpu',\).*\): .*page_score", told)
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
    monkeypatch.setattr(doctor, "FAULTS", (doctor.Fault(refusing_backend, "", serious=False),))
    assert main(["doctor"]) == 1 and "FAILS: a small program of JAX: RuntimeError: no backend" in capsys.readouterr().out
    monkeypatch.setattr(jax, "local_devices", refusing_backend)
    assert main(["doctor"]) == 1 and "JAX finds none: no backend" in capsys.readouterr().out


def refusing_backend(*args, **kwargs):
    raise RuntimeError("no backend")


@pytest.mark.slow
def test_all_operations_are_right_here(capsys):
    assert main(["doctor"]) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_the_small_runs_take_what_full_sizes_take(capability):
    """Or the doctor would leave out what users run. Nothing is run: for GPUs that are not there."""
    with assume_machine("gpu", capability):
        for case in small_cases():
            if (full := timed(case.operation.name)) is not None:
                for name in {taken(case.function, shape) for shape in full.listed()}:
                    assert taken(case.function, case.shape, name) == name


def taken(function, shape, implementation=None):
    def stop(self, *args, **kwargs):
        raise Chosen(self.resolve(*args, **kwargs))

    run = functools.partial(function, **shape.options, implementation=implementation)
    with mock.patch.object(Operation, "run", stop), pytest.raises(Chosen) as caught:
        jax.eval_shape(run, **jax.eval_shape(shape.draw, jax.random.key(0)))
    return caught.value.args[0]
