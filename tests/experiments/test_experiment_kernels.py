"""`experiments.speed.kernels`: every implementation is checked and timed; failures and wrong results are rows."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.speed import Bandwidth, Seconds
from experiments.speed.kernels import __main__ as kernels
from experiments.speed.kernels import compare
from experiments.speed.kernels.cases import cases

pytestmark = pytest.mark.usefixtures("quick_compile")
FAST = Bandwidth(bytes_per_second=1e9, size=1, variants={})


@pytest.fixture
def compare_kernels(monkeypatch, capsys, tmp_path):
    """`python -m experiments.speed.kernels` in tiny sizes: what it prints, and its record."""
    monkeypatch.setattr(kernels, "measure_bandwidth", lambda size: FAST)

    def run(*arguments):
        out = tmp_path / "kernels.json"
        fixed = ["--tiny", "--repeats", 1, "--out", out]
        code = kernels.main(list(map(str, [*fixed, *arguments])))
        if code:
            raise SystemExit(code)
        return capsys.readouterr().out, json.loads(out.read_text())

    return run


@pytest.fixture
def quick_loops(monkeypatch):
    """No time is measured: compiling the loops is most of the work."""
    seconds = Seconds(median=1e-6, least=1e-6, most=2e-6, compile=0.0)
    monkeypatch.setattr(compare, "loop_seconds", lambda run, *args, **loop: seconds)


@pytest.mark.thorough
def test_every_kernel_is_checked(compare_kernels, quick_loops, tmp_path):
    said, found = compare_kernels()
    made = cases(tiny=True)
    assert len({(case.operation.name, case.shape) for case in made}) == len(made)
    assert {case.operation.name for case in cases()} == {m["name"] for m in found["metrics"]}
    for row in found["metrics"]:
        assert row["passed"] and row["error"] is None and row["relative_error"] < 0.01, row
        assert row["implementation"] in ("xla", "lax.top_k")  # the others need a GPU
        np.testing.assert_allclose([row["floor"], row["ratio"]], [row["bytes_read"] / 1e9, 1e3 / row["bytes_read"]])
    assert "| kth_select |" in (tmp_path / "kernels.md").read_text() and "1.0 us" in said


def test_kernels_that_fail_or_are_wrong_are_rows(compare_kernels, monkeypatch, quick_loops, tmp_path, capsys):
    def broken(*given):
        raise RuntimeError("no such kernel")

    true = kernels.cases

    def spoilt(tiny):
        others = {
            "broken": broken,
            "wrong": lambda score, rest: (jnp.zeros((1, 2, 16), jnp.int32), jnp.zeros((1, 2), jnp.int32)),
        }
        return [dataclasses.replace(case, others=others) for case in true(tiny) if case.operation.name == "kth_select"][
            :1
        ]

    monkeypatch.setattr(kernels, "cases", spoilt)
    with pytest.raises(SystemExit, match="2 rows failed or are wrong"):
        compare_kernels()
    found = json.loads((tmp_path / "kernels.json").read_text())["metrics"]
    assert [(m["implementation"], m["passed"], m["value"]) for m in found] == [
        ("xla", True, 1e-6), ("broken", False, None), ("wrong", False, 1e-6)
    ]  # fmt: skip
    assert "RuntimeError: no such kernel" in (tmp_path / "kernels.md").read_text()
    monkeypatch.setattr(kernels, "cases", true)
    measured = []
    monkeypatch.setattr(compare, "measure", lambda *given: measured.append(given[0].shape) or {})
    with pytest.raises(SystemExit, match="2"):
        compare_kernels("--only", "nope")
    assert not measured and "unknown operation 'nope'" in capsys.readouterr().err


def test_a_kernel_is_timed(compare_kernels):
    _, found = compare_kernels("--only", "merge_splits")
    assert [m["name"] for m in found["metrics"]] == ["merge_splits"]
    assert found["metrics"][0]["least"] <= found["metrics"][0]["value"] <= found["metrics"][0]["most"]
