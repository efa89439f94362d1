"""Compile for an accelerator that is not there, and see what the compiler made: used by test_compile_only.py.

The compilers come with JAX's wheels for the accelerators (``jax[cuda13]`` or ``jax[cuda12]``; ``jax[tpu]``); the H100 is
described by ``targets/h100_sxm.txt``, the facts XLA asks a device for, as XLA prints them on one.
"""

from __future__ import annotations

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

from pallas_kernels.dispatch import assume_platform

_FACTS = pathlib.Path(__file__).parent / "targets" / "h100_sxm.txt"
_FOR_GPU = {
    "xla_gpu_autotune_level": 0,  # there is no device to try variants of a kernel on
    "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A compile-only accelerator.

    Attributes:
        platform: as in `pallas_kernels.dispatch`.
        mesh: its devices.
        options: of the compiler.
    """

    platform: str
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
        # A new function for every call: for the same function JAX would reuse the trace that it made for another platform.
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh), assume_platform(self.platform):
            lowered = jax.jit(lambda *given: run(*given), **jit).lower(*self.place(args))
        return lowered.compile(compiler_options=self.options)


@functools.cache
def target(name: str) -> Target | str:
    """``"h100"`` or ``"tpu_v5e"``, or the reason why this machine has no such compiler."""
    if name == "h100":
        if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
            return "needs XLA's compiler for NVIDIA GPUs: jax[cuda13] or jax[cuda12]"
        try:
            topology = topologies.get_topology_desc(platform="cuda", target_config=_FACTS.read_text(), topology="1x1x1")
        except NotImplementedError:  # JAX's plugin removes itself where there is no driver
            return "needs JAX_PLATFORMS=cpu where there is no GPU"
        return Target("gpu", _mesh(topology), _FOR_GPU)
    if importlib.util.find_spec("libtpu") is None:
        return "needs XLA's compiler for TPUs: jax[tpu]"
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or it asks a cloud what machine this is
    return Target("tpu", _mesh(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")))


def _mesh(topology: Any) -> Mesh:
    return topologies.make_mesh(topology, (len(topology.devices),), ("x",))
