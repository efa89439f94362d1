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


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A run of a kernel in a trace.

    Attributes:
        name: of the kernel.
        start, seconds: in the trace's time.
        instruction: the instruction of the compiled program, "" if the trace does not tell it.
        about: what else the trace tells of it, such as the scopes in which it was traced.
    """

    name: str
    start: float
    seconds: float
    instruction: str
    about: str


def read_trace(folder: pathlib.Path) -> list[KernelTimes]:
    """Sum the kernels of each device in the newest trace that `jax.profiler.trace` wrote into a folder.

    Raises:
        FileNotFoundError: the folder has no trace.
    """
    return [total_times(device, kernels) for device, kernels in read_kernels(folder).items()]


def read_kernels(folder: pathlib.Path) -> dict[str, list[Kernel]]:
    """Read the kernels of each device in the newest trace that `jax.profiler.trace` wrote into a folder, in their order.

    Raises:
        FileNotFoundError: the folder has no trace.
    """
    found = sorted(folder.glob("plugins/profile/*/*.trace.json.gz"))
    if not found:
        raise FileNotFoundError(f"expected plugins/profile/*/*.trace.json.gz in {folder}, got no such file")
    return kernels_of(json.loads(gzip.decompress(found[-1].read_bytes()))["traceEvents"])


def kernel_times(events: Iterable[Mapping[str, Any]]) -> list[KernelTimes]:
    """Sum the kernels of each device, see `kernels_of`."""
    return [total_times(device, kernels) for device, kernels in kernels_of(events).items()]


def kernels_of(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Kernel]]:
    """Collect the kernels of each device, from the events of a trace in Chrome's format, whose times are microseconds.

    Kernels are the events of threads whose name begins with "Stream", in processes named after a device.
    """
    events = list(events)
    named = [x for x in events if x.get("ph") == "M"]
    devices = {
        x["pid"]: x["args"]["name"] for x in named if x["name"] == "process_name" and "/device:" in x["args"]["name"]
    }
    streams = {
        (x["pid"], x["tid"]) for x in named if x["name"] == "thread_name" and x["args"]["name"].startswith("Stream")
    }
    ran: dict[int, list[Kernel]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event["pid"] in devices and (event["pid"], event["tid"]) in streams:
            ran[event["pid"]].append(_kernel(event))
    return {devices[pid]: sorted(ran[pid], key=lambda x: x.start) for pid in sorted(ran)}


def _kernel(event: Mapping[str, Any]) -> Kernel:
    told = event.get("args", {})
    about = " ".join(str(told[name]) for name in ("tf_op", "name", "long_name") if name in told)
    return Kernel(event["name"], event["ts"] / 1e6, event["dur"] / 1e6, str(told.get("hlo_op", "")), about)


def total_times(name: str, ran: Sequence[Kernel]) -> KernelTimes:
    """Sum the kernels of a device, which are in their order."""
    kernels: dict[str, tuple[int, float]] = {}
    busy, end = 0.0, ran[0].start
    for one in ran:
        count, seconds = kernels.get(one.name, (0, 0.0))
        kernels[one.name] = count + 1, seconds + one.seconds
        last = one.start + one.seconds
        busy += max(0.0, last - max(end, one.start))
        end = max(end, last)
    longest = dict(sorted(kernels.items(), key=lambda x: -x[1][1]))
    return KernelTimes(name, end - ran[0].start, busy, longest)
