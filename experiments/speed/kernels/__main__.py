"""Checks and times every implementation of every kernel: `python -m experiments.speed.kernels [--only kth_select,...]`.

Every implementation that runs on this platform is checked against a reference in the same run. It is timed inside a compiled
loop (`experiments.speed.loop_seconds`), beside the time that reading its bytes would take. An implementation that fails has
a row with its error. Finished rows are not run again.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import jax

from experiments.cli import Against, Settings, names, option, positive, record_path, run
from experiments.records import Results, commit, versions
from experiments.speed.kernels.cases import cases
from experiments.speed.kernels.compare import run_case
from experiments.speed.kernels.report import kernel_table
from experiments.speed.roofline import measure_bandwidth
from experiments.speed.rows import finish, note_run, now
from experiments.speed.settings import Output


@dataclasses.dataclass(frozen=True)
class KernelSettings(Settings):
    """What `experiments.speed.kernels` compares.

    Attributes:
        only: comma-separated operations (default: all)
        repeats: measurements of each row
        tiny: sizes for a test; the times mean nothing
    """

    only: tuple[str, ...] = option((), parse=names)
    repeats: int = option(7, parse=positive)
    tiny: bool = False


@dataclasses.dataclass(frozen=True)
class KernelCommand(Output):
    """Where `experiments.speed.kernels` writes."""

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
        raise ValueError(f"--only: unknown operation {unknown[0]!r}, expected one of {', '.join(known)}")
    device = jax.devices()[0].device_kind
    results = Results(command.out, "kernels", {"device": device, "tiny": settings.tiny})
    bandwidth = measure_bandwidth(2**20 if settings.tiny else None)
    run_name = now()
    about = {"commit": commit(), "versions": versions(), "device": device}
    note_run(results, run_name, about | {"read_bandwidth": bandwidth.bytes_per_second})
    failed = 0
    for case in chosen:
        if case.operation.name in only:
            failed += run_case(case, results, bandwidth, run_name, settings.repeats)
    finish(results, kernel_table(results.metrics, results.notes), against, failed, "failed or are wrong; see the record")


if __name__ == "__main__":
    raise SystemExit(main())
