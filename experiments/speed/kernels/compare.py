"""Checks and times every implementation of a case, and keeps the rows in a record."""

import functools
import time
from typing import Any

import jax
import numpy as np

from experiments.records import Results
from experiments.speed.device_time import loop_seconds
from experiments.speed.kernels.cases import Case, Run
from experiments.speed.kernels.report import line
from experiments.speed.roofline import Bandwidth

_SLOW = 3e-3  # seconds; a slower call is repeated fewer times


def implementations(case: Case, args: tuple) -> tuple[dict[str, Run], dict[str, str]]:
    """Find the implementations that can run a case on this platform, and why other implementations cannot.

    Args:
        case: the case.
        args: its arguments.

    Returns:
        Functions by name, in the order of the operation's table, and reasons by name.
    """
    able: dict[str, Run] = {}
    missing: dict[str, str] = {}
    for name in case.operation.table:
        run = functools.partial(case.run, implementation=name)
        try:
            jax.eval_shape(run, *args)
        except NotImplementedError as reason:
            missing[name] = str(reason).rpartition("cannot run: ")[2]
            continue
        except Exception:  # a kernel that cannot even be traced: it is run, and its row has the error
            pass
        able[name] = run
    return able, missing


def error(got: Any, want: Any) -> float:
    """Compute the largest relative error of the float arrays of a result: the norm of the difference over the norm.

    It is infinite if arrays of whole numbers or truth values differ, or if the infinite numbers of a float array do.

    Args:
        got: the result.
        want: the reference.
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


def check_form(got: Any, expected: Any) -> None:
    """Refuse a result whose arrays have other shapes or dtypes than ``expected``, or are more or fewer; ValueError."""
    forms = [[f"{x.dtype} {list(x.shape)}" for x in jax.tree.leaves(tree)] for tree in (got, expected)]
    if forms[0] != forms[1]:
        raise ValueError(f"it returned {', '.join(forms[0]) or 'no array'}, expected {', '.join(forms[1])}")


def first_wrong(got: Any, want: Any, tolerance: float) -> str:
    """Describe the first value of a result that is far from the reference, and count such values; "" if there is none."""
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        mine, other = (np.asarray(x, np.float64) for x in (mine, other))
        finite = np.isfinite(other)
        size = np.sqrt(np.mean(other[finite] ** 2)) if finite.any() else 0.0
        with np.errstate(invalid="ignore"):
            far = ~((mine == other) | (np.abs(mine - other) <= tolerance * size))
        if far.any():
            at = tuple(map(int, np.argwhere(far)[0]))
            return f"{far.sum()} of {far.size} values, first at {list(at)}: got {mine[at]:.6g}, expected {other[at]:.6g}"
    return ""


def measure(case: Case, run: Run, args: tuple, want: Any, bandwidth: Bandwidth | None, repeats: int) -> dict[str, Any]:
    """Check and time an implementation; only check it without a bandwidth.

    Args:
        case: the case.
        run: the implementation.
        args: the case's arguments.
        want: the reference.
        bandwidth: for the floor; None times nothing.
        repeats: measurements.

    Returns:
        The fields of its row.
    """
    program = jax.jit(run)
    got = program(*args)
    check_form(got, jax.eval_shape(functools.partial(case.run, implementation="xla"), *args))
    got = case.defined(got)
    off = error(got, want)
    passed = bool(off <= case.shape.timed.tolerance)
    checked = {"relative_error": off if np.isfinite(off) else None, "passed": passed, "bytes_read": case.shape.bytes_read}
    if not passed:
        checked["wrong"] = first_wrong(got, want, case.shape.timed.tolerance)
    if bandwidth is None:
        return {"value": None, "unit": "s", **checked}
    begun = time.perf_counter()
    jax.block_until_ready(program(*args))
    once = time.perf_counter() - begun
    loop = {"chain": 1, "iterations": max(1, min(20, int(0.1 / once)))} if once > _SLOW else {}
    took = loop_seconds(run, *args, repeats=repeats, **loop)
    floor = bandwidth.seconds(case.shape.bytes_read)
    return {
        "value": took.median,
        "unit": "s",
        "least": took.least,
        "most": took.most,
        "compile_seconds": took.compile,
        **checked,
        "floor": floor,
        "ratio": took.median / floor,
    }


def run_case(case: Case, results: Results, bandwidth: Bandwidth | None, run_name: str, repeats: int) -> int:
    """Measure the rows of a case that the record lacks.

    Args:
        case: the case.
        results: the record, which is written after every row.
        bandwidth: for the floors; None times nothing.
        run_name: the run that the rows name.
        repeats: measurements of each row.

    Returns:
        The number of rows that failed.
    """
    args = jax.block_until_ready(case.make())
    want, failed = None, 0
    able, missing = implementations(case, args)
    for name, reason in missing.items():
        print(f"{case.operation.name:17s} {name:24s} {case.shape.name:52s} not here: {reason}", flush=True)
    for name, run in able.items():
        identity = {"name": case.operation.name, "shape": case.shape.name, "implementation": name}
        known = results.find(identity)
        if known is not None and known["passed"]:
            print(f"{line(known)}, from the record", flush=True)
            continue
        try:
            if want is None:
                want = jax.device_get(case.expected(*args))
            row = {**identity, **measure(case, run, args, want, bandwidth, repeats), "error": None}
        except Exception as problem:  # the other rows are still wanted
            row = {**identity, "value": None, "unit": "s", "passed": False}
            row["error"] = f"{type(problem).__name__}: {problem}"[:2000]
        row |= {"run": run_name, "bandwidth": None if bandwidth is None else bandwidth.bytes_per_second}
        failed += not row["passed"]
        results.add(row, identity)
        print(line(row), flush=True)
    return failed
