"""Lists the kernels of a decode step and their times: `python -m experiments.speed.profile --methods snapkv`.

The token loop is the one that `experiments.speed` times, on the same caches. It runs once more under JAX's profiler, and the
kernels of a step are listed by name. A step takes a little longer under the profiler. Where the kernels of a step take less
time than the step, the device waited for the host or for another device.

``--parts 2`` profiles one device's part of the model alone, which waits for no sum: compared with ``--mesh model=2`` it shows
the cost of the sums.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jsonargparse.typing import PositiveInt

from experiments.answering import make_mesh, mesh_axes, mesh_text
from experiments.cli import Job, Settings, option, record_path
from experiments.records import make_record, markdown_rows, table_file, write_bytes, write_record
from experiments.speed.kernel_times import KernelTimes, read_trace
from experiments.speed.settings import MODELS, Output, SpeedSettings, part_of
from experiments.speed.token_loop import TokenLoop
from experiments.speed.variants import kv_dtype_of, setting
from models import random_params
from models.sharding import check_mesh

_RUNS = 5  # the first run warms up, the last is profiled


@dataclasses.dataclass(frozen=True)
class ProfileSettings(Settings):
    """The settings of `experiments.speed.profile`.

    Attributes:
        model: shape of the model, which gets random weights
        methods: comma-separated
        length: tokens stored before decoding
        batch: rows decoded together
        mesh: the devices over which the model, the rows or the slots of a row are spread (default: one device)
        parts: above 1, one device's part of the model alone, divided over so many
        sums: with --mesh: comma-separated variants of sums over devices; every method is profiled under each
        tokens: decode steps of a run
        top: kernels that are listed

    Raises:
        ValueError: as `SpeedSettings`, or parts beside a mesh.
    """

    model: str = "llama-3.1-8b"
    methods: tuple[str, ...] = ("snapkv",)
    length: PositiveInt = 131072
    batch: PositiveInt = 1
    mesh: str | None = None
    parts: PositiveInt = 1
    sums: tuple[str, ...] = ()
    tokens: PositiveInt = 8
    top: PositiveInt = 20

    def __post_init__(self) -> None:
        shared = {name: vars(self)[name] for name in ("model", "methods", "mesh", "sums")}
        SpeedSettings(**shared, lengths=(self.length,), batches=(self.batch,))
        if self.parts > 1 and self.mesh is not None:
            raise ValueError(f"--parts runs on one device, so it has no meaning with --mesh {self.mesh}")


@dataclasses.dataclass(frozen=True)
class ProfileCommand(Output):
    """Where `experiments.speed.profile` writes."""

    out: pathlib.Path = option(pathlib.Path("runs/profile.json"), read=record_path)


def _profile(settings: ProfileSettings, command: ProfileCommand) -> None:
    mesh, config = make_mesh(settings.mesh), part_of(MODELS[settings.model](), settings.parts)
    check_mesh(config, mesh)
    params = random_params(config, jax.random.key(0), mesh=mesh)
    placed = mesh_text(mesh_axes(settings.mesh)) or (f"one of {settings.parts} parts" if settings.parts > 1 else "one device")
    rows = []
    for name in settings.methods:
        method = setting(name, settings.length, config).method
        for sums in settings.sums or (None,):
            loop = TokenLoop(
                params, config, method, length=settings.length, batch=settings.batch, steps=settings.tokens,
                room=settings.tokens * _RUNS + 8, kv_dtype=kv_dtype_of(name), sums=sums,
            )  # fmt: skip
            seconds = statistics.median([loop.run() for _ in range(_RUNS - 1)][1:])
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    loop.run()
                devices = read_trace(pathlib.Path(folder))
            if not devices:
                raise ValueError("expected a GPU, the profiler saw no kernels: it sees only kernels of GPUs")
            about = {"method": name, "where": placed, "sums": sums}
            rows += [_row(about, seconds, one, settings) for one in devices]
            print(profile_table(rows[-len(devices) :][:1], settings.top), flush=True)
    made = make_record("profile", dataclasses.asdict(settings), rows)
    write_record(command.out, made)
    write_bytes(table_file(command.out), ("# Kernels of a decode step\n\n" + profile_table(rows, settings.top)).encode())
    print(f"record: {command.out}")


def _row(about: Mapping[str, Any], seconds: float, one: KernelTimes, settings: ProfileSettings) -> dict[str, Any]:
    steps = settings.tokens
    kernels = {name: {"per_step": count / steps, "seconds": total / steps} for name, (count, total) in one.kernels.items()}
    times = {"name": "step", "value": seconds, "unit": "s/token", "span": one.span / steps, "busy": one.busy / steps}
    return {**times, **about, "device": one.device, "kernels": kernels}


def profile_table(rows: Sequence[Mapping[str, Any]], top: int) -> str:
    """Write, for each row of a record, a line about its step and a table of its longest kernels."""
    text = []
    for row in rows:
        where = f"{row['where']}, {row['device'].removeprefix('/device:')}" + (f", sums {row['sums']}" if row["sums"] else "")
        whole, span, busy = (f"{row[field] * 1e3:.3f} ms" for field in ("value", "span", "busy"))
        text.append(f"**{row['method']}, {where}**: {whole} a step; under the profiler {span}, of which kernels ran {busy}.")
        text.append("")
        listed, lines = list(row["kernels"].items()), []
        for name, one in listed[:top]:
            count, took = one["per_step"], one["seconds"] * 1e6
            lines.append([name[:70], f"{count:.1f}", f"{took / count:.2f}", f"{took:.1f}"])
        if rest := listed[top:]:
            count, seconds = (sum(one[field] for _, one in rest) for field in ("per_step", "seconds"))
            lines.append([f"{len(rest)} others", f"{count:.1f}", "", f"{seconds * 1e6:.1f}"])
        text += [*markdown_rows([["kernel", "a step", "us each", "us a step"], *lines]), ""]
    return "\n".join(text)


main = Job(_profile, ProfileSettings, ProfileCommand, models=True)


if __name__ == "__main__":
    raise SystemExit(main())
