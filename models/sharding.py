"""How parameters are sharded over a mesh of devices.

A kernel that reads the residual stream is split by columns, and a kernel that writes into the stream by rows. So a device
computes its KV heads and its part of F from the whole stream, and the updates of all devices are summed. The tables of the
vocabulary are split by rows. All else (norms, the router) is on every device. Only the axis "model" splits parameters; along
"data" and "slots" they are replicated.
"""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.axes import MODEL, check_names
from pallas_kernels.formats.coded_matrix import CHUNK, CodedMatrix

from .sizes.architecture import Architecture

_SPLIT = {  # the dimension that is split, from the end: gate_up and down may have a leading axis of experts
    "qkv/kernel": -1,
    "qkv/bias": -1,
    "all_q_norm/scale": -1,
    "all_k_norm/scale": -1,
    "qkvz/kernel": -1,
    "ba/kernel": -1,
    "conv/taps": -2,
    "decay/log_rate": -1,
    "decay/bias": -1,
    "sinks/bias": -1,
    "out/kernel": -2,
    "gate_up/kernel": -1,
    "gate_up_bias/bias": -1,
    "inner/kernel": -1,
    "down/kernel": -2,
    "embed/embedding": -2,
    "lm_head/embedding": -2,
}


def param_spec(path: str, ndim: int) -> PartitionSpec:
    """Return the split of the parameter at ``path`` ('a/b/c') of ``ndim`` dimensions: one dimension over "model", or none."""
    dim = _SPLIT.get("/".join(path.split("/")[-2:]))
    if dim is None:
        return PartitionSpec()
    return PartitionSpec(*(MODEL if i == ndim + dim else None for i in range(ndim)))


def param_specs(params: Any) -> Any:
    """Map ``params`` (a tree of arrays or shapes) to a tree with a `jax.sharding.PartitionSpec` at each leaf."""

    def spec(path: Any, leaf: Any) -> Any:
        name = "/".join(key.key for key in path)
        return coded_specs(name, leaf) if isinstance(leaf, CodedMatrix) else param_spec(name, leaf.ndim)

    return jax.tree.map_with_path(spec, params, is_leaf=lambda leaf: isinstance(leaf, CodedMatrix))


def coded_specs(path: str, matrix: CodedMatrix) -> CodedMatrix:
    """Return the splits of a parameter in codes: the parameter's own split, with the axis of its sums moved to the end."""
    spec = param_spec(path, matrix.codes.ndim)
    if spec and not path.endswith("embedding"):
        spec = PartitionSpec(*spec[1:], spec[0])
    of_rows = PartitionSpec(*spec[:-1], None) if spec else spec
    each = [None if part is None else of_rows if part.shape[-1] == 1 else spec for part in (matrix.scales, matrix.minima)]
    return CodedMatrix(codes=spec, scales=each[0], minima=each[1])  # type: ignore[arg-type]


def param_sharding(path: str, ndim: int, mesh: Mesh) -> NamedSharding:
    """Return the sharding of the parameter at ``path`` on ``mesh``; a mesh without the axis "model" splits nothing."""
    return NamedSharding(mesh, param_spec(path, ndim) if MODEL in mesh.axis_names else PartitionSpec())


def leaf_shardings(path: str, leaf: Any, mesh: Mesh) -> Any:
    """Return the sharding of a parameter (an array, a shape or codes) on ``mesh``; see `shard_params` for the error."""
    if isinstance(leaf, CodedMatrix):
        return coded_shardings(path, leaf, mesh)
    sharding, devices = param_sharding(path, leaf.ndim, mesh), mesh.shape.get(MODEL, 1)
    for size, axis in zip(leaf.shape, sharding.spec, strict=False):
        if axis == MODEL and size % devices:
            raise ValueError(
                f"the parameter {path} of shape {leaf.shape} cannot be split over {devices} devices (the mesh's axis "
                f"{MODEL!r}): expected a number of devices that divides {size}"
            )
    return sharding


def shard_params(params: Any, mesh: Mesh) -> Any:
    """Move whole parameters to ``mesh``. `from_pretrained` with a mesh loads shards directly, without whole parameters.

    Raises:
        TypeError: ``mesh`` is no mesh of devices.
        ValueError: ``mesh`` has other axes than "data", "model" and "slots", or its axis "model" does not divide a parameter.
    """
    _check_axes(mesh)

    def where(path: Any, leaf: Any) -> Any:
        return leaf_shardings("/".join(key.key for key in path), leaf, mesh)

    is_leaf = lambda leaf: isinstance(leaf, CodedMatrix)  # noqa: E731
    return jax.device_put(params, jax.tree.map_with_path(where, params, is_leaf=is_leaf))


def coded_shardings(path: str, matrix: CodedMatrix, mesh: Mesh) -> CodedMatrix:
    """Return the shardings of the parts of a parameter in codes on ``mesh``."""
    devices = mesh.shape.get(MODEL, 1)
    specs = coded_specs(path, matrix)
    for size, axis in zip((*matrix.lead, matrix.width), specs.codes, strict=False):
        whole = CHUNK if size == matrix.width and size % CHUNK == 0 else 1
        if axis == MODEL and size % (whole * devices):
            raise ValueError(
                f"the parameter {path} in {matrix.bits} bits cannot be split over {devices} devices (the mesh's axis "
                f"{MODEL!r}): expected a number of devices that divides {size} into multiples of {whole}"
            )
    if MODEL not in mesh.axis_names:
        specs = jax.tree.map(lambda part: PartitionSpec(), matrix)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def placed(path: str, matrix: CodedMatrix, mesh: Mesh) -> CodedMatrix:
    """Move a parameter in codes, which every process has the whole of, to ``mesh``; see `coded_shardings` for the error."""

    def move(part: jax.Array, sharding: NamedSharding) -> jax.Array:
        host = np.asarray(part)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(move, matrix, coded_shardings(path, matrix, mesh))


def _check_axes(mesh: Mesh) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    check_names(mesh.axis_names)


def check_mesh(config: Architecture, mesh: Mesh | None) -> None:
    """Refuse a mesh over which the parameters of a model cannot be split."""
    if mesh is None:
        return
    _check_axes(mesh)
    if not mesh.local_devices:
        raise ValueError(
            f"none of the devices of process {jax.process_index()} of {jax.process_count()} is on the mesh "
            f"{dict(mesh.shape)}: load the parameters in the processes that have its devices, or make the mesh of all of "
            "jax.devices()"
        )
    config.local(mesh.shape.get(MODEL, 1))  # raises the error of parts that are not equal


def spans_processes(params: Any) -> bool:
    """Tell whether parts of some parameter are on devices of other processes."""
    return any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in jax.tree.leaves(params))


def on_host(param: Any) -> np.ndarray:
    """Gather the whole of one parameter in host memory. If it spans processes, all must call this, and all get it."""
    return multihost_utils.process_allgather(param, tiled=True) if spans_processes(param) else np.asarray(param)
