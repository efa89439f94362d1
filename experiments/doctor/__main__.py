"""Test this machine: versions, devices, memory, and a small run of every operation beside plain JAX on the CPU.

Each kernel that this device can run does so once, at a small size, and plain JAX where there is none. The report says which
these are and why no others, what is wrong or cannot be compiled, and which faults of JAX are seen here.
`--implementation xla` tests plain JAX instead of the kernels. Of several devices the first one is tested.

The exit code is 0 if all is right, and 1 if one is wrong or fails, or JAX finds no device.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from experiments.cli import Job

if TYPE_CHECKING:
    from experiments.doctor.small_runs import Check

_WIDTH = 120
_MORE = (
    "transformers", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "libtpu",
    "jax-triton",
)  # fmt: skip
_UNUSED = ("wonderwords",)  # no decode step depends on it
_SETTINGS = ("XLA_", "JAX_", "CUDA_VISIBLE_DEVICES")  # environment variables that change what is tested


@dataclasses.dataclass(frozen=True)
class Fault:
    """A known fault of JAX, which is looked for by what it does.

    Attributes:
        seen: tells whether it is here.
        sentence: what it is, and what to do.
        serious: whether it makes kvjax's results wrong.
    """

    seen: Callable[[], bool]
    sentence: str
    serious: bool


def _doctor() -> int:
    print("\n".join(_versions()), flush=True)
    import jax

    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        print(f"devices: JAX finds none: {error}")
        return 1
    print("\n".join(_devices(devices)), flush=True)
    try:
        faults = [fault for fault in FAULTS if fault.seen()]
    except Exception as problem:  # not even an addition runs
        from experiments.doctor.small_runs import first_line

        print(f"FAILS: a small program of JAX: {first_line(problem)}")
        return 1
    begun = time.perf_counter()
    checks = _run()
    wrong = [check for check in checks if check.problem]
    right = f"{len(checks) - len(wrong)} of {len(checks)}"
    print(f"operations: {right} right on {devices[0].device_kind}, in {time.perf_counter() - begun:.0f} s")
    known = [line for fault in faults for line in _wrapped(f"known fault: {fault.sentence}")]
    print("\n".join([*_chosen(checks), *_problems(wrong), *known]))
    return int(bool(wrong) or any(fault.serious for fault in faults))


def _versions() -> list[str]:
    from experiments.records import commit, versions
    from kvjax.version import __version__

    known = versions(_MORE)
    known.setdefault("transformers", "not installed")
    at = commit()
    head = f"kvjax {__version__}" + (f" at {at[:10]}{'+changes' * at.endswith('+changes')}" if at else "")
    found = [f"{name} {version}" for name, version in known.items() if name not in _UNUSED]
    unbroken = [text.replace(" ", "\0") for text in (head, *found)]  # a line ends between two packages
    text = f"{', '.join(unbroken)} on {platform.platform()}"
    lines = [line.replace("\0", " ") for line in _wrapped(text)]
    given = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)]
    return [*lines, *(f"set: {text}" for text in given)]


def _devices(devices: Sequence) -> list[str]:
    """Describe the devices of this process, their memory and the driver."""
    import jax

    from pallas_kernels.machine import KERNELS_FROM, current_machine

    kinds = {device.device_kind: 0 for device in devices}
    lines = []
    for kind in kinds:
        alike = [device for device in devices if device.device_kind == kind]
        stats = alike[0].memory_stats() or {}
        used = "memory not reported"
        if alike[0].platform == "cpu" and "SC_PHYS_PAGES" in os.sysconf_names:
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            used = f"{os.cpu_count()} cores, {memory / 2**30:.1f} GiB of memory"
        if "bytes_limit" in stats:
            used = f"JAX may use {stats['bytes_limit'] / 2**30:.1f} GiB of each"
        lines.append(f"devices: {len(alike)} x {kind} ({jax.default_backend()}), {used}")
    if jax.process_count() > 1:
        lines.append(f"processes: {jax.process_count()}")
    machine, cards = current_machine(), _cards()
    lines += [f"card: {card}" for card in cards]
    if cards and machine.platform == "cpu":
        lines.append("  JAX runs on the CPU beside it: pip install 'kvjax[cuda13]', or cuda12 for an older driver")
    elif machine.platform == "gpu" and not machine.has_kernels:
        need = "{}.{}".format(*KERNELS_FROM)
        lines.append(f"  kernels need an NVIDIA GPU of compute capability {need} or above, got {machine}")
    return lines


def _cards() -> list[str]:
    """Ask the driver for its cards: name, driver, memory, compute capability; none without NVIDIA's tool."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return []
    query = [tool, "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvidia-smi fails: {error}"]
    names = ("", "driver ", "", "compute capability ")
    rows = [[part.strip() for part in line.split(",")] for line in answer.splitlines()]
    return [", ".join(map("".join, zip(names, row, strict=False))) for row in rows]


def _run() -> list[Check]:
    """Check all operations, with a line on standard error that says which one it is at."""
    from experiments.doctor.small_runs import check_all

    def say(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{text:60.60s}\r", end="", file=sys.stderr, flush=True)

    checks = list(check_all(say))
    say("")
    return checks


def _chosen(checks: Sequence[Check]) -> list[str]:
    """Write which operations ran under which implementation, and why not under others."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for check in checks:
        reasons = (f"{name}: {reason}" for name, reason in check.passed_over.items())
        groups.setdefault((check.implementation, *reasons), []).append(check.operation)
    lines = []
    for (implementation, *reasons), names in sorted(groups.items(), key=lambda group: -len(group[1])):
        why = f" (not {'; not '.join(reasons)})" if reasons else ""
        text = f"{implementation}{why}: {', '.join(names)}"
        lines += _wrapped(f"  {text}", "    ")
    return lines


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _problems(wrong: Sequence[Check]) -> list[str]:
    lines = [
        f"{'FAILS' if check.failed else 'WRONG'}: {check.operation} ({check.implementation}): {check.problem}"
        for check in wrong
    ]
    if any(check.implementation != "xla" for check in wrong):
        lines.append("plain JAX runs in place of all kernels: --implementation xla, kvjax.set_default_implementation('xla')")
    return lines


def _is_old() -> bool:
    import jax

    return jax.__version_info__ < (0, 11, 2)


def _miscounts() -> bool:
    """Run a few operations of JAX one by one, each as a program of its own."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    ones = jnp.ones(4) + 1
    drawn = jax.random.uniform(jax.random.key(0), (16,))
    return not (np.all(np.asarray(ones) == 2) and abs(float(jnp.sqrt(512.0)) - 22.627) < 1e-2 and bool(jnp.all(drawn < 1)))


def _overwrites() -> bool:
    """Write a part of an array one place further on, with a reshape behind."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def shift(x: jax.Array) -> jax.Array:
        base = x + 1
        return lax.dynamic_update_slice(base, base[:3], (1, 0, 0)).reshape(1, 4, 1)

    return jax.jit(shift)(jnp.arange(4).reshape(4, 1, 1)).ravel().tolist() != [1, 1, 2, 3]


FAULTS = (
    Fault(
        _is_old,
        "kvjax needs JAX 0.11.2 or later; 0.11.0 and 0.11.1 compute wrong numbers on GPUs of compute capability 8.6 "
        "(jax-ml/jax#40633), 0.10.2 and 0.11.0 on some of 8.6 and 12.0 (jax-ml/jax#39486, #40588)",
        serious=True,
    ),
    Fault(
        _miscounts,
        "operations of JAX that run one by one are wrong here, as in jax-ml/jax#40633: take another version of JAX",
        serious=True,
    ),
    Fault(
        _overwrites,
        "XLA copies a part of an array to a place that overlaps with it wrongly, where a reshape follows "
        "(openxla/xla#49176, on CPUs); no operation of kvjax does this, code of your own may",
        serious=False,
    ),
)

main = Job(_doctor, models=True)


if __name__ == "__main__":
    raise SystemExit(main())
