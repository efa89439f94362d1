"""Checks and times every implementation of every kernel: `python -m experiments.speed.kernels [--only kth_select,...]`.

``--only gather_attention --with my_kernels:gather`` adds a kernel of one's own. ``--interpret`` runs kernels on a machine
that has none of their devices. ``--peer flashinfer`` times decode attention beside FlashInfer's instead.

Every implementation that runs on this platform is checked against a reference in the same run. It is timed inside a compiled
loop (`experiments.speed.loop_seconds`), beside the time that reading its bytes would take. An implementation that fails has
a row with its error. Finished rows are not run again.
"""

import dataclasses
import pathlib

import jax
from jsonargparse.typing import PositiveInt

from experiments.cli import Job, Settings, option, record_path
from experiments.records import Results, commit, versions
from experiments.speed.kernels.cases import cases
from experiments.speed.kernels.compare import run_case
from experiments.speed.kernels.outside import added
from experiments.speed.kernels.peers import PEERS, check_peer, run_peer
from experiments.speed.kernels.report import kernel_table
from experiments.speed.roofline import measure_bandwidth
from experiments.speed.rows import finish, note_run, now
from experiments.speed.settings import Output
from kvjax.protocol.fields import nearest


@dataclasses.dataclass(frozen=True)
class KernelSettings(Settings):
    """What `experiments.speed.kernels` compares.

    Attributes:
        only: comma-separated operations (default: all)
        outside: a kernel of your own, package.module:function, which gets the arguments of the operation that --only names;
            repeatable
        repeats: measurements of each row
        tiny: sizes for a test; the times mean nothing
        interpret: run kernels interpreted, on any machine, in the sizes of --tiny: their errors, and no times, because Python
            runs each of their operations
        peer: time decode attention beside this package's kernels, and nothing else

    Raises:
        ValueError: a kernel of your own without exactly one operation, or a peer beside what it does not run.
    """

    only: tuple[str, ...] = ()
    outside: tuple[str, ...] = option((), flag="with", repeat=True, metavar="MODULE:FUNCTION")
    repeats: PositiveInt = 7
    tiny: bool = False
    interpret: bool = False
    peer: str | None = option(None, choices=tuple(PEERS))

    def __post_init__(self) -> None:
        if self.outside and len(self.only) != 1:
            raise ValueError(f"--with belongs to one operation, --only NAME; got {', '.join(self.only) or 'all operations'}")
        if self.peer and (self.only or self.tiny or self.interpret):
            raise ValueError(f"--peer {self.peer} has its own shapes, expected no --only, --tiny or --interpret beside it")


@dataclasses.dataclass(frozen=True)
class KernelCommand(Output):
    """Where `experiments.speed.kernels` writes."""

    out: pathlib.Path = option(pathlib.Path("runs/kernels.json"), read=record_path)


def _compare(settings: KernelSettings, command: KernelCommand) -> None:
    small = settings.tiny or settings.interpret
    chosen = cases(small, wide=settings.interpret)
    known = list(dict.fromkeys(case.operation.name for case in chosen))
    only = settings.only or known
    if unknown := [name for name in only if name not in known]:
        meant = nearest(unknown[0], known)
        raise ValueError(f"--only: unknown operation {unknown[0]!r}, expected one of {', '.join(known)}{meant}")
    if not small and jax.default_backend() == "cpu":
        raise ValueError(
            "the shapes are of an 8B model with 128K tokens, for which a GPU or a TPU is expected, got a CPU"
            + ": add --interpret (kernels interpreted in small sizes, errors and no times), or --tiny (what a CPU can run, "
            "in small sizes); no CPU can time a kernel for a GPU or a TPU" * (settings.peer is None)
        )
    device = jax.devices()[0].device_kind
    about_all = {"device": device, "tiny": small} | ({"interpret": True} if settings.interpret else {})
    about_all |= {"peer": settings.peer} if settings.peer else {}
    packages = check_peer(settings.peer) if settings.peer else ()
    results = Results(command.out, "kernels", about_all, packages=packages)
    bandwidth = None if settings.interpret else measure_bandwidth(2**20 if small else None)
    run_name = now()
    about = {"commit": commit(), "versions": versions(packages), "device": device}
    note_run(results, run_name, about | {"read_bandwidth": None if bandwidth is None else bandwidth.bytes_per_second})
    failed = run_peer(settings.peer, results, bandwidth, run_name, settings.repeats) if settings.peer else 0
    for name in [] if settings.peer else [name for name in known if name in only]:
        mine = [case for case in chosen if case.operation.name == name]
        with added(mine, settings.outside, settings.interpret):
            failed += sum(run_case(case, results, bandwidth, run_name, settings.repeats) for case in mine)
    finish(results, kernel_table(results.metrics, results.notes), failed, "failed or are wrong; see the record")
    ran = {(row["name"], row["implementation"]) for row in results.metrics}
    for own in settings.outside:  # what has no row has no error either
        if (settings.only[0], own) not in ran:
            raise ValueError(f"--with {own}: no shape of {settings.only[0]} can run it here; the lines above say why")


main = Job(_compare, KernelSettings, KernelCommand)


if __name__ == "__main__":
    raise SystemExit(main())
