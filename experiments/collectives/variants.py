"""The variants that are timed: a way to sum, options of the compiler, and variables that NCCL reads when it starts.

XLA captures the kernels of a program in CUDA graphs, which it calls command buffers. By default (jaxlib 0.11 and 0.12)
neither collectives nor loops are captured: each sum ends a graph, and the host starts the next one. Options whose value is a
list replace XLA's default list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

_CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION"  # XLA's default
_NCCL = {"xla_gpu_experimental_use_collective_kernels": ""}  # none of XLA's own kernels
_ONE_SHOT = {"xla_gpu_experimental_use_collective_kernels": "COLLECTIVE_KERNEL_ALL_REDUCE"}
_GRAPH = {"xla_gpu_enable_command_buffer": f"{_CAPTURED},COLLECTIVES"}
_LOOP = {"xla_gpu_enable_command_buffer": f"{_CAPTURED},COLLECTIVES,WHILE"}
_ONE_STREAM = {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"}
_SYMMETRIC = {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True}


@dataclasses.dataclass(frozen=True)
class Variant:
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


VARIANTS = {
    "xla": Variant("as XLA does it"),
    "no-graph": Variant("nothing in CUDA graphs", options={"xla_gpu_enable_command_buffer": ""}),
    "nccl": Variant("NCCL, never XLA's own kernel", options=_NCCL),
    "nccl-one-stream": Variant("NCCL, on the stream of the other kernels", options=_NCCL | _ONE_STREAM),
    "nccl-graph": Variant("NCCL, in the CUDA graph", options=_NCCL | _GRAPH),
    "nccl-loop": Variant("NCCL, the whole loop a CUDA graph", options=_NCCL | _LOOP),
    "nccl-loop-one-stream": Variant("the same, on one stream", options=_NCCL | _LOOP | _ONE_STREAM),
    "one-shot": Variant("XLA's one-shot kernel", options=_ONE_SHOT),
    "one-shot-one-stream": Variant("the same, on one stream", options=_ONE_SHOT | _ONE_STREAM),
    "one-shot-loop": Variant("XLA's one-shot kernel, the loop a CUDA graph if it can be", options=_ONE_SHOT | _LOOP),
    "symmetric": Variant("NCCL with symmetric buffers", options=_NCCL | _SYMMETRIC),
    "symmetric-loop": Variant("the same, the loop a CUDA graph", options=_NCCL | _LOOP | _SYMMETRIC),
    "user-buffers": Variant("NCCL with registered buffers", options=_NCCL | {"xla_gpu_enable_nccl_user_buffers": True}),
    "ll-loop": Variant("NCCL's protocol LL, the loop a CUDA graph", options=_NCCL | _LOOP, environment={"NCCL_PROTO": "LL"}),
    "ll128-loop": Variant("the same with LL128", options=_NCCL | _LOOP, environment={"NCCL_PROTO": "LL128"}),
    "ring-loop": Variant("NCCL's rings, the loop a CUDA graph", options=_NCCL | _LOOP, environment={"NCCL_ALGO": "Ring"}),
    "tree-loop": Variant("NCCL's trees, the loop a CUDA graph", options=_NCCL | _LOOP, environment={"NCCL_ALGO": "Tree"}),
    "gather": Variant("all parts gathered, added by each", "gather"),
    "gather-loop": Variant("the same, the loop a CUDA graph", "gather", _LOOP),
    "scatter": Variant("a share of the sum on each, then gathered", "scatter"),
    "scatter-loop": Variant("the same, the loop a CUDA graph", "scatter", _LOOP),
    "permute": Variant("parts sent round, added by each", "permute"),
    "permute-loop": Variant("the same, the loop a CUDA graph", "permute", _LOOP),
    "permute-copy": Variant("sent by copies between GPUs", "permute", {"xla_gpu_use_memcpy_local_p2p": True}),
    "permute-peer": Variant(
        "sent by copies to peer memory", "permute", {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
    ),
    "permute-peer-loop": Variant(
        "the same, the loop a CUDA graph", "permute", _LOOP | {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
    ),
    "permute-put-loop": Variant(
        "one-sided sends, the loop a CUDA graph",
        "permute",
        _LOOP | {"xla_gpu_collective_permute_mode": "COLLECTIVES_SYMMETRIC_MEMORY"},
    ),
    "peer": Variant("a Pallas kernel that reads peer memory", "peer"),
    "peer-loop": Variant("the same, the loop a CUDA graph", "peer", _LOOP),
}
