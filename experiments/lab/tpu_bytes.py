"""Lists the bytes of decode steps that are compiled for a TPU v5e, without a TPU: `python -m experiments.lab.tpu_bytes`.

Steps of each method are compiled with kernels and as plain JAX (implementation "xla"), by the compiler that comes with
``jax[tpu]``. Nothing runs. Bytes come from the compiler's cost model: for a kernel, from the kernel's own estimate
(`pl.CostEstimate`); in a conditional, both branches count. The model has the heads of Llama-3.1-8B in two layers, and small
weights, so that most of the bytes that a step reads are keys and values.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jsonargparse.typing import PositiveInt

from experiments.cli import Job, Settings, option, record_path
from experiments.records import make_record, method_title, table_file, write_bytes, write_record
from experiments.records.report import Column, row_table
from experiments.speed.settings import Output
from kvjax import registry
from kvjax.decoding.decode import run_step
from kvjax.decoding.prefill import run_prefill
from models import ModelConfig, param_shapes
from pallas_kernels.dispatch import XLA, default_implementation
from pallas_kernels.machine import assume_machine

_MODEL = ModelConfig(
    vocab_size=512,
    hidden_size=512,
    intermediate_size=1024,
    num_layers=2,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=1 << 20,
    dtype="bfloat16",
)
_ROOM = 64  # tokens that may follow the prompt
_KNOBS: Mapping[str, dict[str, Any]] = {"quest": {"num_dense_layers": 0}, "chess": {"trigger": "fixed"}}
_COLUMNS: dict[str, Column] = {
    "method": lambda row: method_title(row["method"]),
    "prompt tokens": "length",
    "implementation": "implementation",
    "MB accessed": ("value", 1e-6, ".1f"),
    "MiB of temporaries": ("temporaries", 2**-20, ".2f"),
    "kernels in the program": lambda row: ", ".join(f"{count} {name}" for name, count in row["kernels"].items()) or "none",
}
_KERNEL = re.compile(r'%(\w+?)(?:\.\d+)? = .*custom_call_target="tpu_custom_call"')


@dataclasses.dataclass(frozen=True)
class TpuBytesSettings(Settings):
    """The settings of `experiments.lab.tpu_bytes`.

    Attributes:
        methods: comma-separated methods
        lengths: comma-separated prompt lengths in tokens; with 64 more for new tokens they are the slots of the cache
    """

    methods: tuple[str, ...] = ("full", "quest", "chess")
    lengths: tuple[PositiveInt, ...] = (32768 + 64, 131072 + 64)


@dataclasses.dataclass(frozen=True)
class TpuBytesCommand(Output):
    """Where `experiments.lab.tpu_bytes` writes."""

    out: pathlib.Path = option(pathlib.Path("runs/tpu-bytes.json"), read=record_path)


def _compile_all(settings: TpuBytesSettings, command: TpuBytesCommand) -> None:
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("expected an installation of kvjax[tpu], found no XLA compiler for TPUs")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or it asks a cloud what machine this is
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:1x1").devices
    metrics = []
    for name in settings.methods:
        for length in settings.lengths:
            for implementation in (XLA, None):
                row = _compile(name, length, implementation, Mesh(np.array(devices), ("x",)))
                metrics.append(row)
                print(f"{name:12s} {length:7d} {row['implementation']:8s} {row['value'] / 1e6:9.1f} MB", flush=True)
    about = dataclasses.asdict(settings) | {"model": dataclasses.asdict(_MODEL), "room": _ROOM}
    device = {"platform": "tpu", "kind": f"{devices[0].device_kind}, compiled for and not run", "count": 1}
    record = make_record("tpu-bytes", about, metrics, device=device, packages=("libtpu",)) | {"notes": {}}
    write_record(command.out, record)
    write_bytes(table_file(command.out), tpu_bytes_table(metrics, {}).encode())
    print(f"record: {command.out}")


def _compile(name: str, length: int, implementation: str | None, mesh: Mesh) -> dict[str, Any]:
    """Compile one step and make its row."""
    method = registry.make(name, **_KNOBS.get(name, {}))
    params, sizes = param_shapes(_MODEL), {"model": _MODEL, "max_new_tokens": _ROOM, "chunk_size": length}
    prompt = jax.ShapeDtypeStruct((1, length), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1, 1), bool)

    def here(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), assume_machine("tpu"), default_implementation(implementation):
        cache = jax.eval_shape(functools.partial(run_prefill, method=method, **sizes), params, *prompt)
        step = jax.jit(run_step, donate_argnums=1).lower(*jax.tree.map(here, (params, cache, *one))).compile()
    kernels = _KERNEL.findall(step.as_text())
    return {
        "name": "bytes accessed",
        "value": step.cost_analysis()["bytes accessed"],
        "unit": "bytes",
        "method": name,
        "length": length,
        "implementation": implementation or "kernels",
        "temporaries": step.memory_analysis().temp_size_in_bytes,
        "kernels": {kernel: kernels.count(kernel) for kernel in sorted({*kernels})},
    }


def tpu_bytes_table(metrics: Sequence[Mapping[str, Any]], notes: Mapping[str, Any]) -> str:
    """Write the page of a record's table."""
    about = (
        "What XLA's cost model says of one decode step compiled for a TPU v5e, in two layers with the heads of Llama-3.1-8B\n"
        "and small weights. **Nothing was run.** [TPUs](../tpu.md) says how to read it."
    )
    return "\n".join(["# Bytes of a step on a TPU", "", about, "", *row_table(metrics, _COLUMNS), ""])


main = Job(_compile_all, TpuBytesSettings, TpuBytesCommand)


if __name__ == "__main__":
    raise SystemExit(main())
