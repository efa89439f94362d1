"""Decoding from host memory: `python -m experiments.speed.offload --methods pariskv --lengths 393216`.

Weights are random and caches are filled as in `experiments.speed`. Every method decodes with its rows in pinned host memory
and with all of them on the device; a row says if they do not fit. A step's bus bytes are those of the attended rows that have
no copy on the device, counted from a real selection. The link's bandwidth is measured by a copy of 256 MiB in the same run.
A row's floor is the longer of two times: the bus bytes over the link, and all other bytes over the device's memory bandwidth,
because both can be read at once. More than 64 GB of pinned memory must be requested:
``XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=100``. With ``--share fit``, as many layers stay on the device as a prompt of that length
leaves room for (`kvjax.offload_share`). ``--kv-dtype int8`` adds rows whose keys and values are stored in 8 bits, on the
device and on the host.

``--prompts`` times prefill instead, whose keys and values leave the device as they are made, and reports the largest device
memory that it took. With ``XLA_PYTHON_CLIENT_MEM_FRACTION=.38``, even a prompt whose cache does not fit on the device is
prefilled.
"""

import dataclasses
import pathlib
from typing import Any

import jax

from experiments.answering import Setting
from experiments.cli import Job, option, record_path
from experiments.records import Results
from experiments.speed import report
from experiments.speed.bench import Bench
from experiments.speed.roofline import bytes_limit
from experiments.speed.rows import finish
from experiments.speed.settings import MODELS, OffloadSettings, Output
from experiments.speed.traffic import traffic
from experiments.speed.variants import kv_dtype_of, read_knobs
from kvjax.accounting.memory import link_bandwidth, offload_share
from kvjax.decoding.layer_bytes import placed_bytes


@dataclasses.dataclass(frozen=True)
class OffloadCommand(Output):
    """Where `experiments.speed.offload` writes."""

    out: pathlib.Path = option(pathlib.Path("runs/offload.json"), read=record_path)


def _run(settings: OffloadSettings, command: OffloadCommand) -> None:
    settings = settings.on_device()
    if offloaded := [name for name, knobs in read_knobs(settings.knobs).items() if "offload" in knobs]:
        raise ValueError(f"--set {offloaded[0]}.offload: rows are measured offloaded and resident, see --no-resident")
    device, dtype = jax.devices()[0].device_kind, MODELS[settings.model]().dtype
    results = Results(command.out, "offload", {"device": device, "weights": "random", "dtype": dtype})
    bench = Bench(settings.speed, results)
    link = link_bandwidth()
    results.change("links", lambda links: {**(links or {}), bench.run: link})
    print(f"host to device: {link / 1e9:.1f} GB/s")
    print(report.head())
    for length in settings.lengths:
        for batch in settings.batches:
            for name in settings.variants:
                _time(bench, settings, name, length, batch, link)
    finish(results, report.offload_tables(results.metrics, results.notes), bench.failed)


def _time(bench: Bench, settings: OffloadSettings, name: str, length: int, batch: int, link: float) -> None:
    """Measure or look up the rows of a method at a length and a batch."""
    begin = f"{name:17s} {length:8d} {batch:4d}"
    can = can_offload(bench, name, length)
    share = 0.0
    if can:
        share = fitting(bench, name, length, batch) if settings.share == "fit" else settings.share
    if settings.prompts:
        if can:
            bench.prefill(name, length, batch, {"offload": _offload(share)}, share=float(share))
        else:
            print(f"{'prefill':9s} {begin} has nothing to offload")
        return
    for part in dict.fromkeys([share, *[0.0] * (not can or not settings.no_resident)]):
        row = measure(bench, name, length, batch, part, link)
        if part and row["error"] is None:
            print(
                f"{'':9s} {row['bus_bytes'] / 1e6:.2f} MB over the bus, {100 * row['hot']:.1f} % hot, "
                f"{row['layers']} of {bench.config.num_layers} layers"
            )


def can_offload(bench: Bench, name: str, length: int) -> bool:
    """Say whether the method of a variant has the field ``offload``."""
    return "offload" in {field.name for field in dataclasses.fields(bench.setting(name, length).method)}


def fitting(bench: Bench, name: str, length: int, batch: int) -> float:
    """Find the least share of the layers that must be offloaded.

    It is 1 if no share fits, or if the device does not say how much memory it has.
    """
    limit = bytes_limit()
    if limit is None:
        return 1.0
    sizes = {"batch": batch, "prompt_slots": length, "max_new_tokens": bench.room, "chunk_size": bench.chunk_size}
    method, free = bench.setting(name, length).method, limit - bench.weights
    try:
        return offload_share(method, bench.config, device_bytes=free, kv_dtype=kv_dtype_of(name), **sizes)
    except MemoryError:  # the row will say so
        return 1.0


def _offload(share: float) -> bool | float:
    """Convert a share to a value of the knob ``offload``: True and False instead of 1 and 0."""
    return bool(share) if share in (0, 1) else share


def measure(bench: Bench, name: str, length: int, batch: int, share: float, link: float) -> dict[str, Any]:
    """Look up or measure a row with ``share`` of the layers offloaded; ``link`` is bytes per second."""
    knobs = {"offload": _offload(share)} if can_offload(bench, name, length) else {}

    def run(chosen: Setting) -> dict[str, Any]:
        figures, cache = bench.decode_figures(chosen.method, length, batch, kv_dtype_of(name))
        device, host = placed_bytes((cache.layers, cache.shared))
        crossing = traffic(cache)
        near = figures["weight_bytes_read"] + figures["cache_bytes_read"] - crossing["bus_bytes"]
        floor = max(bench.bandwidth.seconds(near), crossing["bus_bytes"] / link)
        figures |= {"floor": floor, "ratio": figures["value"] / floor}
        return {**figures, "device_bytes": device, "host_bytes": host, **crossing}

    return bench.row("offload" if share else "resident", name, length, batch, run, knobs, share=float(share))


main = Job(_run, OffloadSettings, OffloadCommand, models=True)


if __name__ == "__main__":
    raise SystemExit(main())
