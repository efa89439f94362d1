#!/usr/bin/env bash
# Pallas Mosaic GPU: a process that compiles ahead of time assembles all kernels for the first card that it compiled for
#
# One would guess: a kernel compiled for a described card is assembled for that card.
# What happens (JAX 0.11.2): without a device that says `compute_capability` the kernel is lowered for 9.0, whatever
# `target_config` describes. With an abstract device that says it, the PTX names the card (`.target sm_90a`), but the assembler
# keeps the architecture of the process's first kernel: a card of a higher number fails ("SM version specified by .target is
# higher than default SM version assumed"), and one of a lower number gets machine code of the first card.
# So compile for each card in a process of its own.
# This script compiles for two cards that it describes, and runs nothing.
# Source: seen; the page of Pallas' Mosaic GPU back end does not say so.
# Why it matters to a KV cache: a library that checks its kernels for several cards would check one of them.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax[cuda13]==0.11.2"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu

FACTS = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 167936
  threads_per_core_limit: 2048 core_count: 108 fpus_per_core: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 2039000000000 l2_cache_size: 41943040 clock_rate_ghz: 1.41 device_memory_size: 85017493504
  shared_memory_per_block_optin: 166912 cuda_compute_capability { major: %d } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "a card"
"""


@dataclasses.dataclass(frozen=True)
class Card(jax.sharding.AbstractDevice):
    compute_capability: str = ""


def add(x_ref, out_ref):
    out_ref[...] = x_ref[...] + 1.0


def assemble(major):
    topology = topologies.get_topology_desc(platform="cuda", target_config=FACTS % major, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    here, x = mesh.abstract_mesh, jax.NamedSharding(mesh, jax.P())
    device = {field.name: getattr(here.abstract_device, field.name) for field in dataclasses.fields(jax.sharding.AbstractDevice)}
    shape = jax.ShapeDtypeStruct((128,), jnp.float32, sharding=x)
    kernel = plgpu.kernel(add, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), grid=(1,), grid_names=("x",))
    with jax.sharding.use_abstract_mesh(here.update(abstract_device=Card(**device, compute_capability=f"{major}.0"))):
        try:
            return "mosaic" in jax.jit(kernel).lower(shape).compile().as_text()
        except jax.errors.JaxRuntimeError as error:
            return "fails" if "Pass pipeline failed" in str(error) else str(error)  # `ptxas` says why on standard error


seen = [assemble(major) for major in (8, 9)]
print("jax", jax.__version__, "assembled for 8.0, then for 9.0 in the same process:", seen)
assert seen == [True, "fails"], seen
PY
