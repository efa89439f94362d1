"""The time of each kernel, read from a trace of JAX's profiler."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class KernelTimes:
    """The kernels of a device in a trace.

    Attributes:
        device: its name, such as "/device:GPU:0".
        span: seconds from the start of the first kernel to the end of the last.
        busy: seconds in which at least one kernel ran.
        kernels: by name, how often the kernel ran and the sum of its seconds; the longest first.
    """

    device: str
    span: float
    busy: float
    kernels: Mapping[str, tuple[int, float]]


def read_trace(folder: pathlib.Path) -> list[KernelTimes]:
    """Read the kernels of each device in the newest trace that `jax.profiler.trace` wrote into a folder.

    Raises:
        FileNotFoundError: the folder has no trace.
    """
    found = sorted(folder.glob("plugins/profile/*/*.trace.json.gz"))
    if not found:
        raise FileNotFoundError(f"expected plugins/profile/*/*.trace.json.gz in {folder}, got no such file")
    return kernel_times(json.loads(gzip.decompress(found[-1].read_bytes()))["traceEvents"])


def kernel_times(events: Iterable[Mapping[str, Any]]) -> list[KernelTimes]:
    """Collect the kernels of each device, from the events of a trace in Chrome's format, whose times are microseconds.

    Kernels are the events of threads whose name begins with "Stream", in processes named after a device.
    """
    events = list(events)
    named = [x for x in events if x.get("ph") == "M"]
    devices = {x["pid"]: x["args"]["name"] for x in named if x["name"] == "process_name" and "/device:" in x["args"]["name"]}
    streams = {(x["pid"], x["tid"]) for x in named if x["name"] == "thread_name" and x["args"]["name"].startswith("Stream")}
    ran: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event["pid"] in devices and (event["pid"], event["tid"]) in streams:
            ran[event["pid"]].append(event)
    return [_of_device(devices[pid], sorted(ran[pid], key=lambda x: x["ts"])) for pid in sorted(ran)]


def _of_device(name: str, ran: Sequence[Mapping[str, Any]]) -> KernelTimes:
    kernels: dict[str, tuple[int, float]] = {}
    busy, end = 0.0, ran[0]["ts"]
    for event in ran:
        count, seconds = kernels.get(event["name"], (0, 0.0))
        kernels[event["name"]] = count + 1, seconds + event["dur"] / 1e6
        last = event["ts"] + event["dur"]
        busy += max(0.0, last - max(end, event["ts"]))
        end = max(end, last)
    longest = dict(sorted(kernels.items(), key=lambda x: -x[1][1]))
    return KernelTimes(name, (end - ran[0]["ts"]) / 1e6, busy / 1e6, longest)
