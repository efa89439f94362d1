"""Variants of sums over devices: options of the compiler, and variables that NCCL reads when it starts.

`experiments.speed --sums` times decode steps and prefill under the variants whose variables the process was started with.

XLA captures the kernels of a program in CUDA graphs, which it calls command buffers. By default (jaxlib 0.11 and 0.12)
neither collectives nor loops are captured: each sum ends a graph, and the host starts the next one. Options whose value is a
list replace XLA's default list.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.stages import Compiled

_CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION"  # XLA's default
_NCCL = {"xla_gpu_experimental_use_collective_kernels": ""}  # none of XLA's own kernels
_GRAPH = {"xla_gpu_enable_command_buffer": f"{_CAPTURED},COLLECTIVES"}
_OPEN = {"xla_gpu_enable_command_buffer": f"{_CAPTURED.replace('CONDITIONAL,', '')},COLLECTIVES"}
_SYMMETRIC = {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True}
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0"}  # NCCL may use NVLink's multicast on memory that is registered: it is not measured


@dataclasses.dataclass(frozen=True)
class SumVariant:
    """How a program with sums over devices is compiled and run.

    Attributes:
        options: of XLA's compiler, for a program.
        environment: variables of a process that must be set before it starts.
    """

    options: Mapping[str, str | bool] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


SUM_VARIANTS = {
    "xla": SumVariant(),  # as XLA does it
    "nccl-graph": SumVariant(_NCCL | _GRAPH),  # NCCL's sums, in the CUDA graph
    "nccl-graph-open": SumVariant(_NCCL | _OPEN),  # the same, with conditions outside of the graph
    "symmetric-graph": SumVariant(_NCCL | _OPEN | _SYMMETRIC, _NO_MULTICAST),  # the same, on buffers of the same address
}


def check_sums(name: str) -> None:
    """Refuse an unknown variant, and a variant whose variables this process was not started with.

    Raises:
        ValueError: such a variant.
    """
    if name not in SUM_VARIANTS:
        raise ValueError(f"unknown sum {name!r}, expected one of {', '.join(SUM_VARIANTS)}")
    missing = {key: value for key, value in SUM_VARIANTS[name].environment.items() if os.environ.get(key) != value}
    if missing:
        variables = " ".join(f"{key}={value}" for key, value in missing.items())
        raise ValueError(f"the sum {name!r} needs a process with {variables}: set it before the command")


def compiled(run: Callable[..., Any], *args: Any, sums: str | None = None, **jit: Any) -> tuple[Compiled, float]:
    """Compile a program for its arguments, and measure the seconds until it is ready.

    Args:
        run: the function to compile.
        *args: its arguments.
        sums: the variant whose options the program is compiled with; None takes "xla".
        **jit: further arguments of `jax.jit`.
    """
    variant = SUM_VARIANTS[sums or "xla"]
    begun = time.perf_counter()
    lowered = jax.jit(run, **jit).lower(*args)
    return lowered.compile(compiler_options=dict(variant.options)), time.perf_counter() - begun
