"""How long a small sum over devices takes: `python -m experiments.collectives --variants all --sizes 8192`.

In a decode step every layer waits for two sums of some kilobytes, so their latency decides what a second device is worth.
Each variant (`experiments.speed.SUM_VARIANTS`) is a way to sum, with options for the compiler or variables for NCCL. It is
measured in a process that this one starts: if the process dies or does not answer, that is a row, and the run goes on. A
variant that lost its process is not tried again in this run. Finished rows are not measured again.

It runs on several GPUs, and with ``XLA_FLAGS=--xla_force_host_platform_device_count=8`` on a CPU, whose times mean nothing.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from experiments.answering import mesh_axes
from experiments.cli import Against, Settings, names, numbers, option, positive, record_path, run
from experiments.collectives import plots
from experiments.collectives.job import Job
from experiments.collectives.measure import FORMS, Cell
from experiments.collectives.report import sum_tables
from experiments.collectives.worker import Died
from experiments.records import Results, check_installed, commit, save, table_file, versions, write_bytes
from experiments.speed import SUM_VARIANTS

_DTYPES = ("bfloat16", "float32")
_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


@dataclasses.dataclass(frozen=True)
class CollectiveSettings(Settings):
    """What `experiments.collectives` times.

    Attributes:
        variants: comma-separated, or 'all'
        sizes: comma-separated, bytes that each device has
        dtypes: comma-separated, bfloat16 or float32
        forms: comma-separated: chain, sums alone; loop, a loop around them
        mesh: the devices, such as model=2 or data=2,model=4; sums are over the axis model (default: all devices)
        chain: sums that follow each other; 8B shapes have 65 in a step
        iterations: of the loop
        repeats: measurements of each row
        patience: seconds after which a row that gives no answer has failed

    Raises:
        ValueError: an unknown variant, dtype or form, or a size that is no multiple of 4.
    """

    variants: tuple[str, ...] = option(("all",), parse=names)
    sizes: tuple[int, ...] = option((1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 64 << 20), parse=numbers)
    dtypes: tuple[str, ...] = option(("bfloat16",), parse=names)
    forms: tuple[str, ...] = option(FORMS, parse=names)
    mesh: str | None = None
    chain: int = option(66, parse=positive)
    iterations: int = option(16, parse=positive)
    repeats: int = option(7, parse=positive)
    patience: int = option(120, parse=positive)

    def __post_init__(self) -> None:
        for field, known in (("variants", ("all", *SUM_VARIANTS)), ("dtypes", _DTYPES), ("forms", FORMS)):
            for name in vars(self)[field]:
                if name not in known:
                    raise ValueError(f"--{field}: unknown {name!r}, expected some of {', '.join(known)}")
        for size in self.sizes:
            if size % 4:
                raise ValueError(f"--sizes must be multiples of 4 bytes, got {size}")
        mesh_axes(self.mesh)

    @property
    def chosen(self) -> tuple[str, ...]:
        """The names of the variants that are timed."""
        return tuple(SUM_VARIANTS) if "all" in self.variants else tuple(dict.fromkeys(self.variants))

    def cells(self, variant: str) -> list[Cell]:
        """What is measured of a variant."""
        fixed = {"chain": self.chain, "iterations": self.iterations, "repeats": self.repeats}
        return [
            Cell(variant=variant, size=size, dtype=dtype, form=form, **fixed)
            for dtype in self.dtypes
            for form in self.forms
            for size in self.sizes
        ]


@dataclasses.dataclass(frozen=True)
class CollectiveCommand:
    """Where `experiments.collectives` writes.

    Attributes:
        out: JSON record; the table goes beside it
        plot: draw the figure beside the record (needs matplotlib)
    """

    out: pathlib.Path = option(pathlib.Path("runs/collectives.json"), parse=record_path)
    plot: bool = True


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    about = "Time sums over the devices of a mesh, in each way that there is."
    return run(_time, CollectiveSettings, CollectiveCommand, Against, prog="kvjax collectives", about=about, argv=argv)


def _time(settings: CollectiveSettings, command: CollectiveCommand, against: Against) -> None:
    if command.plot:
        check_installed()
    try:
        job = Job(settings.mesh, settings.patience)
    except Died as problem:
        raise SystemExit(f"no process that measures has started: {problem}") from problem
    with job:
        device = {"device": job.device["kind"], "count": job.device["count"]}
        results = Results(command.out, "collectives", device, device=job.device, packages=_PACKAGES)
        about = {"commit": commit(), "versions": versions(_PACKAGES), "device": job.device}
        results.change("runs", lambda runs: {**(runs or {}), job.name: about})
        # Variants of one environment share a process, so those without variables of their own come first.
        for name in sorted(settings.chosen, key=lambda name: sorted(SUM_VARIANTS[name].environment.items())):
            job.variant(name, settings.cells(name), results)
    write_bytes(table_file(command.out), sum_tables(results.metrics, results.notes).encode())
    if command.plot and any(row["error"] is None for row in results.metrics):
        write_bytes(command.out.with_suffix(".png"), save(plots.latency(results.metrics)))
    print(f"record: {command.out}")
    against.show(command.out)
    if job.failed:
        print(f"{job.failed} rows have no time; the record says why")
    if job.wrong:
        raise SystemExit(f"{job.wrong} rows are wrong; see the record")


if __name__ == "__main__":
    raise SystemExit(main())
