"""Kernel by implementation by shape: `python -m experiments.kernels [--only kth_select,...]`.

Every implementation that runs on this platform is checked against a reference in the same run. It is timed inside a compiled
loop (`experiments.speed.loop_seconds`), beside the time that reading its bytes would take. An implementation that fails is a
row with its error. Finished rows are not run again.
"""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
from collections.abc import Sequence

import jax

from experiments.cli import Against, Settings, names, option, positive, record_path, run
from experiments.kernels.cases import cases
from experiments.kernels.compare import run_case
from experiments.kernels.report import kernel_table
from experiments.records import Results, commit, table_file, versions, write_bytes
from experiments.speed import measure_bandwidth


@dataclasses.dataclass(frozen=True)
class KernelSettings(Settings):
    """What `experiments.kernels` compares.

    Attributes:
        only: comma-separated operations (default: all)
        repeats: measurements of each row
        tiny: sizes for a test; the times mean nothing
    """

    only: tuple[str, ...] = option((), parse=names)
    repeats: int = option(7, parse=positive)
    tiny: bool = False


@dataclasses.dataclass(frozen=True)
class KernelCommand:
    """Where `experiments.kernels` writes.

    Attributes:
        out: JSON record; the table goes beside it
    """

    out: pathlib.Path = option(pathlib.Path("runs/kernels.json"), parse=record_path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    about = "Check and time every implementation of every kernel."
    return run(_compare, KernelSettings, KernelCommand, Against, prog="kvjax kernels", about=about, argv=argv)


def _compare(settings: KernelSettings, command: KernelCommand, against: Against) -> None:
    chosen = cases(settings.tiny)
    known = list(dict.fromkeys(case.operation.name for case in chosen))
    only = settings.only or known
    if unknown := [name for name in only if name not in known]:
        raise ValueError(f"--only: unknown operation {unknown[0]!r}, expected some of {', '.join(known)}")
    device = jax.devices()[0].device_kind
    results = Results(command.out, "kernels", {"device": device, "tiny": settings.tiny})
    bandwidth = measure_bandwidth(2**20 if settings.tiny else None)
    run_name = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    about = {"commit": commit(), "versions": versions(), "device": device}
    about["read_bandwidth"] = bandwidth.bytes_per_second
    results.change("runs", lambda runs: {**(runs or {}), run_name: about})
    failed = 0
    for case in chosen:
        if case.operation.name in only:
            failed += run_case(case, results, bandwidth, run_name, settings.repeats)
    write_bytes(table_file(command.out), kernel_table(results.metrics, results.notes).encode())
    print(f"record: {command.out}")
    against.show(command.out)
    if failed:
        raise SystemExit(f"{failed} rows failed or are wrong; see the record")


if __name__ == "__main__":
    raise SystemExit(main())
