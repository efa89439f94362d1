"""The machine that a program is traced for: its platform, and the compute capability of NVIDIA GPUs.

Kernels for GPUs need an NVIDIA GPU of compute capability 8.0 (Ampere) or above: Triton has no bfloat16 products for older
ones, and cuDNN no fused attention. Pallas' Triton back end also lowers for AMD's GPUs, but nobody has run these kernels
there. TPUs have kernels of their own, which nobody has run on one yet either.
"""

import contextlib
import dataclasses
import functools
import importlib
import logging
import re
from collections.abc import Iterator
from typing import Any

import jax

KERNELS_FROM = (8, 0)  # the oldest compute capability that kernels run on

# Shared memory that one program may have, in KiB, by compute capability: table "Technical Specifications per Compute
# Capability" of NVIDIA's CUDA programming guide, "maximum amount of shared memory per thread block".
_SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99}
_LEAST_SHARED_KIB = 99  # the least of all GPUs that kernels run on

# Modules of JAX that kernels are written with. They are experimental, and Triton's is deprecated: JAX may come without them.
PALLAS = "jax.experimental.pallas"
PALLAS_TRITON = "jax.experimental.pallas.triton"
PALLAS_MOSAIC_GPU = "jax.experimental.pallas.mosaic_gpu"
PALLAS_TPU = "jax.experimental.pallas.tpu"

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the choice of an implementation depends on.

    Attributes:
        platform: "cpu", "gpu" or "tpu", as in ``jax.default_backend()``.
        capability: compute capability of an NVIDIA GPU; None for other machines.
    """

    platform: str
    capability: tuple[int, int] | None = None

    @property
    def has_kernels(self) -> bool:
        """Whether kernels run there."""
        return self.platform == "gpu" and self.capability is not None and self.capability >= KERNELS_FROM

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that one program may have; for an unknown GPU, the least that any GPU with kernels has."""
        return _SHARED_KIB.get(self.capability or KERNELS_FROM, _LEAST_SHARED_KIB) * 1024

    def __str__(self) -> str:
        if self.platform != "gpu":
            return {"cpu": "a CPU", "tpu": "a TPU"}.get(self.platform, self.platform)
        if self.capability is None:
            return "a GPU that is not NVIDIA's"
        return "an NVIDIA GPU of compute capability {}.{}".format(*self.capability)


# A value of this kind is part of the key of every trace and program that JAX keeps.
_ASSUMED = jax.make_user_context(None)


def current_machine() -> Machine:
    """Return the machine that a call traced now runs on: the assumed one, see `assume_machine`, or of `default_platform`.

    Of several GPUs in a process the least capable one counts.
    """
    return _ASSUMED.value or _present(default_platform())


def default_platform() -> str:
    """Return the platform where JAX puts arrays: of ``jax.default_device``, or else of the default backend."""
    device = jax.config.jax_default_device
    return jax.default_backend() if device is None else getattr(device, "platform", device)


def _present(platform: str) -> Machine:
    if platform != "gpu":
        return Machine(platform)
    try:
        texts = [device.compute_capability for device in jax.local_devices()]
    except AttributeError:  # a GPU without one
        return Machine(platform)
    found = [re.match(r"(\d+)\.(\d+)", text) for text in texts]  # AMD's GPUs answer with a name such as gfx942
    if not all(found):
        return Machine(platform)
    return Machine(platform, min((int(match[1]), int(match[2])) for match in found if match))


@contextlib.contextmanager
def assume_machine(platform: str, capability: tuple[int, int] | None = None) -> Iterator[None]:
    """Assume another machine within this context: calls choose implementations as they would there.

    It serves to compile ahead of time for an accelerator that this process does not have. Programs that JAX has traced
    outside of the context are not used inside, and the other way round.

    Args:
        platform: "cpu", "gpu" or "tpu".
        capability: compute capability of an NVIDIA GPU, such as (9, 0) for an H100; None for other machines.
    """
    with _ASSUMED(Machine(platform, capability)):
        yield


@functools.cache
def why_missing(module: str) -> str | None:
    """Say why a module of JAX cannot be imported; None if it can."""
    try:
        importlib.import_module(module)
    except (ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def back_end(module: str) -> Any:
    """Import a module of JAX, or return a stand-in, with which kernels can be defined but not called."""
    return _Missing(module) if why_missing(module) else importlib.import_module(module)


@dataclasses.dataclass(frozen=True)
class _Missing:
    """Stands for a module that cannot be imported. All that it is asked for raises ``NotImplementedError``."""

    module: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python itself asks
            raise AttributeError(name)
        raise NotImplementedError(f"needs {self.module}.{name}, got {why_missing(self.module)}")


@functools.cache
def say_once(text: str) -> None:
    """Warn in the log, once per process for each ``text``."""
    _LOG.warning(text)
