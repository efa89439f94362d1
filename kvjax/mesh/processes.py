"""A mesh over several processes: `jax.distributed.initialize`, then the same program in each of them.

A process has some of the devices, and can read an array only if these devices hold all of it. So results come back with all
rows on every device (`readable`), and every process must pass the whole arguments (`put`). All processes of a mesh must call
the functions that are given the mesh, in the same order.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.protocol.describe import is_known
from pallas_kernels.host import on_host, to_device


def check_present(mesh: Mesh) -> None:
    """Refuse a mesh that has no device of this process.

    Raises:
        ValueError: this process would hold no row.
    """
    if not mesh.local_devices:
        shape = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise ValueError(
            f"process {jax.process_index()} of {jax.process_count()} holds no row, because none of its devices is on the "
            f"mesh {shape}: call this in the processes that have the mesh's devices, or make the mesh of all of jax.devices()"
        )


def check_all_processes(mesh: Mesh | None, caller: str) -> None:
    """Refuse a mesh that lacks a process: all processes of the run write and read the files of a saved cache.

    Raises:
        ValueError: a process has no device of the mesh; the message calls the function ``caller``.
    """
    having = {jax.process_index()} if mesh is None else {device.process_index for device in mesh.devices.flat}
    if len(having) < jax.process_count():
        raise ValueError(
            f"{caller} needs a mesh with devices of all {jax.process_count()} processes of this run, got a cache on the "
            f"devices of process {', '.join(map(str, sorted(having)))}"
        )


def check_same(mesh: Mesh, arrays: Iterable[Any]) -> None:
    """Refuse arrays that are not equal in all processes of the mesh.

    Raises:
        ValueError: the arrays differ; the message names two processes.
    """
    digest = hashlib.sha256()
    for x in arrays:
        if x is not None and (not isinstance(x, Array) or x.is_fully_addressable):
            host = np.ascontiguousarray(x)
            digest.update(f"{host.dtype} {host.shape} ".encode() + host.tobytes())
    every = of_each(mesh, np.frombuffer(digest.digest(), np.int32))
    differ = (every != every[0]).any(axis=1)
    if differ.any():
        one, other = (mesh.devices.flat[at].process_index for at in (0, int(differ.argmax())))
        raise ValueError(f"all processes must pass identical tokens and lengths; process {other} differs from process {one}")


def put[X](x: X, sharding: NamedSharding) -> X:
    """Place an array, which every process has whole, by ``sharding``; nothing is sent."""
    if isinstance(x, Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])  # pyright: ignore[reportReturnType]


def readable[X](mesh: Mesh | None, tree: X) -> X:
    """Gather the arrays of ``tree`` so that this process can read them; if it can already, or in a trace, do nothing."""
    leaves = jax.tree.leaves(tree)
    if mesh is None or not is_known(leaves):
        return tree
    if not any(isinstance(x, Array) and not (x.is_fully_addressable or x.is_fully_replicated) for x in leaves):
        return tree
    return jax.jit(_copy, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)


def of_each(mesh: Mesh, numbers: np.ndarray) -> np.ndarray:
    """Gather the ``numbers`` int32 [N] of the process of each device of the mesh: int32 [devices, N]."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    every = jax.make_array_from_callback((mesh.size, len(numbers)), sharding, lambda index: numbers[None])
    return np.asarray(readable(mesh, every))


def least(mesh: Mesh | None, size: int | None) -> int | None:
    """Reduce ``size`` in bytes to the smallest of all processes, rounded down to a KiB; None if a process has none."""
    if mesh is None or not mesh.is_multi_process:
        return size
    smallest = int(of_each(mesh, np.asarray([-1 if size is None else size >> 10], np.int32)).min())
    return None if smallest < 0 else smallest << 10


def _copy(tree: Any) -> Any:
    return jax.tree.map(lambda x: to_device(x) if on_host(x) else x, tree)
