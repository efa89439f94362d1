"""Save and load a cache, compressed or not.

A directory holds a file with the bytes of each array, and ``kvjax.json``, which describes the model and the method that made
the arrays. It has the checksums of all files, and a checksum of its own content.
"""

import dataclasses
import errno
import functools
import hashlib
import json
import math
import pathlib
import re
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
from kvjax.decoding.checks import check_arrays, check_model, check_sizes
from kvjax.decoding.layers import blank_cache, layer_methods
from kvjax.mesh.processes import check_all_processes, readable
from kvjax.mesh.sharding import device_of, plan_of
from kvjax.protocol.describe import describe, show_value
from kvjax.protocol.method import Method
from kvjax.protocol.typing import Model, not_none
from kvjax.registry import make, resolve
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

    Several processes save together, to a directory that all processes share: the process of the first device writes the
    files. A device then holds one whole array of the cache at a time.

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
        "format": _FORMAT, "method": describe(cache.method), "model": repr(cache.model), "structure": str(structure),
        "weights": cache.weights, "kv_dtype": cache.kv_dtype, "leaves": [],
    }  # fmt: skip
    try:
        with folder_of_all(target, mesh) as folder:
            failure = None
            for number, (path, leaf) in enumerate(named):  # in every process, which gather arrays together
                data = _bytes(readable(mesh, leaf))
                if folder is not None and failure is None:
                    try:
                        (folder / _file(number)).write_bytes(data)
                    except OSError as raised:
                        failure = raised
                about["leaves"].append({
                    "name": jax.tree_util.keystr(path), "shape": list(leaf.shape), "dtype": str(leaf.dtype),
                    "host": on_host(leaf), _CHECKSUM: _digest(data),
                })  # fmt: skip
                del data  # before the next array is read
            if failure is not None:
                raise failure
            if folder is not None:
                text = json.dumps(about | {_CHECKSUM: _digest_of_json(about)}, indent=1)
                (folder / _ABOUT).write_text(text, encoding="utf-8")
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OSError(error.errno, f"no space to save a cache as {target}; nothing was kept") from None


@in_32_bits
def load_cache(
    directory: str | pathlib.Path, *, config: Model, method: Method | str | None = None, params: Any = None
) -> Cache:
    """Read a cache written by `save_cache`.

    Args:
        directory: where it was saved.
        config: the description of the model that made the cache.
        method: None makes the method that the folder names. Otherwise the method or its name, whose static fields must
            equal those of the method that made the cache; traced fields are restored. A method must be given if a knob of
            it is no number, text or short tuple: SentenceKV's ``boundary``, scores of heads, a `kvjax.wrappers.Pattern`.
        params: the parameters for the next calls. The cache goes to their device or devices, on whatever devices the saved
            cache was. None means the device where JAX puts arrays.

    Raises:
        FileNotFoundError: there is no saved cache in the directory.
        ValueError: another model, method or version of kvjax made the cache, it cannot be divided over the devices of
            ``params``, an argument is of another kind, or a file is damaged, which the message names.
    """
    check_model(config)
    check_arrays(params)
    plan = plan_of(params)
    check_all_processes(None if plan is None else plan.mesh, "load_cache")
    source = pathlib.Path(directory).absolute()
    method = None if method is None else resolve(method)
    if not (source / _ABOUT).is_file():
        raise FileNotFoundError(f"no saved cache in {source}: expected a file {_ABOUT} there")
    about = _read_about(source / _ABOUT)
    if about.get("format") != _FORMAT:
        raise ValueError(f"the cache in {source} has another format than this version of kvjax writes: prefill again")
    leaves, weights, kv_dtype = about["leaves"], about["weights"], about["kv_dtype"]
    method = _named(source, about["method"]) if method is None else method
    check_sizes(method, config)
    blank = jax.eval_shape(lambda: blank_cache(method, config, weights, None, kv_dtype))
    # A field whose meaning changes gets another name, or another number of axes.
    expected = [(jax.tree_util.keystr(path), leaf.ndim) for path, leaf in jax.tree_util.tree_flatten_with_path(blank)[0]]
    found = [(leaf["name"], len(leaf["shape"])) for leaf in leaves]
    if str(jax.tree.structure(blank)) != about["structure"] or expected != found:
        unlike = [*_unlike(method, about["method"], show_value), *_unlike(config, about["model"], lambda x, _: repr(x))]
        raise ValueError(
            f"the cache in {source} was made by {about['method']} on {about['model']}, got {describe(method)} on {config!r}; "
            f"arrays of another method, model or version of kvjax cannot be loaded (unlike: {', '.join(unlike) or 'none'})"
        )
    if plan is not None:
        blank = jax.eval_shape(lambda: blank_cache(method, config, weights, plan, kv_dtype))
        _check_parts(source, method, blank, leaves)
    arrays = [
        jax.block_until_ready(_array(source / _file(number), leaf, where))  # one file in memory at a time
        for number, (leaf, where) in enumerate(zip(leaves, _places(blank, leaves, params), strict=True))
    ]
    return jax.tree.unflatten(jax.tree.structure(blank), arrays)


def _named(source: pathlib.Path, text: str) -> Method:
    """Make the method that a text of `describe` names."""
    try:
        return make(text.removesuffix("()"))
    except ValueError as error:
        raise ValueError(f"the cache in {source} was made by {text}, which its text cannot make: pass method") from error


def _unlike(given: Any, text: str, show: Callable[[Any, bool], str]) -> list[str]:
    """List the fields of a method or a model whose values do not stand in the text of the saved one."""
    known = dataclasses.fields(given) if dataclasses.is_dataclass(given) else ()
    fields = [field for field in known if field.metadata.get("static", True)]
    pairs = [(field.name, show(vars(given)[field.name], False)) for field in fields]
    stated = {name for name, value in pairs if re.search(rf"\b{name}={re.escape(value)}(?![\w.])", text)}
    return [f"{name}={value:.60}" for name, value in pairs if name not in stated and value != "None"]


def _array(file: pathlib.Path, leaf: dict[str, Any], where: Sharding) -> jax.Array:
    """Read an array to the devices of this process, and no more than its part to each."""
    data = file.read_bytes() if file.is_file() else b""
    if (got := _digest(data)) != leaf[_CHECKSUM]:
        raise ValueError(
            f"the cache in {file.parent} is damaged: {file.name}, which holds {leaf['name']}, is not as it was saved: got "
            f"the checksum {got}, expected {leaf[_CHECKSUM]}"
        )
    values = np.frombuffer(data, jnp.dtype(leaf["dtype"])).reshape(leaf["shape"])
    parts = [
        jax.device_put(values[index], SingleDeviceSharding(device, memory_kind=where.memory_kind))
        for device, index in where.addressable_devices_indices_map(values.shape).items()
    ]
    array = jax.make_array_from_single_device_arrays(values.shape, where, parts)
    return to_host(array) if leaf["host"] else array  # it is in host memory already, but its type may not say so yet


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


def _places(blank: Cache, leaves: list[dict[str, Any]], params: Any) -> list[Any]:
    """Choose the sharding of each array of a cache."""
    plan = blank.plan
    if plan is None:
        places = [SingleDeviceSharding(device_of(params))] * len(leaves)
    else:
        plan.check_rows(jax.tree.unflatten(jax.tree.structure(blank), leaves).length["shape"][0])
        places = jax.tree.leaves(shardings(blank))
    # Arrays in host memory are loaded straight into it, because the device may be too small for them.
    return [
        place.with_memory_kind("pinned_host") if leaf["host"] else place for place, leaf in zip(places, leaves, strict=True)
    ]


def _read_about(file: pathlib.Path) -> dict[str, Any]:
    """Read ``kvjax.json``, and check that it is as `save_cache` wrote it."""
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        expected = about.pop(_CHECKSUM)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} does not describe a saved cache: {error!r}") from error
    if (got := _digest_of_json(about)) != expected:
        raise ValueError(
            f"{file} is not as save_cache wrote it: got content of the checksum {got}, expected {expected}; a cache that was "
            "changed cannot be loaded"
        )
    return about


def _file(number: int) -> str:
    return f"{number:05d}.bin"


def _bytes(array: Any) -> memoryview:
    """View the bytes of an array on one device or many."""
    # NumPy's copy of a part is freed with the part. A copy of the whole array would stay as long as the array lives.
    if array.is_fully_replicated:
        whole = np.ascontiguousarray(array.addressable_data(0))
    else:
        whole = np.empty(array.shape, array.dtype)
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                whole[shard.index] = np.asarray(shard.data.addressable_data(0))
    return memoryview(whole.reshape(-1).view(np.uint8))


def _digest(data: bytes | memoryview) -> str:
    """Hash bytes to sixteen hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:16]


def _digest_of_json(value: Any) -> str:
    """Hash a JSON value, however its file is laid out."""
    return _digest(json.dumps(value, sort_keys=True).encode())
