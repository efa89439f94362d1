"""Compile for an accelerator that is not there, and inspect the compiled program: used by the tests of this folder.

The compilers come with JAX's wheels for the accelerators (``jax[cuda13]`` or ``jax[cuda12]``; ``jax[tpu]``). A GPU is
described by a file of ``targets``, with the facts that XLA asks a device for. The H100's facts are as XLA prints them on an
H100; the facts of all other cards are from NVIDIA's data sheets.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.machine import Machine, assume_machine

GPUS = {"t4": (7, 5), "a100": (8, 0), "l4": (8, 9), "h100": (9, 0), "b200": (10, 0)}  # with their compute capabilities

_FACTS = pathlib.Path(__file__).parent / "targets"
SPILLING = "xla_gpu_fail_ptx_compilation_on_register_spilling"
_FOR_GPU = {
    "xla_gpu_autotune_level": 0,  # there is no device to try variants of a kernel on
    SPILLING: True,
}


@dataclasses.dataclass(frozen=True)
class _Card(AbstractDevice):
    """A device that is not there, with what Mosaic GPU asks a device for; without it, it assembles for 9.0."""

    compute_capability: str = ""


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
        mesh, capability = self.mesh.abstract_mesh, self.machine.capability
        if capability is not None:
            known = {field.name: getattr(mesh.abstract_device, field.name) for field in dataclasses.fields(AbstractDevice)}
            mesh = mesh.update(abstract_device=_Card(**known, compute_capability="{}.{}".format(*capability)))
        with jax.sharding.use_abstract_mesh(mesh), self.assumed():
            lowered = jax.jit(run, **jit).lower(*self.place(args))
        return lowered.compile(compiler_options=self.options)

    def assumed(self) -> contextlib.AbstractContextManager[None]:
        """A context in which calls choose as they would on this accelerator."""
        return assume_machine(self.machine.platform, self.machine.capability)


@functools.cache
def target(name: str, devices: int = 1) -> Target | str:
    """``"tpu_v5e"`` or one of `GPUS`, or the reason why this machine has no such compiler.

    Several ``devices`` are on the axis "model" of a mesh; a TPU has 1 or 8 of them.
    """
    if name in GPUS:
        if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
            return "needs XLA's compiler for NVIDIA GPUs: jax[cuda13] or jax[cuda12]"
        try:
            facts = (_FACTS / f"{name}.txt").read_text()
            topology = topologies.get_topology_desc(platform="cuda", target_config=facts, topology=f"1x1x{devices}")
        except NotImplementedError:  # JAX's plugin removes itself where there is no driver
            return "needs JAX_PLATFORMS=cpu where there is no GPU"
        return Target(Machine("gpu", GPUS[name]), _mesh(topology, devices), _FOR_GPU)
    if importlib.util.find_spec("libtpu") is None:
        return "needs XLA's compiler for TPUs: jax[tpu]"
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or it asks a cloud what machine this is
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:1x1" if devices == 1 else "v5e:2x4")
    return Target(Machine("tpu"), _mesh(topology, devices))


def _mesh(topology: Any, devices: int) -> Mesh:
    if devices == 1:
        return topologies.make_mesh(topology, (len(topology.devices),), ("x",))
    return topologies.make_mesh(topology, (1, devices), ("data", "model"))


def device_bytes(compiled: Any) -> int:
    """Bytes that a compiled program needs on each device: arguments, results that are no arguments, and temporaries."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


def launches(compiled: Any) -> list[tuple[str, str]]:
    """What the entry of a GPU program launches, in its order: the kind of instruction, and the operation it comes from."""
    entry = compiled.as_text().partition("\nENTRY ")[2]
    free = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}
    found = re.findall(r"^ +(?:ROOT )?\S+ = .*? ([a-z][\w-]*)\((.*)$", entry, re.MULTILINE)
    named = ((kind, re.search(r'op_name="([^"]*)"', rest)) for kind, rest in found if kind not in free)
    return [(kind, name[1] if name else "") for kind, name in named]


def crossing(compiled: Any, within: str = "") -> list[int]:
    """Elements of each array that a program sends between devices, in the instructions whose names have ``within``."""
    sizes: list[int] = []
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    for line in compiled.as_text().splitlines():
        found = re.search(rf"= (.*?) (?:{kinds})(-start)?\(", line)
        if found and within in line:
            shapes = [[int(n) for n in dims.split(",") if n] for dims in re.findall(r"\w\[([\d,]*)\]", found[1])]
            if found[2] and found[1].startswith("(("):  # operands, then results
                shapes = shapes[len(shapes) // 2 :]
            sizes += map(math.prod, shapes)
    return sizes
