"""Variants of sums over devices: a way to sum, options of the compiler, and variables that NCCL reads when it starts.

`experiments.collectives` times each of them alone. `experiments.speed --sums` times decode steps and prompts under those
whose variables the process was started with.

XLA captures the kernels of a program in CUDA graphs, which it calls command buffers. By default (jaxlib 0.11 and 0.12)
neither collectives nor loops are captured: each sum ends a graph, and the host starts the next one. Options whose value is a
list replace XLA's default list.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.stages import Compiled

from pallas_kernels import axes

_CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION"  # XLA's default
_NCCL = {"xla_gpu_experimental_use_collective_kernels": ""}  # none of XLA's own kernels
_ONE_SHOT = {"xla_gpu_experimental_use_collective_kernels": "COLLECTIVE_KERNEL_ALL_REDUCE"}
_GRAPH = {"xla_gpu_enable_command_buffer": f"{_CAPTURED},COLLECTIVES"}
_OPEN = {"xla_gpu_enable_command_buffer": f"{_CAPTURED.replace('CONDITIONAL,', '')},COLLECTIVES"}
_LOOP = {"xla_gpu_enable_command_buffer": f"{_CAPTURED},COLLECTIVES,WHILE"}
_ONE_STREAM = {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"}
_SYMMETRIC = {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True}
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0"}  # NCCL may use NVLink's multicast on memory that is registered: it is not measured


@dataclasses.dataclass(frozen=True)
class SumVariant:
    """A way to sum over devices, and how it is compiled and run.

    Attributes:
        about: a few words.
        sum: the way, of `pallas_kernels.sums.SUMS`.
        options: of XLA's compiler, for a program.
        environment: variables of a process that must be set before it starts.
    """

    about: str
    sum: str = "psum"
    options: Mapping[str, str | bool | int] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


SUM_VARIANTS = {
    "xla": SumVariant("as XLA does it"),
    "no-graph": SumVariant("nothing in CUDA graphs", options={"xla_gpu_enable_command_buffer": ""}),
    "nccl": SumVariant("NCCL, never XLA's own kernel", options=_NCCL),
    "nccl-one-stream": SumVariant("NCCL, on the stream of the other kernels", options=_NCCL | _ONE_STREAM),
    "nccl-graph": SumVariant("NCCL, in the CUDA graph", options=_NCCL | _GRAPH),
    "nccl-graph-open": SumVariant("the same, conditions outside of the graph", options=_NCCL | _OPEN),
    "nccl-loop": SumVariant("NCCL, the whole loop a CUDA graph", options=_NCCL | _LOOP),
    "nccl-loop-one-stream": SumVariant("the same, on one stream", options=_NCCL | _LOOP | _ONE_STREAM),
    "one-shot": SumVariant("XLA's one-shot kernel", options=_ONE_SHOT),
    "one-shot-one-stream": SumVariant("the same, on one stream", options=_ONE_SHOT | _ONE_STREAM),
    "one-shot-loop": SumVariant("XLA's one-shot kernel, the loop a CUDA graph if it can be", options=_ONE_SHOT | _LOOP),
    "one-shot-graph": SumVariant("XLA's one-shot kernel in the CUDA graph, conditions outside", options=_ONE_SHOT | _OPEN),
    "symmetric": SumVariant("NCCL with symmetric buffers", "psum", _NCCL | _SYMMETRIC, _NO_MULTICAST),
    "symmetric-graph": SumVariant(
        "the same, in the CUDA graph, conditions outside", "psum", _NCCL | _OPEN | _SYMMETRIC, _NO_MULTICAST
    ),
    "symmetric-ll-graph": SumVariant(
        "the same, whose kernel sends every part whole",
        "psum",
        _NCCL | _OPEN | _SYMMETRIC,
        _NO_MULTICAST | {"NCCL_SYM_KERNEL": "AllReduce_AGxLL_R"},
    ),
    "symmetric-loop": SumVariant("the same, the loop a CUDA graph", "psum", _NCCL | _LOOP | _SYMMETRIC, _NO_MULTICAST),
    "user-buffers": SumVariant(
        "NCCL with registered buffers", "psum", _NCCL | {"xla_gpu_enable_nccl_user_buffers": True}, _NO_MULTICAST
    ),
    "ll-loop": SumVariant("nccl-loop with NCCL's protocol LL", "psum", _NCCL | _LOOP, {"NCCL_PROTO": "LL"}),
    "ll128-loop": SumVariant("the same with LL128", "psum", _NCCL | _LOOP, {"NCCL_PROTO": "LL128"}),
    "ring-loop": SumVariant("nccl-loop with NCCL's rings", "psum", _NCCL | _LOOP, {"NCCL_ALGO": "Ring"}),
    "tree-loop": SumVariant("nccl-loop with NCCL's trees", "psum", _NCCL | _LOOP, {"NCCL_ALGO": "Tree"}),
    "gather": SumVariant("all parts gathered, added by each", "gather"),
    "gather-loop": SumVariant("the same, the loop a CUDA graph", "gather", _LOOP),
    "scatter": SumVariant("a share of the sum on each, then gathered", "scatter"),
    "scatter-loop": SumVariant("the same, the loop a CUDA graph", "scatter", _LOOP),
    "permute": SumVariant("parts sent round, added by each", "permute"),
    "permute-loop": SumVariant("the same, the loop a CUDA graph", "permute", _LOOP),
    "permute-copy": SumVariant("sent by copies between GPUs", "permute", {"xla_gpu_use_memcpy_local_p2p": True}),
    "permute-peer": SumVariant(
        "sent by copies to peer memory", "permute", {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
    ),
    "permute-peer-loop": SumVariant(
        "the same, the loop a CUDA graph", "permute", _LOOP | {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
    ),
    "permute-put-loop": SumVariant(
        "one-sided sends, the loop a CUDA graph",
        "permute",
        _LOOP | {"xla_gpu_collective_permute_mode": "COLLECTIVES_SYMMETRIC_MEMORY"},
        _NO_MULTICAST,
    ),
    "peer": SumVariant("a Pallas kernel that reads peer memory", "peer"),
    "peer-loop": SumVariant("the same, the loop a CUDA graph", "peer", _LOOP),
}


def check_sums(name: str) -> None:
    """Refuse what is no variant, or one whose variables this process was not started with.

    Raises:
        ValueError: such a variant.
    """
    if name not in SUM_VARIANTS:
        raise ValueError(f"unknown sum {name!r}, expected one of {', '.join(SUM_VARIANTS)}")
    missing = {key: value for key, value in SUM_VARIANTS[name].environment.items() if os.environ.get(key) != value}
    if missing:
        told = " ".join(f"{key}={value}" for key, value in missing.items())
        raise ValueError(f"the sum {name!r} needs a process with {told}: set it before the command")


def compiled(run: Callable[..., Any], *args: Any, sums: str | None = None, **jit: Any) -> tuple[Compiled, float]:
    """A program for its arguments, and the seconds until it was ready.

    Args:
        run: what it runs.
        *args: its arguments.
        sums: a variant, by whose way sums over devices are traced, and with whose options the program is compiled.
        **jit: further arguments of `jax.jit`.
    """
    variant = SUM_VARIANTS[sums or "xla"]
    begun = time.perf_counter()
    with axes.summed_by(variant.sum):
        lowered = jax.jit(run, **jit).lower(*args)
    return lowered.compile(compiler_options=dict(variant.options)), time.perf_counter() - begun


def instructions(program: Compiled) -> dict[str, int]:
    """How often a compiled program has each kind of collective; after a colon, the kernel that XLA chose for it."""
    kinds = "all-reduce|all-gather|reduce-scatter|collective-permute|mosaic_gpu_v2"
    found: dict[str, int] = {}
    for line in program.as_text().splitlines():
        kind = re.search(rf" ({kinds})(?:-start)?\(|custom_call_target=\"({kinds})\"", line)
        if kind:
            chosen = re.search(r"\"kernel_strategy\":\"KERNEL_STRATEGY_(\w+)\"", line)
            name = (kind[1] or kind[2]) + (f": {chosen[1]}" if chosen and chosen[1] != "DEFAULT" else "")
            found[name] = found.get(name, 0) + 1
    return found
