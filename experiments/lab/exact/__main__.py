"""Exact decoding, measured: `python -m experiments.lab.exact --model qwen2.5-coder-1.5b --lengths 16384 --budgets 1/8`.

``--parts accepted`` counts the drafted tokens that Full keeps on real prompts: prose, code, tasks of long answers, each at
several temperatures. The prompts are read once for many drafts, and for all temperatures. ``speed`` times Verified beside
Full in the same run, and ``rejected`` a draft that is always wrong. ``equal`` compares tokens with Full's in float32.

A row is written as soon as it is measured, and is not measured again. `kvjax speed --methods verified_quest --acceptance ...`
times the shape of a large model.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time

import jax

from experiments.cli import Job, option, record_path
from experiments.lab.exact.measure import measure_accepted, measure_equal, measure_times
from experiments.lab.exact.report import exact_tables
from experiments.lab.exact.settings import ExactSettings
from experiments.records import Results, commit, operations, versions
from experiments.speed.rows import finish, note_run, now
from experiments.speed.settings import Output

MEASURES = {"accepted": measure_accepted, "speed": measure_times, "rejected": measure_times, "equal": measure_equal}


@dataclasses.dataclass(frozen=True)
class ExactCommand(Output):
    """Where `experiments.lab.exact` writes."""

    out: pathlib.Path = option(pathlib.Path("runs/exact.json"), read=record_path)


def _exact(settings: ExactSettings, command: ExactCommand) -> None:
    begun = time.monotonic()
    model = settings.load()
    about = {"device": jax.devices()[0].device_kind, "model": model.name, "dtype": model.dtypes, "weights": model.weights}
    results = Results(command.out, "exact", about)
    note_run(results, now(), {"commit": commit(), "versions": versions(), **about, **operations()})

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:6.1f} s] {text}", file=sys.stderr, flush=True)

    for part in settings.parts:
        MEASURES[part](settings, model, results, say, part)
    if not results.metrics:
        raise ValueError("no draft could be measured: the lines above say why")
    tables = exact_tables(results.metrics)
    print(tables)
    finish(results, tables, 0)


main = Job(_exact, ExactSettings, ExactCommand, compiles=True)


if __name__ == "__main__":
    raise SystemExit(main())
