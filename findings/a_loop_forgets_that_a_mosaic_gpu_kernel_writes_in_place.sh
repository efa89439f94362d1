#!/usr/bin/env bash
# Pallas Mosaic GPU: a kernel that writes its operand in place returns memory that nobody wrote, if a loop slices its operands or
# stacks its results
#
# One would guess: the result of a kernel under `pl.run_state` is the operand that it wrote, in a loop as outside of one.
# What happens (JAX 0.11.2 and 0.12.0.1): XLA joins the kernel with the slices of the loop that it reads or writes to one
# `dynamic_slice_fusion`. The call inside still says output_to_operand_aliasing; the fusion does not, so the result gets a
# buffer of its own, and the kernel, which knows the operand's address alone, never writes there. On an H200 (JAX 0.11.2)
# two kernels under `lax.map` returned zeros in all 2,048 and all 512 places. An optimization barrier before and behind the
# call keeps it whole.
# This script compiles for a Hopper card that it describes, and runs nothing.
# Source: seen; neither the page of Pallas' Mosaic GPU back end nor that of lax.map says so.
# Why it matters to a KV cache: stores, evictions and counters are written in place, and layers or steps run in loops.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "jax[cuda13]==0.12.0.1"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu

HOPPER = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 85017493504
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
topology = topologies.get_topology_desc(platform="cuda", target_config=HOPPER, topology="1x1x1")
mesh = topologies.make_mesh(topology, (1,), ("x",))


def add(step_ref, x_ref):
    x_ref[...] = x_ref[...] + step_ref[...]


def in_place(step, x):
    kernel = plgpu.kernel(add, out_type=(), grid=(1,), grid_names=("x",))
    return pl.run_state(lambda ref: kernel(step, ref))(x)


def plain(steps, x):
    return jax.lax.map(lambda step: in_place(step, x), steps)


def apart(steps, x):
    barrier = jax.lax.optimization_barrier
    return jax.lax.map(lambda step: barrier(in_place(*barrier((step, x)))), steps)


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=jax.sharding.NamedSharding(mesh, jax.P()))


seen = {}
for function in plain, apart:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lines = jax.jit(function).lower(shape(2, 128), shape(128)).compile().as_text().splitlines()
    call = next(line for line in lines if 'custom_call_target="mosaic_gpu' in line)
    fusion = [line for line in lines if "dynamic_slice_fusion =" in line]
    seen[function.__name__] = "aliasing" in call, len(fusion), any("aliasing" in line for line in fusion)
print("jax", jax.__version__, "(the call aliases, fusions, a fusion aliases):", seen)
assert seen == {"plain": (True, 1, False), "apart": (True, 0, False)}, seen
PY
