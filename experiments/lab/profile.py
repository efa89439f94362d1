"""Lists the kernels of a decode step and their times: `python -m experiments.lab.profile --methods snapkv`.

The token loop is the one that `experiments.speed` times, on the same caches. It runs once more under JAX's profiler, and the
kernels of a step are listed by name. A step takes a little longer under the profiler. Where the kernels of a step take less
time than the step, the device waited for the host or for another device.

``--parts 2`` profiles one device's part of the model alone, which waits for no sum: compared with ``--mesh model=2`` it shows
the cost of the sums.
"""

import dataclasses
import itertools
import pathlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.profiler import ProfileData
from jsonargparse.typing import PositiveInt

from experiments.answering import make_mesh, mesh_axes, mesh_text
from experiments.cli import Job, Settings, option, record_path
from experiments.records import make_record, table_file, write_bytes, write_record
from experiments.records.report import Column, row_table
from experiments.speed.settings import MODELS, Output, SpeedSettings
from experiments.speed.token_loop import TokenLoop
from experiments.speed.variants import kv_dtype_of, setting
from models import ModelConfig, random_params
from models.sharding import check_mesh

_RUNS = 5  # the first run warms up, the last is profiled


@dataclasses.dataclass(frozen=True)
class ProfileSettings(Settings):
    """The settings of `experiments.lab.profile`.

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
    """Where `experiments.lab.profile` writes."""

    out: pathlib.Path = option(pathlib.Path("runs/profile.json"), read=record_path)


def _profile(settings: ProfileSettings, command: ProfileCommand) -> None:
    mesh, config = make_mesh(settings.mesh), part_of(MODELS[settings.model](), settings.parts)
    check_mesh(config, mesh)
    params = random_params(config, jax.random.key(0), mesh=mesh)
    placed = mesh_text(mesh_axes(settings.mesh)) or (f"one of {settings.parts} parts" if settings.parts > 1 else "one device")
    rows = []
    for name, sums in itertools.product(settings.methods, settings.sums or (None,)):
        method = setting(name, settings.length, config).method
        loop = TokenLoop(
            params, config, method, length=settings.length, batch=settings.batch, steps=settings.tokens,
            room=settings.tokens * _RUNS + 8, kv_dtype=kv_dtype_of(name), sums=sums,
        )  # fmt: skip
        seconds = statistics.median([loop.run() for _ in range(_RUNS - 1)][1:])
        about = {"name": "step", "value": seconds, "unit": "s/token", "method": name, "where": placed, "sums": sums}
        devices = [about | times for times in kernel_times(_traced(loop), settings.tokens)]
        if not devices:
            raise ValueError("expected a GPU, the profiler saw no kernels: it sees only kernels of GPUs")
        rows += devices
        print(profile_table(devices[:1], settings.top), flush=True)
    write_record(command.out, make_record("profile", dataclasses.asdict(settings), rows))
    write_bytes(table_file(command.out), ("# Kernels of a decode step\n\n" + profile_table(rows, settings.top)).encode())
    print(f"record: {command.out}")


def part_of(config: ModelConfig, parts: int) -> ModelConfig:
    """Describe one device's part of a model as a model of its own, with the parameters that the device has on a mesh.

    Args:
        config: the model.
        parts: the devices over which it is divided; with 1 it is returned as it is.

    Raises:
        ValueError: the parts would not be equal.
    """
    if parts == 1:
        return config
    # `local` leaves the vocabulary whole, because a cache keeps the logits of all tokens. End tokens may be in another part.
    return dataclasses.replace(config.local(parts), vocab_size=config.vocab_size // parts, eos_token_ids=())


def _traced(loop: TokenLoop) -> ProfileData:
    """Run the loop once more under the profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            loop.run()
        (file,) = pathlib.Path(folder).glob("plugins/profile/*/*.xplane.pb")
        return ProfileData.from_file(str(file))


def kernel_times(profile: ProfileData, steps: int) -> list[dict[str, Any]]:
    """Sum the kernels of each GPU in a profile of so many steps; times are seconds of a step.

    Kernels are the events of the lines whose name begins with "Stream".

    Returns:
        For each device: "device", its name, such as "/device:GPU:0"; "span", from the start of the first kernel to the end of
        the last; "busy", in which at least one kernel ran; and "kernels", by name, the longest first, how often each ran
        "per_step" and the sum of its "seconds".
    """
    devices = []
    for plane in profile.planes:
        lines = [line for line in plane.lines if line.name.startswith("Stream")]
        events = sorted((event for line in lines for event in line.events), key=lambda event: event.start_ns)
        if not (events and plane.name.startswith("/device:")):
            continue
        kernels: dict[str, dict[str, float]] = {}
        busy, end = 0.0, events[0].start_ns
        for event in events:
            kernel = kernels.setdefault(event.name, {"per_step": 0.0, "seconds": 0.0})
            kernel["per_step"] += 1 / steps
            kernel["seconds"] += event.duration_ns / 1e9 / steps
            last = event.start_ns + event.duration_ns
            busy += max(0.0, last - max(end, event.start_ns))
            end = max(end, last)
        span = end - events[0].start_ns
        times = {"span": span / 1e9 / steps, "busy": busy / 1e9 / steps}
        longest = dict(sorted(kernels.items(), key=lambda item: -item[1]["seconds"]))
        devices.append({"device": plane.name, **times, "kernels": longest})
    return devices


_COLUMNS: dict[str, Column] = {
    "kernel": "kernel",
    "a step": ("per_step", 1, ".1f"),
    "us each": lambda row: f"{row['seconds'] / row['per_step'] * 1e6:.2f}" if row["each"] else None,
    "us a step": ("seconds", 1e6, ".1f"),
}


def profile_table(rows: Sequence[Mapping[str, Any]], top: int) -> str:
    """Write, for each row of a record, a line about its step and a table of its longest kernels."""
    text = []
    for row in rows:
        where = f"{row['where']}, {row['device'].removeprefix('/device:')}" + (f", sums {row['sums']}" if row["sums"] else "")
        whole, span, busy = (f"{row[field] * 1e3:.3f} ms" for field in ("value", "span", "busy"))
        text.append(f"**{row['method']}, {where}**: {whole} a step; under the profiler {span}, of which kernels ran {busy}.")
        text.append("")
        kernels = [{"kernel": name[:70], **times, "each": True} for name, times in row["kernels"].items()]
        if rest := kernels[top:]:
            totals = {field: sum(kernel[field] for kernel in rest) for field in ("per_step", "seconds")}
            kernels[top:] = [{"kernel": f"{len(rest)} others", **totals, "each": False}]
        text += [*row_table(kernels, _COLUMNS), ""]
    return "\n".join(text)


main = Job(_profile, ProfileSettings, ProfileCommand, models=True)


if __name__ == "__main__":
    raise SystemExit(main())
