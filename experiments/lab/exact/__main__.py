"""Exact decoding, measured: `python -m experiments.lab.exact --model qwen2.5-coder-1.5b --lengths 16384 --budgets 1/8`.

``--parts accepted`` counts the drafted tokens that Full keeps on real prompts: prose, code, tasks of long answers, each at
several temperatures. The prompts are read once for many drafts, and for all depths and temperatures. ``speed`` times Verified
beside Full in the same run. ``rejected`` times a draft that is always wrong. ``shape`` has random weights in the shape of a
large model and keeps drafted tokens as often as the record's rows of ``accepted``, or ``--acceptance``, say; with
``--profile`` it lists the kernels of a round. ``judge`` times the attention of several queries beside one query's, with
``--slot-parts`` over several devices. ``equal`` compares tokens with Full's in float32.

A row is written as soon as it is measured, and is not measured again.
"""

from __future__ import annotations

import json
import sys
import time

import jax

from experiments.cli import Against, Job
from experiments.lab.exact.accepted import measure_accepted
from experiments.lab.exact.equal import measure_equal
from experiments.lab.exact.judge import measure_judge
from experiments.lab.exact.report import exact_tables
from experiments.lab.exact.settings import ExactCommand, ExactSettings
from experiments.lab.exact.shape import measure_shape
from experiments.lab.exact.timed import measure_rejected, measure_speed
from experiments.records import Results, commit, operations, versions
from experiments.speed.rows import finish, note_run, now


def _exact(settings: ExactSettings, command: ExactCommand, against: Against) -> None:
    begun = time.monotonic()
    needed = set(settings.parts) - {"shape", "judge"}
    model = settings.load() if needed else None
    about = {"device": jax.devices()[0].device_kind}
    if model is None and command.out.exists():  # a shape has no model, and may join a record that has
        about = {**json.loads(command.out.read_text(encoding="utf-8"))["settings"], **about}
    elif model is not None:
        about |= {"model": model.name, "dtype": model.dtypes, "weights": model.weights}
    results = Results(command.out, "exact", about)
    note_run(results, now(), {"commit": commit(), "versions": versions(), **about, **operations()})

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:6.1f} s] {text}", file=sys.stderr, flush=True)

    parts = {"accepted": measure_accepted, "speed": measure_speed, "rejected": measure_rejected, "equal": measure_equal}
    for part in settings.parts:
        if model is not None and part in parts:
            parts[part](settings, model, results, say)
        if part == "shape":
            model = None  # frees the parameters
            measure_shape(settings, results, say)
        if part == "judge":
            measure_judge(settings, results, say)
    if not results.metrics:
        raise ValueError("no draft could be measured: the lines above say why")
    tables = exact_tables(results.metrics)
    print(tables)
    finish(results, tables, against, 0)


main = Job(_exact, ExactSettings, ExactCommand, Against, compiles=True)


if __name__ == "__main__":
    raise SystemExit(main())
