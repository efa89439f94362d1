"""`experiments.speed.kernels`: every implementation is checked and timed; failures and wrong results are rows."""

import json
import re
import sys

import numpy as np
import pytest

from experiments.records import Results
from experiments.speed import Bandwidth, Seconds
from experiments.speed.kernels import __main__ as kernels
from experiments.speed.kernels import compare, peers
from experiments.speed.kernels.cases import cases
from experiments.speed.kernels.report import kernel_table
from pallas_kernels.attend.merge_splits import MERGE_SPLITS

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
    assert len({(case.operation.name, case.shape.name) for case in made}) == len(made)
    assert {case.operation.name for case in cases()} == {m["name"] for m in found["metrics"]}
    for row in found["metrics"]:
        assert row["passed"] and row["error"] is None and row["relative_error"] < 0.01, row
        assert row["implementation"] == "xla"  # the others need a GPU
        np.testing.assert_allclose([row["floor"], row["ratio"]], [row["bytes_read"] / 1e9, 1e3 / row["bytes_read"]])
    assert "| kth_select |" in (tmp_path / "kernels.md").read_text() and "1.0 us" in said


def test_a_kernel_is_timed(compare_kernels):
    _, found = compare_kernels("--only", "merge_splits")
    assert [m["name"] for m in found["metrics"]] == ["merge_splits"]
    assert found["metrics"][0]["least"] <= found["metrics"][0]["value"] <= found["metrics"][0]["most"]


MINE = """
import jax.numpy as jnp
from pallas_kernels.attend.merge_splits import reference

def merge(out, lse, dtype):
    return reference.merge_splits(out, lse, dtype=dtype)

def wrong(out, lse, **rest):
    return out[:, 0], lse[:, 0]

def lacks(out, lse):
    return merge(out, lse, jnp.float32)

def half(out, lse, dtype):
    merged = merge(out, lse, dtype)
    return merged[0], merged[1].astype(jnp.bfloat16)

def fails(out, lse, **rest):
    raise RuntimeError("no such instruction")

NUMBER = 3
"""


@pytest.fixture
def my_kernels(tmp_path, monkeypatch):
    """A module of the current directory, with a name of its own in each test."""
    (tmp_path / f"mine_{tmp_path.name}.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    yield f"mine_{tmp_path.name}"
    sys.modules.pop(f"mine_{tmp_path.name}", None)


def test_a_kernel_from_outside_is_checked_beside_interpreted_kernels(my_kernels, tmp_path):
    """Nothing is timed, and the operation's table is as it was."""
    before = MERGE_SPLITS.table
    words = [word for name in ("merge", "wrong", "lacks", "half", "fails") for word in ("--with", f"{my_kernels}:{name}")]
    with pytest.raises(SystemExit, match="4 rows failed or are wrong"):
        kernels.main(["--interpret", "--only", "merge_splits", *words, "--out", "one.json"])
    found = {row["implementation"]: row for row in json.loads((tmp_path / "one.json").read_text())["metrics"]}
    mine = [f"{my_kernels}:{name}" for name in ("fails", "half", "lacks", "wrong", "merge")]
    assert [*found] == [*mine, "pallas_triton", "xla"]
    assert [row["passed"] for row in found.values()] == [False, False, False, False, True, True, True]
    assert all(row["value"] is None for row in found.values())
    assert "no such instruction" in found[f"{my_kernels}:fails"]["error"]
    assert "bfloat16 [" in found[f"{my_kernels}:half"]["error"]
    assert re.match(r"\d+ of \d+ values, first at \[.*\]: got .*, expected ", found[f"{my_kernels}:wrong"]["wrong"])
    assert "unexpected keyword argument 'dtype'" in found[f"{my_kernels}:lacks"]["error"]
    text = (tmp_path / "one.md").read_text()
    assert f"| {my_kernels}:merge | not timed |" in text and "(too large)" in text
    assert MERGE_SPLITS.table == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--with", "{}:merge"], "--with belongs to one operation, --only NAME; got all operations"),
        (["--with", "{}:merge", "--only", "merge_splits,kth_select"], "got merge_splits, kth_select"),
        (["--with", "{}:merg", "--only", "merge_splits", "--interpret"], "has no function 'merg' (did you mean 'merge'?)"),
        (["--with", "nowhere:merge", "--only", "merge_splits", "--interpret"], "there is no module 'nowhere'"),
        (["--with", "{}", "--only", "merge_splits", "--interpret"], "is named package.module:Function"),
        (["--with", "{}:NUMBER", "--only", "merge_splits", "--interpret"], "expected a function of the arguments of merge"),
        (["--only", "nope", "--tiny"], "unknown operation 'nope'"),
        (["--only", "pagescore", "--tiny"], "(did you mean 'page_score'?)"),
        ([], "the shapes are of an 8B model with 128K tokens, for which a GPU or a TPU is expected, got a CPU"),
    ],
)
def test_kernels_that_cannot_be_compared_are_refused(words, told, my_kernels, capsys):
    assert kernels.main([*(word.format(my_kernels) for word in words), "--out", "one.json"]) == 2
    assert told in capsys.readouterr().err


def test_a_peer_is_timed_beside_kvjax(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "WORK", {"all": peers.Work(2, 64), "pages": peers.Work(1, 64, 2, 4)})
    monkeypatch.setattr(peers, "_ITERATIONS", 1)
    monkeypatch.setattr(peers, "PEERS", {"theirs": lambda work, repeats: ("their kernel", (1e-6, 2e-6, 3e-6), 0.5)})
    results = Results(tmp_path / "r.json", "kernels", {})
    assert peers.run_peer("theirs", results, FAST, "now", 1) == 2  # an error of a half is no attention
    rows = results.metrics
    assert [row["implementation"] for row in rows] == ["xla", "their kernel"] * 2
    assert all(row["relative_error"] < 1e-2 for row in rows[::2]) and rows[2]["bytes_read"] == 2 * 2 * 8 * 8 * 128
    np.testing.assert_allclose(rows[3]["ratio"], 2e-6 / (rows[3]["bytes_read"] / 1e9))
    table = kernel_table(rows, {})
    assert "| attention | pages | their kernel | 2.0 (1.0 - 3.0) |" in table


def test_a_peer_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ValueError, match="expected it beside kvjax, .* pip install .* flashinfer-python"):
        peers.check_peer("flashinfer")
    with pytest.raises(ValueError, match="its own shapes, expected no --only"):
        kernels.KernelSettings(peer="flashinfer", only=("merge_splits",))
