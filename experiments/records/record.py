"""The JSON record of a measurement: settings, versions, device, commit, date, metrics with units."""

import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from pallas_kernels.dispatch import get_default_implementation

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "safetensors", "tokenizers", "wonderwords")
_KEPT = 50  # characters of a file's name in its draft's name: a longer name would be too long with more letters


@functools.cache  # a record is written after every cell
def commit() -> str | None:
    """Return the commit of this checkout, with "+changes" if tracked files differ from it; None outside a repository."""
    here = pathlib.Path(__file__).resolve().parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"], cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


@functools.cache
def versions(more: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the versions of Python and of the installed packages that a result depends on, `PACKAGES` and ``more``."""
    known = {"python": platform.python_version()}
    for name in (*PACKAGES, *more):
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known


def operations() -> dict[str, str]:
    """Return how a run was asked to run its models' operations: {"implementation": name}, or {} without such a request."""
    name = get_default_implementation()
    return {"implementation": name} if name else {}


def make_record(
    experiment: str, settings: dict[str, Any], metrics: Sequence[dict[str, Any]], *, packages: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Make a record of metrics with "name", "value" and "unit" each, with versions, device, commit and date.

    JSON values. ``packages`` are further ones whose versions are kept.
    """
    for metric in metrics:
        missing = {"name", "value", "unit"} - metric.keys()
        if missing:
            raise ValueError(f"metric {metric} lacks {sorted(missing)}, expected name, value and unit")
    devices = jax.devices()
    device = {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
    return {
        "experiment": experiment,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(packages),
        "device": {**device, "cpu_cores": os.cpu_count(), **operations()},
        "settings": settings,
        "metrics": list(metrics),
    }


def device_kinds(record: Mapping[str, Any]) -> list[str]:
    """Return the kinds of devices that made a record's metrics, oldest first; [] if the record names no device."""
    device = record.get("device")
    known = [device["kind"]] if isinstance(device, dict) and device.get("kind") else []
    return [str(kind) for kind in record.get("devices") or known]


def write_record(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Write a record atomically: afterwards the file is complete or unchanged.

    Values that JSON cannot express are refused.
    """
    write_bytes(path, (json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n").encode())


def write_bytes(path: pathlib.Path, data: bytes) -> None:
    """Write a file atomically, whose directory is made. What a link names is replaced; a pipe or a device is written to."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:_KEPT]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)  # mkstemp makes files that nobody else may read
        os.replace(name, path)
    except BaseException as error:
        pathlib.Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # the error of a full disk names no file
            error.filename = str(path)
        raise
