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
import re
import subprocess
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.dispatch import assume_platform

_FACTS = pathlib.Path(__file__).parent / "targets" / "h100_sxm.txt"
# What XLA calls the kernels it makes itself; the rest are ours.
_BY_XLA = re.compile(r"(loop|input|gemm|wrapped|triton_softmax|fusion|transpose|dynamic|copy|scatter|sort|cub|nested)")


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
    options: dict[str, str] = dataclasses.field(default_factory=dict)

    def place(self, tree: Any) -> Any:
        """Stand-ins for the arrays of ``tree``, on the first device."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree)

    def compile(self, run: Callable[..., Any], *args: Any, dump: pathlib.Path | None = None, **jit: Any) -> Any:
        """``jax.jit(run, **jit)`` of stand-ins, compiled; a GPU's kernels are written into ``dump``."""
        options = {**self.options}
        if dump is not None:
            options |= {"xla_dump_to": str(dump), "xla_dump_emitter_re": ".*"}
        # A function of its own: JAX would take the trace of an equal one, made for another platform.
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh), assume_platform(self.platform):
            lowered = jax.jit(lambda *given: run(*given), **jit).lower(*self.place(args))
        return lowered.compile(compiler_options=options)


@functools.cache
def target(name: str) -> Target | str:
    """``"h100"`` or ``"tpu_v5e"``, or why it cannot be had."""
    if name == "h100":
        if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
            return "needs XLA's compiler for NVIDIA GPUs: jax[cuda13] or jax[cuda12]"
        try:
            topology = topologies.get_topology_desc(platform="cuda", target_config=_FACTS.read_text(), topology="1x1x1")
        except NotImplementedError:  # JAX's plugin found no driver and took itself away
            return "needs JAX_PLATFORMS=cpu where there is no GPU"
        # There is no device to try variants of a kernel on.
        return Target("gpu", _mesh(topology), {"xla_gpu_autotune_level": "0"})
    if importlib.util.find_spec("libtpu") is None:
        return "needs XLA's compiler for TPUs: jax[tpu]"
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or it asks a cloud what machine this is
    return Target("tpu", _mesh(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")))


def _mesh(topology: Any) -> Mesh:
    return topologies.make_mesh(topology, (len(topology.devices),), ("x",))


def ptxas() -> pathlib.Path | None:
    """NVIDIA's assembler out of its wheels, if it is there."""
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else [pathlib.Path(place) for place in spec.submodule_search_locations]
    return next((found for place in places for found in sorted(place.glob("*/bin/ptxas"))), None)


def spills(dump: pathlib.Path, assembler: pathlib.Path) -> dict[str, int]:
    """Bytes of registers spilled to memory by each of our kernels whose PTX is in ``dump``."""
    found = {}
    for file in sorted(dump.glob("*.ptx")):
        entry = re.search(r"\.entry (\w+)\(", file.read_text())
        if entry is None or _BY_XLA.match(entry[1]):
            continue
        command = [assembler, "-v", "-arch=sm_90a", "-o", os.devnull, file]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        found[entry[1]] = sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
    return found
