"""`experiments.collectives`: rows, tables, and what happens when a process is lost. No test waits for a sum, but the last."""

from __future__ import annotations

import json

import pytest

from experiments.cli.plot import write_figures
from experiments.collectives import __main__ as collectives
from experiments.collectives import job as job_module
from experiments.collectives import worker as worker_module
from experiments.collectives.measure import Cell
from experiments.collectives.worker import Died, Worker
from experiments.speed import SUM_VARIANTS, SumVariant

ROW = {"unit": "s", "least": 1e-6, "most": 3e-6, "with_products": 4e-6, "sums": 6, "compile_seconds": 0.1}
ROW |= {"relative_error": 0.0, "passed": True, "instructions": {"all-reduce": 6}, "error": None}


class FakeWorker:
    """A process that knows what each variant does to it."""

    started: list
    asked: list

    def __init__(self, mesh, environment, patience):
        self.device, self.mesh = {"platform": "gpu", "kind": "a GPU", "count": 2}, mesh or "data=1,model=2"
        self.started.append(dict(environment))
        if environment.get("NCCL_ALGO"):
            raise Died("the process ended with code 1: no such algorithm")

    def measure(self, cell):
        self.asked.append((cell.variant, cell.size, cell.form))
        if cell.variant == "peer":
            raise Died("no answer in 7 seconds")
        if cell.variant == "symmetric":
            return {"value": None, "unit": "s", "passed": False, "error": "JaxRuntimeError: no such option\nat all"}
        return {"value": 2e-6, **ROW} | ({"passed": False} if cell.variant == "gather" else {})

    def end(self):
        pass


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """`python -m experiments.collectives` with such processes: its exit code, what it printed, and its record."""
    monkeypatch.setattr(job_module, "Worker", FakeWorker)
    FakeWorker.started, FakeWorker.asked = [], []

    def run(*arguments):
        out = tmp_path / "sums.json"
        code = collectives.main([*arguments, "--sizes", "1024,8192", "--out", str(out)])
        return code, capsys.readouterr().out, json.loads(out.read_text()) if out.exists() else None

    return run


def test_a_lost_process_is_a_row_and_the_run_goes_on(command, tmp_path):
    code, said, record = command("--variants", "xla,tree-loop,peer,symmetric,nccl-loop,ll-loop", "--forms", "loop")
    assert not code and record["device"]["kind"] == "a GPU" and record["settings"] == {"device": "a GPU", "count": 2}
    rows = {(row["variant"], row["bytes"]): row["error"] for row in record["metrics"]}
    assert rows == {
        **{(name, size): None for name in ("xla", "nccl-loop", "ll-loop") for size in (1024, 8192)},
        **{("symmetric", size): "JaxRuntimeError: no such option\nat all" for size in (1024, 8192)},
        ("peer", 1024): "no answer in 7 seconds",
        ("tree-loop", 1024): "the process ended with code 1: no such algorithm",
    }
    # The variants that need no variables come first and share a process, until one loses it.
    assert FakeWorker.started == [{}, {}, {"NCCL_ALGO": "Tree"}, {"NCCL_NVLS_ENABLE": "0"}, {"NCCL_PROTO": "LL"}]
    assert "peer                  is not tried again in this run" in said and "4 rows have no time" in said
    table = (tmp_path / "sums.md").read_text()
    assert "| variant | 1 KB | 8 KB |" in table and "| xla | 2.0 | 2.0 |" in table and "| peer | failed |  |" in table
    assert "| symmetric | loop | bfloat16 | 8 KB | JaxRuntimeError: no such option |" in table
    assert "2 x a GPU, JAX " in table and "`NCCL_PROTO=LL`" in table
    assert (tmp_path / "sums.png").exists()
    assert write_figures(tmp_path / "sums.json", ["collectives"], tmp_path / "more", ["png"])[0].exists()


def test_finished_rows_are_not_measured_again(command, monkeypatch):
    command("--variants", "xla,peer", "--forms", "loop")
    FakeWorker.asked.clear()
    _, said, record = command("--variants", "xla,peer", "--forms", "chain,loop")
    assert FakeWorker.asked == [("xla", 1024, "chain"), ("xla", 8192, "chain"), ("peer", 1024, "chain")]
    assert said.count("from the record") == 2 and len(record["metrics"]) == 6
    monkeypatch.setitem(SUM_VARIANTS, "xla", SumVariant("other", options={"xla_gpu_autotune_level": 0}))
    FakeWorker.asked.clear()
    command("--variants", "xla", "--forms", "loop")
    assert len(FakeWorker.asked) == 2, "a variant of the same name with other settings is another one"


def test_a_wrong_sum_fails_the_command(command, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2 rows are wrong"):
        command("--variants", "gather", "--forms", "loop")
    assert "WRONG" in capsys.readouterr().out
    assert "| gather | 2.0 (wrong) | 2.0 (wrong) |" in (tmp_path / "sums.md").read_text()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--variants", "nope"), "--variants: unknown 'nope', expected some of all, xla, "),
        (("--forms", "ring"), "--forms: unknown 'ring', expected some of chain, loop"),
        (("--dtypes", "int8"), "--dtypes: unknown 'int8', expected some of bfloat16, float32"),
        (("--mesh", "heads=2"), "the axes of a mesh are data, model and slots, got 'heads'"),
    ],
)
def test_wrong_settings_are_refused_before_a_process_starts(command, capsys, flags, told):
    assert collectives.main([*flags]) == 2
    assert told in capsys.readouterr().err and not FakeWorker.started
    assert collectives.main(["--sizes", "1023"]) == 2
    assert "--sizes must be multiples of 4 bytes, got 1023" in capsys.readouterr().err


def test_cells_have_as_many_sums_as_their_size_allows():
    sizes = {"variant": "xla", "dtype": "float32", "form": "loop", "chain": 66, "iterations": 16, "repeats": 1}
    small, large = Cell(size=8192, **sizes), Cell(size=64 << 20, **sizes)
    assert (small.sums, small.turns) == (66, 16) and (large.sums, large.turns) == (30, 1)
    assert Cell(size=8192, **sizes | {"form": "chain"}).turns == 1


@pytest.mark.thorough
def test_processes_with_two_devices(tmp_path, capsys, monkeypatch):
    """Sums on a CPU; an option that no XLA has, a flag that ends the process, and a process that is too slow."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setitem(SUM_VARIANTS, "ends", SumVariant("ends", environment={"XLA_FLAGS": "--xla_no_such_flag=1"}))
    out = tmp_path / "sums.json"
    names = "xla,nccl-loop,gather,scatter,permute-peer-loop,peer,ll-loop,ends"
    fixed = ["--sizes", "2048", "--chain", "6", "--iterations", "2", "--repeats", "1", "--no-plot", "--out", str(out)]
    assert not collectives.main(["--variants", names, *fixed])
    rows = json.loads(out.read_text())["metrics"]
    failed = {row["variant"]: row["error"] for row in rows if row["error"] is not None}
    assert failed.keys() == {"peer", "ends"} and "interpret" in failed["peer"], failed
    assert "xla_no_such_flag" in failed["ends"] and sum(row["variant"] == "ends" for row in rows) == 1
    assert all(row["passed"] and row["mesh"] == "data=1,model=2" for row in rows if row["error"] is None)
    found = {row["variant"]: row["instructions"] for row in rows if row["form"] == "loop" and row["error"] is None}
    assert found["scatter"] == {"reduce-scatter": 6, "all-gather": 6} and found["xla"] == {"all-reduce": 6}
    assert found["permute-peer-loop"] == {"collective-permute": 6} and found["gather"] == {"all-gather": 6}
    capsys.readouterr()
    assert collectives.main(["--mesh", "model=4", *fixed]) == 2
    assert "a mesh of data=1,model=4 needs 4 devices, got 2 (cpu)" in capsys.readouterr().err
    assert collectives.main(["--mesh", "data=2", *fixed]) == 2
    assert "the axis 'model' must have a power of two of devices, at least 2, got 1" in capsys.readouterr().err
    with Worker("model=2", {}, patience=1) as slow:
        heavy = Cell(variant="xla", size=64 << 20, dtype="float32", form="loop", chain=30, iterations=1, repeats=9)
        with pytest.raises(Died, match="no answer in 1 seconds"):
            slow.measure(heavy)
        with pytest.raises(Died, match="the process ended with code -9"):
            slow.measure(heavy)
    monkeypatch.setattr(worker_module, "_STARTING", 0)
    with pytest.raises(Died, match="no answer in 0 seconds"):
        Worker("model=2", {}, patience=1)
