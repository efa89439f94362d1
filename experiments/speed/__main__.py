"""How fast: `python -m experiments.speed --methods full,snapkv --lengths 131072 --out docs/records/speed.json`.

Random weights in the shapes of real models; caches filled with random keys and values as a prefill would leave them
(`filled_cache.py`), so only decoding costs time. Every row has its own floor: the bytes that a step must read (all
weights, and what the method's `cost` says of the real state) over the read bandwidth of a streaming reduction in the same
run. One row per (model, method, length, batch), written as it is finished and not run again; a row that does not fit
the memory is recorded as such.

Without more, rows are decode steps (TPOT). ``--prefill``: reading a prompt (TTFT). ``--attention-only``: one layer's
selection and attention, decoding or (``--queries 512``) on one more chunk of a prompt. ``--largest-batch``: the largest that
fits, sought downwards from what the allocated bytes allow; give the process most of the memory first
(``XLA_PYTHON_CLIENT_MEM_FRACTION=0.95``).
"""

from __future__ import annotations

import argparse
import pathlib

import jax

from experiments.cli.types import names, numbers, positive, record_path, refusals
from experiments.demo import report as demo_report
from experiments.records import record
from experiments.records.resumable import Results
from experiments.records.tables import table_file
from experiments.speed import report as speed_report
from experiments.speed.bench import MODELS, Bench, Plan
from experiments.speed.variants import VARIANTS, read_knobs


def write_report(results: Results, plot: bool) -> None:
    """The table and the figure of the record."""
    text = speed_report.markdown(results.metrics, results.notes)
    record.write_bytes(table_file(results.path), text.encode())
    if plot:
        record.write_bytes(results.path.with_suffix(".png"), speed_report.draw(results.metrics))


def open_results(path: pathlib.Path, dtype: str) -> Results:
    """The record, which holds one device's rows."""
    kind = jax.devices()[0].device_kind
    settings = {"device": kind, "weights": "random", "dtype": dtype, "decoding": "greedy, to the end"}
    return Results(path, "speed", settings)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Time decoding and prefill of every method.")
    parser.add_argument("--model", default="llama-3.1-8b", choices=tuple(MODELS))
    parser.add_argument("--methods", type=names, default="full", help="comma-separated, or 'all'; Full is run first always")
    parser.add_argument("--lengths", type=numbers, default="131072", help="comma-separated, tokens stored before decoding")
    parser.add_argument("--batches", type=numbers, help="comma-separated, rows decoded or read together (1)")
    parser.add_argument("--tokens", type=positive, default=32, help="tokens decoded per repeat, in one program")
    parser.add_argument("--repeats", type=positive, default=5, help="measurements of each row")
    parser.add_argument("--no-split", action="store_true", help="do not split the time of a step into its parts")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--prefill", action="store_true", help="time the reading of prompts instead")
    mode.add_argument("--attention-only", action="store_true", help="time one layer's attention instead")
    mode.add_argument("--largest-batch", action="store_true", help="look for the largest batch instead of --batches")
    parser.add_argument("--chunk-size", type=positive, help="with --prefill: tokens of a prompt read at once (8192)")
    parser.add_argument("--queries", type=positive, help="with --attention-only: tokens at once (1, which decodes)")
    parser.add_argument("--most-rows", type=positive, help="with --largest-batch: where to begin at most (64)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="METHOD.KNOB=VALUE", help="a knob of a method; repeatable"
    )
    parser.add_argument("--no-plot", action="store_true", help="write no figure")
    parser.add_argument("--out", type=record_path, required=True, help="JSON record; the table goes beside it")
    arguments = parser.parse_args()
    if not arguments.no_plot:
        demo_report.check_installed()
    optional = {"chunk_size": "prefill", "queries": "attention_only", "most_rows": "largest_batch"}
    with refusals(parser):
        for name, needs in optional.items():
            if vars(arguments)[name] is not None and not vars(arguments)[needs]:
                raise ValueError(f"--{name.replace('_', '-')} has no meaning without --{needs.replace('_', '-')}")
        if arguments.batches is not None and (arguments.attention_only or arguments.largest_batch):
            raise ValueError("--batches has no meaning with --attention-only, which has one row, and --largest-batch")
        methods = tuple(VARIANTS) if arguments.methods == ("all",) else arguments.methods
        plan = Plan(
            model=arguments.model,
            methods=tuple(dict.fromkeys(["full", *methods])),
            lengths=arguments.lengths,
            batches=arguments.batches or (1,),
            tokens=arguments.tokens,
            repeats=arguments.repeats,
            split=not arguments.no_split,
            **{name: vars(arguments)[name] for name in optional if vars(arguments)[name] is not None},
        )
        results = open_results(arguments.out, MODELS[plan.model]().dtype)
        bench = Bench(plan, results, read_knobs(arguments.set))
    print(speed_report.head())
    for length in plan.lengths:
        for name in plan.methods:
            if arguments.attention_only:
                bench.attention(name, length)
            elif arguments.largest_batch:
                bench.largest_batch(name, length)
            else:
                for batch in plan.batches:
                    (bench.prefill if arguments.prefill else bench.decode)(name, length, batch)
    write_report(results, not arguments.no_plot)
    print(f"record: {arguments.out}")
    if bench.failed:
        raise SystemExit(f"{bench.failed} rows failed; their errors are in the record")


if __name__ == "__main__":
    main()
