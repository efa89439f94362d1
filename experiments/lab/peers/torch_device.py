"""The device of the jobs that measure PyTorch programs; torch is imported only when one of them asks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


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
            raise ModuleNotFoundError(
                f"{job} needs {name}, which is not installed here: pip install {packages}"
            ) from error


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
