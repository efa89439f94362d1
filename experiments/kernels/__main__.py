"""Kernel by implementation by shape: `python -m experiments.kernels --out docs/kernels.json [--only kth_select,...]`.

Every implementation that runs on this platform is checked against a reference in the same run and timed inside one compiled
loop (`device_time.py`), beside the time it would take to read its bytes.
What fails is a row too, with the error. Finished rows are not run again.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.cli.types import names, positive, record_path, refusals
from experiments.kernels import cases
from experiments.kernels.case import Case, Run
from experiments.records import markdown_rows, record
from experiments.records.resumable import Results
from experiments.speed.device_time import loop_seconds
from experiments.speed.roofline import Bandwidth, measure_bandwidth, roofline

_SLOW = 3e-3  # seconds of a call from which few of them are enough


def implementations(case: Case, args: tuple) -> tuple[dict[str, Run], dict[str, str]]:
    """What can run the case here, by name, in the order of the operation's table; and why others cannot."""
    found: dict[str, Run] = {}
    missing: dict[str, str] = {}
    for name in case.operation.implementations:
        run = functools.partial(case.run, implementation=name)
        try:
            jax.eval_shape(run, *args)
        except NotImplementedError as reason:
            missing[name] = str(reason).rpartition("cannot run: ")[2]
            continue
        found[name] = run
    return {**found, **case.others}, missing


def error(got: Any, want: Any) -> float:
    """Largest relative error of the float results, per array the norm of the difference over the norm; inf if others differ.

    Where one is infinite the other must be.
    """
    worst = 0.0
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        mine, other = np.asarray(mine), np.asarray(other)
        if mine.dtype.kind in "iub":
            worst = max(worst, 0.0 if np.array_equal(mine, other) else np.inf)
            continue
        mine, other = mine.astype(np.float64), other.astype(np.float64)
        finite = np.isfinite(other)
        if not np.array_equal(finite, np.isfinite(mine)) or not np.array_equal(mine[~finite], other[~finite]):
            return np.inf
        mine, other = mine[finite], other[finite]
        worst = max(worst, float(np.linalg.norm(mine - other) / max(np.linalg.norm(other), 1e-30)))
    return worst


def reference(case: Case, args: tuple) -> Any:
    """What results are compared with, on the host."""
    if case.reference is not None:
        found = case.reference(*args)
    else:
        exact = [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in args]
        found = jax.jit(functools.partial(case.run, implementation="xla"))(*exact)
    return jax.device_get(found if case.settle is None else case.settle(found))


def measure(case: Case, run: Run, args: tuple, want: Any, bandwidth: Bandwidth, repeats: int) -> dict[str, Any]:
    """Checks and times one implementation: the fields of its row."""
    program = jax.jit(run)
    got = program(*args)
    off = error(got if case.settle is None else case.settle(got), want)
    begun = time.perf_counter()
    jax.block_until_ready(program(*args))
    once = time.perf_counter() - begun
    loop = {"chain": 1, "iterations": max(1, min(20, int(0.1 / once)))} if once > _SLOW else {}
    took = loop_seconds(run, *args, repeats=repeats, **loop)
    roof = roofline(case.bytes_read, took.median, bandwidth)
    return {
        "value": took.median,
        "unit": "s",
        "least": took.least,
        "most": took.most,
        "compile_seconds": took.compile,
        "relative_error": off if np.isfinite(off) else None,
        "passed": bool(off <= case.tolerance),
        "bytes_read": case.bytes_read,
        "floor": roof.floor,
        "ratio": roof.ratio,
    }


def run_case(case: Case, results: Results, bandwidth: Bandwidth, run_name: str, repeats: int) -> int:
    """Measures what the record lacks of a case; the number of rows that failed."""
    args = jax.block_until_ready(case.make())
    want, failed = None, 0
    found, missing = implementations(case, args)
    for name, reason in missing.items():
        print(f"{case.operation.name:17s} {name:14s} {case.shape:52s} not here: {reason}", flush=True)
    for name, run in found.items():
        identity = {"name": case.operation.name, "shape": case.shape, "implementation": name}
        known = results.find(identity)
        if known is not None and known["passed"]:
            print(f"{line(known)}, from the record", flush=True)
            continue
        try:
            if want is None:
                want = reference(case, args)
            row = {**identity, **measure(case, run, args, want, bandwidth, repeats), "error": None}
        except Exception as problem:  # one row less; the others are still wanted
            row = {**identity, "value": None, "unit": "s", "passed": False}
            row["error"] = f"{type(problem).__name__}: {problem}"[:2000]
        row |= {"run": run_name, "bandwidth": bandwidth.bytes_per_second}
        failed += not row["passed"]
        results.add(row, identity)
        print(line(row), flush=True)
    return failed


def line(row: Mapping[str, Any]) -> str:
    """One row as it is finished."""
    begin = f"{row['name']:17s} {row['implementation']:14s} {row['shape']:52s}"
    if row["error"] is not None:
        return f"{begin} {row['error'].splitlines()[0][:160]}"
    off = "differs" if row["relative_error"] is None else f"{row['relative_error']:.1e}"
    verdict = "" if row["passed"] else "  WRONG"
    return f"{begin} {1e6 * row['value']:10.1f} us, {row['ratio']:8.2f} of its floor, error {off}{verdict}"


def markdown(metrics: Sequence[Mapping[str, Any]], notes: Mapping[str, Any]) -> str:
    """The record as a table."""
    table: list[Sequence[Any]] = [
        ("operation", "shape", "implementation", "us, median (least - most)", "floor us", "ratio", "relative error")
    ]
    for row in metrics:
        begin = (row["name"], row["shape"], row["implementation"])
        if row["error"] is not None:
            table.append((*begin, row["error"].splitlines()[0][:160].replace("|", "/"), "", "", ""))
            continue
        micro = [f"{1e6 * row[field]:.1f}" for field in ("value", "least", "most")]
        off = "differs" if row["relative_error"] is None else f"{row['relative_error']:.1e}"
        off += "" if row["passed"] else " (too large)"
        table.append(
            (*begin, f"{micro[0]} ({micro[1]} - {micro[2]})", f"{1e6 * row['floor']:.1f}", f"{row['ratio']:.2f}", off)
        )
    runs = [
        f"Run {name}: {about['device']}, JAX {about['versions']['jax']}, commit {about['commit']}, "
        f"{about['read_bandwidth'] / 1e12:.3f} TB/s read."
        for name, about in notes.get("runs", {}).items()
        if name in {row["run"] for row in metrics}
    ]
    legend = (
        "Floor: the bytes an operation must read over the read bandwidth measured in the same run; data that stays in a "
        "cache between the runs of a loop can be read faster than that. Relative error: against a reference in float32; of "
        "rerank and the operations on packed vectors against their xla implementation on the same arguments."
    )
    return "\n".join(["# Kernels", "", *markdown_rows(table), "", legend, "", *runs]) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Check and time every implementation of every kernel.")
    parser.add_argument("--only", type=names, help="comma-separated operations (default: all)")
    parser.add_argument("--repeats", type=positive, default=7, help="measurements of each row")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test; the times mean nothing")
    parser.add_argument("--out", type=record_path, required=True, help="JSON record; the table goes beside it")
    arguments = parser.parse_args()
    chosen = cases(arguments.tiny)
    known = list(dict.fromkeys(case.operation.name for case in chosen))
    only = known if arguments.only is None else arguments.only
    device = jax.devices()[0].device_kind
    with refusals(parser):
        if unknown := [name for name in only if name not in known]:
            raise ValueError(f"--only: unknown operation {unknown[0]!r}, expected some of {', '.join(known)}")
        results = Results(arguments.out, "kernels", {"device": device, "tiny": arguments.tiny})
    bandwidth = measure_bandwidth(2**20 if arguments.tiny else None)
    run_name = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    about = {"commit": record.commit(), "versions": record.versions(), "device": device}
    about["read_bandwidth"] = bandwidth.bytes_per_second
    results.change("runs", lambda runs: {**(runs or {}), run_name: about})
    failed = 0
    for case in chosen:
        if case.operation.name in only:
            failed += run_case(case, results, bandwidth, run_name, arguments.repeats)
    text = markdown(results.metrics, results.notes)
    record.write_bytes(arguments.out.with_suffix(".md"), text.encode())
    print(f"record: {arguments.out}")
    if failed:
        raise SystemExit(f"{failed} rows failed or are wrong; see the record")


if __name__ == "__main__":
    main()
