"""Save and load a cache, compressed or not.

A directory holds a file with the bytes of each array, or of each part of an array that is on several devices, and
``kvjax.json``, which describes the model and the method that made the arrays. Each process that saves writes
``parts-N.json``, which lists its files with their checksums. The JSON files have checksums of their own content.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from kvjax.api.new_folder import folder_of_all
from kvjax.api.shard_map import shape_of, shardings
from kvjax.cache.storage import LayerStorage
from kvjax.cache.whole_model import Cache, check_alive
from kvjax.decoding.bits import in_32_bits
from kvjax.decoding.layers import blank_cache, layer_methods
from kvjax.mesh.processes import check_all_processes
from kvjax.mesh.sharding import plan_of
from kvjax.protocol.describe import describe
from kvjax.protocol.method import Method
from kvjax.protocol.typing import Model, not_none
from kvjax.registry import resolve
from pallas_kernels.host import on_host, to_host

_ABOUT = "kvjax.json"
_FORMAT = 2
_CHECKSUM = "checksum"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@in_32_bits
def save_cache(directory: str | pathlib.Path, cache: Cache) -> None:
    """Write ``cache`` to a new directory, of any name that the file system takes.

    The directory appears when it is complete. If writing fails, nothing is left. A process that is killed while it writes
    leaves a folder ``NAME-*.partial``; the next `save_cache` to the same directory removes that folder.

    Several processes save together: each writes the parts of arrays on its devices, to a directory that all processes share.

    Raises:
        ValueError: the directory exists already, another process saves to it, or the cache is on devices of some of the
            processes only.
        OSError: there is no space, or no permission to write.
    """
    check_alive(cache)
    target = pathlib.Path(directory).absolute()
    mesh = None if cache.plan is None else cache.plan.mesh
    check_all_processes(mesh, "save_cache")
    named, structure = jax.tree_util.tree_flatten_with_path(dataclasses.replace(cache, plan=None))
    if cache.plan is not None and cache.plan.parts > 1:  # rows whose slots are divided have the leaves of one device
        blank = functools.partial(blank_cache, model=cache.model, weights=cache.weights, kv_dtype=cache.kv_dtype)
        structure = jax.tree.structure(jax.eval_shape(blank, jax.tree.map(shape_of, cache.method)))
    about: dict[str, Any] = {
        "format": _FORMAT,
        "method": describe(cache.method),
        "model": repr(cache.model),
        "structure": str(structure),
        "weights": cache.weights,
        "kv_dtype": cache.kv_dtype,
        "processes": jax.process_count(),
        "leaves": [
            {
                "name": jax.tree_util.keystr(path),
                "shape": list(leaf.shape),
                "dtype": str(leaf.dtype),
                "host": on_host(leaf),
            }
            for path, leaf in named
        ],
    }
    try:
        with folder_of_all(target, mesh) as (folder, is_first):
            parts = [part for number, (_, leaf) in enumerate(named) for part in _write_parts(folder, number, leaf)]
            _write_json(folder / f"parts-{jax.process_index()}.json", {"parts": parts})
            if is_first:
                _write_json(folder / _ABOUT, about)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OSError(error.errno, f"no space to save a cache as {target}; nothing was kept") from None


def _write_parts(folder: pathlib.Path, number: int, leaf: jax.Array) -> list[dict[str, Any]]:
    """Write the parts of array ``number`` that this process holds, each once in all processes; return what was written."""
    parts = []
    for shard in leaf.addressable_shards:
        if shard.replica_id:
            continue
        start = [at.start or 0 for at in shard.index]
        values = np.ascontiguousarray(shard.data)  # NumPy's copy is freed with the shard
        data = memoryview(values.reshape(-1).view(np.uint8))
        file = "-".join(f"{x:05d}" for x in (number, *start)) + ".bin"
        (folder / file).write_bytes(data)
        shape = list(shard.data.shape)
        parts.append({"leaf": number, "file": file, "start": start, "shape": shape, _CHECKSUM: _digest(data)})
    return parts


@in_32_bits
def load_cache(
    directory: str | pathlib.Path, *, config: Model, method: Method | str, params: Any = None
) -> Cache:
    """Read a cache written by `save_cache`.

    Args:
        directory: where it was saved.
        config: the description of the model that made the cache.
        method: the method or its name. Its static fields must equal the static fields of the method that made the cache;
            traced fields are restored.
        params: the parameters for the next calls. The cache goes to the devices over which they are spread, on whatever
            devices the saved cache was. None means one device.

    Raises:
        FileNotFoundError: there is no saved cache in the directory.
        ValueError: another model, method or version of kvjax made the cache, or it cannot be divided over the devices of
            ``params``, or a file is damaged. The message names the damaged file.
    """
    plan = plan_of(params)
    check_all_processes(None if plan is None else plan.mesh, "load_cache")
    source, method = pathlib.Path(directory).absolute(), resolve(method)
    if not (source / _ABOUT).is_file():
        raise FileNotFoundError(f"no saved cache in {source}: expected a file {_ABOUT} there")
    about = _read_json(source / _ABOUT)
    if about.get("format") != _FORMAT:
        raise ValueError(f"the cache in {source} has another format than this version of kvjax writes: prefill again")
    leaves, weights, kv_dtype = about["leaves"], about["weights"], about["kv_dtype"]
    blank = jax.eval_shape(lambda: blank_cache(method, config, weights, None, kv_dtype))
    # A field whose meaning changes gets another name, or another number of axes.
    expected = [(jax.tree_util.keystr(path), leaf.ndim) for path, leaf in jax.tree_util.tree_flatten_with_path(blank)[0]]
    found = [(leaf["name"], len(leaf["shape"])) for leaf in leaves]
    if str(jax.tree.structure(blank)) != about["structure"] or expected != found:
        raise ValueError(
            f"the cache in {source} was made by {about['method']} on {about['model']}, got {describe(method)} on {config!r}; "
            "the arrays of another method, model or version of kvjax cannot be loaded"
        )
    if plan is not None:
        blank = jax.eval_shape(lambda: blank_cache(method, config, weights, plan, kv_dtype))
        _check_parts(source, method, blank, leaves)
    parts: list[list[dict[str, Any]]] = [[] for _ in leaves]
    for process in range(about["processes"]):
        for part in _read_json(source / f"parts-{process}.json")["parts"]:
            parts[part["leaf"]].append(part)
    each = zip(leaves, parts, _places(blank, leaves), strict=True)
    return jax.tree.unflatten(jax.tree.structure(blank), [_array(source, *of_leaf) for of_leaf in each])


def _array(source: pathlib.Path, leaf: dict[str, Any], parts: list[dict[str, Any]], where: Sharding) -> jax.Array:
    """Read an array to the devices of this process; of the files, only those that have something of it."""
    shape, dtype = tuple(leaf["shape"]), jnp.dtype(leaf["dtype"])
    read = _reader(source, shape, dtype, parts)
    each = [
        jax.device_put(read(index), SingleDeviceSharding(device, memory_kind=where.memory_kind))
        for device, index in where.addressable_devices_indices_map(shape).items()
    ]
    array = jax.make_array_from_single_device_arrays(shape, where, each)
    return to_host(array) if leaf["host"] else array  # it is in host memory already, but its type may not say so yet


def _reader(
    source: pathlib.Path, shape: tuple[int, ...], dtype: np.dtype, parts: list[dict[str, Any]]
) -> Callable[[tuple[slice, ...]], np.ndarray]:
    """Return a function that reads a piece of an array, given as a slice for each axis, out of the files of its parts."""

    @functools.cache
    def values(number: int) -> np.ndarray:
        part = parts[number]
        try:
            data = (source / part["file"]).read_bytes()
        except FileNotFoundError:
            raise ValueError(f"the cache in {source} is damaged: {part['file']} is not there") from None
        if (got := _digest(data)) != part[_CHECKSUM]:
            raise ValueError(
                f"the cache in {source} is damaged: {part['file']} is not as it was saved: got the checksum {got}, expected "
                f"{part[_CHECKSUM]}"
            )
        return np.frombuffer(data, dtype).reshape(part["shape"])

    def read(index: tuple[slice, ...]) -> np.ndarray:
        bounds = [at.indices(size)[:2] for at, size in zip(index, shape, strict=True)]
        out = np.empty([stop - start for start, stop in bounds], dtype)
        for number, part in enumerate(parts):
            edges = [(x, x + size) for x, size in zip(part["start"], part["shape"], strict=True)]
            both = [(max(a, x), min(b, y)) for (a, b), (x, y) in zip(bounds, edges, strict=True)]
            if all(low < high for low, high in both):
                to = tuple(slice(low - a, high - a) for (low, high), (a, _) in zip(both, bounds, strict=True))
                of = tuple(slice(low - x, high - x) for (low, high), (x, _) in zip(both, edges, strict=True))
                out[to] = values(number)[of]
        return out

    return read


def _check_parts(source: pathlib.Path, method: Method, blank: Cache, leaves: list[dict[str, Any]]) -> None:
    """Refuse a mesh whose axis ``slots`` cannot divide the slots of the saved rows in blocks."""
    plan = not_none("plan", blank.plan)
    if plan.parts == 1:
        return
    saved = jax.tree.unflatten(jax.tree.structure(blank), [math.prod(leaf["shape"][2:3]) for leaf in leaves])
    for of_layer, state in zip(layer_methods(method, blank.model), saved.layers, strict=True):
        stores = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, LayerStorage))
        for slots in (x.position for x in stores if isinstance(x, LayerStorage) and x.parts > 1):
            if slots % (step := plan.parts * not_none("slot_block", of_layer.slot_block)):
                raise ValueError(
                    f"the cache in {source} has {slots} slots a row, expected a multiple of {step} for the mesh {plan}, "
                    "where each device has the same number of slots; prefill on that mesh gives such a number"
                )


def _places(blank: Cache, leaves: list[dict[str, Any]]) -> list[Any]:
    """Choose the sharding of each array of a cache."""
    plan = blank.plan
    if plan is None:
        places = [jax.sharding.SingleDeviceSharding(jax.local_devices()[0])] * len(leaves)
    else:
        plan.check_rows(jax.tree.unflatten(jax.tree.structure(blank), leaves).length["shape"][0])
        places = jax.tree.leaves(shardings(blank))
    # Arrays in host memory are loaded straight into it, because the device may be too small for them.
    return [
        place.with_memory_kind("pinned_host") if leaf["host"] else place
        for place, leaf in zip(places, leaves, strict=True)
    ]


def _write_json(file: pathlib.Path, value: dict[str, Any]) -> None:
    """Write a JSON object with a checksum of its content, however the file is laid out."""
    digest = _digest(json.dumps(value, sort_keys=True).encode())
    file.write_text(json.dumps(value | {_CHECKSUM: digest}, indent=1), encoding="utf-8")


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    """Read a file of `_write_json`.

    Raises:
        ValueError: it is not there, or not as it was written.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        expected = value.pop(_CHECKSUM)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} does not describe a saved cache: {error!r}") from error
    if (got := _digest(json.dumps(value, sort_keys=True).encode())) != expected:
        raise ValueError(
            f"{file} is not as save_cache wrote it: got content of the checksum {got}, expected {expected}; a cache that was "
            "changed cannot be loaded"
        )
    return value


def _digest(data: bytes | memoryview) -> str:
    """Hash bytes to sixteen hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:16]
