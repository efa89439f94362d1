"""Times decoding and prefill of any method: `python -m experiments.speed --methods full,snapkv --lengths 131072`.

The model has random weights in the shape of a real model, and its cache is filled with random keys and values as a prefill
would leave it (`filled_cache.py`), so that only decoding costs time. Every row has a floor of its own: the bytes that a step
must read (all weights, and the bytes that the method's `cost` counts in the real state) over the read bandwidth. A
streaming reduction measures the bandwidth in the same run. There is a row for each (model, method, length, batch). A row is
written as soon as it is finished, and is not measured again. A row that does not fit into memory is recorded as such.

Without flags it times Full, SnapKV and Quest in the shape of Llama-3.1-8B with 128K tokens, and on a CPU in a small shape
with 4K tokens, which takes half a minute.

By default, rows are decode steps (TPOT, time per output token), whose time is split on one device into the method's part and
the rest; at lengths at which no whole model fits, time ``--model llama-3.1-8b-4-layers``. ``--prefill`` times prefill (TTFT,
time to the first token). ``--largest-batch`` looks for the largest batch that fits, downwards from the batch that the
allocated bytes allow, and whose prompts can be read. Give the process most of the memory first
(``XLA_PYTHON_CLIENT_MEM_FRACTION=0.95``). With
``--set pariskv.offload=True`` only the bytes on the device count. Give such rows a record of their own, and ignore their
floor, which does not include the bus.

``--mesh`` spreads the rows over devices, and ``--beside-one`` also times them on one device in the same run.
"""

import dataclasses
import gc
import pathlib

import jax

from experiments.cli import Job, option, record_path
from experiments.records import Results, save, with_figures, write_bytes
from experiments.speed import plots, report
from experiments.speed.bench import Bench
from experiments.speed.rows import finish
from experiments.speed.settings import MODELS, Output, SpeedSettings


@dataclasses.dataclass(frozen=True)
class SpeedCommand(Output):
    """Where `experiments.speed` writes.

    Attributes:
        out: JSON record; the table goes beside it
        plot: draw the figure beside the record (needs matplotlib)
    """

    out: pathlib.Path = option(pathlib.Path("runs/speed.json"), read=record_path)
    plot: bool = True


def _speed(settings: SpeedSettings, command: SpeedCommand) -> None:
    command, settings = with_figures(command), settings.on_device()
    results = open_results(command.out, MODELS[settings.model]().dtype)
    bench = Bench(settings, results)
    print(f"{settings.shown_model} on {jax.devices()[0].device_kind}")
    print(report.head())
    failed = _beside_one(bench) if settings.beside_one else 0
    time_rows(bench)
    if command.plot:
        figure = plots.beside_floors(results.metrics, " and ".join(results.devices))
        for kind in ("png", "pdf"):
            write_bytes(results.path.with_suffix(f".{kind}"), save(figure, kind))
    finish(results, report.speed_tables(results.metrics, results.notes), failed + bench.failed)


def _beside_one(bench: Bench) -> int:
    """Measure the rows of a mesh on one device, in the same run, and return how many failed."""
    alone = dataclasses.replace(bench.settings, mesh=None, beside_one=False)
    one = Bench(alone, bench.results, bench.bandwidth, bench.run)
    time_rows(one)
    failed = one.failed
    del one  # its parameters must leave the device before the parameters of the mesh come
    gc.collect()
    return failed


def time_rows(bench: Bench) -> None:
    """Measure all rows of the settings, or find them in the record."""
    settings = bench.settings
    for length in settings.lengths:
        for name in settings.variants:
            if settings.largest_batch:
                bench.largest_batch(name, length)
            else:
                for batch in settings.batches or (1,):
                    (bench.prefill if settings.prefill else bench.decode)(name, length, batch)


def open_results(path: pathlib.Path, dtype: str) -> Results:
    """Open the record at a path, which holds the rows of a single kind of device."""
    kind = jax.devices()[0].device_kind
    settings = {"device": kind, "weights": "random", "dtype": dtype, "decoding": "greedy, to the end"}
    return Results(path, "speed", settings)


main = Job(_speed, SpeedSettings, SpeedCommand, models=True)


if __name__ == "__main__":
    raise SystemExit(main())
