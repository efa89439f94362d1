"""Compile for an accelerator that is not there, and see what the compiler made: used by test_compile_only.py.

The compilers come with JAX's wheels for the accelerators (``jax[cuda13]`` or ``jax[cuda12]``; ``jax[tpu]``). A GPU is
described by a file of ``targets``, the facts XLA asks a device for: those of the H100 are as XLA prints them on one, those of
the other cards are from NVIDIA's data sheets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.machine import Machine, assume_machine

GPUS = {"t4": (7, 5), "a100": (8, 0), "l4": (8, 9), "h100": (9, 0)}  # with their compute capabilities

_FACTS = pathlib.Path(__file__).parent / "targets"
_FOR_GPU = {
    "xla_gpu_autotune_level": 0,  # there is no device to try variants of a kernel on
    "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A compile-only accelerator.

    Attributes:
        machine: as in `pallas_kernels.machine`.
        mesh: its devices.
        options: of the compiler.
    """

    machine: Machine
    mesh: Mesh
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def place(self, tree: Any) -> Any:
        """Stand-ins for the arrays of ``tree``, or for their types; a type may say that its array is in host memory."""

        def one(x: Any) -> jax.ShapeDtypeStruct:
            hosted = getattr(x, "memory_space", None) == jax.memory.Space.Host
            where = NamedSharding(self.mesh, PartitionSpec(), memory_kind="pinned_host" if hosted else "device")
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

        return jax.tree.map(one, tree)

    def compile(self, run: Callable[..., Any], *args: Any, **jit: Any) -> Any:
        """``jax.jit(run, **jit)`` of stand-ins, compiled.

        Raises:
            jax.errors.JaxRuntimeError: it does not compile, or a GPU kernel spills registers to memory.
        """
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh), self.assumed():
            lowered = jax.jit(run, **jit).lower(*self.place(args))
        return lowered.compile(compiler_options=self.options)

    def assumed(self) -> contextlib.AbstractContextManager[None]:
        """A context in which calls choose as they would on this accelerator."""
        return assume_machine(self.machine.platform, self.machine.capability)


@functools.cache
def target(name: str) -> Target | str:
    """``"tpu_v5e"`` or one of `GPUS`, or the reason why this machine has no such compiler."""
    if name in GPUS:
        if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
            return "needs XLA's compiler for NVIDIA GPUs: jax[cuda13] or jax[cuda12]"
        try:
            facts = (_FACTS / f"{name}.txt").read_text()
            topology = topologies.get_topology_desc(platform="cuda", target_config=facts, topology="1x1x1")
        except NotImplementedError:  # JAX's plugin removes itself where there is no driver
            return "needs JAX_PLATFORMS=cpu where there is no GPU"
        return Target(Machine("gpu", GPUS[name]), _mesh(topology), _FOR_GPU)
    if importlib.util.find_spec("libtpu") is None:
        return "needs XLA's compiler for TPUs: jax[tpu]"
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or it asks a cloud what machine this is
    return Target(Machine("tpu"), _mesh(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")))


def _mesh(topology: Any) -> Mesh:
    return topologies.make_mesh(topology, (len(topology.devices),), ("x",))
