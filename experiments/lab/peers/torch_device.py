"""What the jobs share that measure PyTorch programs: the device, presses of kvpress; torch is imported only when one asks."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.records import Results, commit, versions
from experiments.speed.rows import note_run, now

if TYPE_CHECKING:
    import torch

_SHOWN = ("torch", "transformers", "kvpress", "flash-attn")
PACKAGES = (*_SHOWN, "triton")  # whose versions a record holds


class MissingPeerError(Exception):
    """A peer is not installed, or cannot be imported."""


def check_torch(job: str, packages: str) -> None:
    """Refuse to go on without torch and transformers.

    Args:
        job: the module that needs them.
        packages: what to install.

    Raises:
        ModuleNotFoundError: torch or transformers is not installed.
    """
    for name in ("torch", "transformers"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{job} needs {name}, which is not installed here: pip install {packages}") from error


def the_device() -> torch.device:
    """Return the GPU of torch, or the CPU if torch has no GPU."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def describe_device(device: torch.device) -> dict[str, Any]:
    """Describe a device as records do."""
    import torch

    if device.type == "cpu":
        return {"platform": "cpu", "kind": "cpu", "count": 1}
    return {"platform": "gpu", "kind": torch.cuda.get_device_name(device), "count": 1}


def begin_run(results: Results, device: torch.device) -> str:
    """Write into a record what this process runs on; return the name of the run."""
    run = now()
    about = {"commit": commit(), "versions": versions(PACKAGES), "device": describe_device(device)["kind"]}
    note_run(results, run, about)
    return run


def free_memory(device: torch.device) -> None:
    """Give the memory of what is no longer used back to the device."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def make_press(name: str, length: int, budget: int) -> Any:
    """Make a press with kvpress's defaults, which keeps ``budget`` of ``length`` tokens.

    kvpress wraps the attention functions of transformers when it is imported, so rows without it run first.

    Raises:
        MissingPeerError: kvpress cannot be imported.
        ValueError: the prompt has no more tokens than the budget.
    """
    try:
        import kvpress
    except ModuleNotFoundError as error:
        if error.name == "kvpress":
            raise MissingPeerError("kvpress is not installed: pip install kvpress") from error
        raise MissingPeerError(f"kvpress needs {error.name}, which is not installed") from error
    except ImportError as error:
        raise MissingPeerError(f"kvpress cannot be imported: {error}") from error
    if length <= budget:
        raise ValueError(f"a prompt must have more tokens than the budget of {budget}, got {length}")
    # kvpress keeps int(length * (1 - ratio)) tokens; the half makes this the budget, however the products are rounded.
    return getattr(kvpress, name)(compression_ratio=1 - (budget + 0.5) / length)


def run_line(run: str, about: Mapping[str, Any]) -> str:
    """Format a line about a run on PyTorch, which stands below a table."""
    known = ", ".join(f"{name} {about['versions'][name]}" for name in _SHOWN if name in about["versions"])
    return f"Run {run}: {about['device']}, {known}, commit {about['commit']}."
