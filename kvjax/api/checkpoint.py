"""Save and load a cache, compressed or not, with orbax.

A directory holds the arrays, written by orbax, and ``kvjax.json``. This file describes the model and the method that made
the arrays. It holds a checksum of every array, a checksum of its own content, and the sizes and checksums of all files.
Loading checks all of them, the files first: orbax prints what its threads run into when they read a damaged file.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import logging
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from kvjax.api.new_folder import folder_of_all
from kvjax.api.plain_path import plain_path
from kvjax.api.shard_map import shape_of, shardings
from kvjax.cache.storage import LayerStorage
from kvjax.cache.whole_model import Cache, check_alive
from kvjax.decoding.bits import in_32_bits
from kvjax.decoding.layers import blank_cache, layer_methods
from kvjax.mesh.processes import check_all_processes, readable
from kvjax.mesh.sharding import plan_of
from kvjax.protocol.describe import describe
from kvjax.protocol.method import Method
from kvjax.protocol.typing import Model, not_none
from kvjax.registry import resolve
from pallas_kernels.host import on_host, to_host

_ABOUT = "kvjax.json"
_ARRAYS = "arrays"
_KEYS = ("weights", "structure", "leaves", "method", "model", "files")
_KV_DTYPE = "kv_dtype"  # folders of earlier versions lack it
_SUMS = "sums"  # of files, which folders of earlier versions and of several processes lack
_CHECKSUM = "checksum"
_READ_BACK = 1 << 28  # bytes of arrays that `save_cache` reads back at once, in host memory
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_IN_WORDS = ("No space left", "Disk quota exceeded", "File too large")  # how orbax says it


@in_32_bits
def save_cache(directory: str | pathlib.Path, cache: Cache) -> None:
    """Write ``cache`` to a new directory, of any name that the file system takes.

    The directory appears when it is complete, and when its arrays were read back as they were written (not if several
    processes save together). If writing fails, nothing is left. A process that is killed while it writes
    leaves a folder ``NAME.partial-*``; the next `save_cache` beside it removes that folder.

    Several processes save together: each writes the shards of its devices, to a directory that all processes share. For the
    checksums, a device then holds one whole array of the cache at a time.

    Raises:
        ValueError: the directory exists already, or the cache is on devices of some of the processes only.
        OSError: there is no space, no permission to write, or what was written cannot be read.
        ImportError: orbax-checkpoint is not installed (extra ``train``).
    """
    check_alive(cache)
    orbax = _orbax()
    target = pathlib.Path(directory).absolute()
    mesh = None if cache.plan is None else cache.plan.mesh
    check_all_processes(mesh, "save_cache")
    named, structure = jax.tree_util.tree_flatten_with_path(dataclasses.replace(cache, plan=None))
    if cache.plan is not None and cache.plan.parts > 1:  # rows whose slots are divided have the leaves of one device
        blank = functools.partial(blank_cache, model=cache.model, weights=cache.weights, kv_dtype=cache.kv_dtype)
        structure = jax.tree.structure(jax.eval_shape(blank, jax.tree.map(shape_of, cache.method)))
    leaves = [leaf for _, leaf in named]
    about: dict[str, Any] = {
        "method": describe(cache.method),
        "model": repr(cache.model),
        "structure": str(structure),
        "weights": cache.weights,
        _KV_DTYPE: cache.kv_dtype,
    }
    try:
        with (
            _quiet_threads(),
            folder_of_all(target, mesh) as (folder, is_first),
            plain_path(folder) as plain,
            contextlib.closing(orbax.StandardCheckpointer()) as checkpointer,
        ):
            with _one_error(target):
                checkpointer.save(plain / _ARRAYS, _numbered(leaves))
                checkpointer.wait_until_finished()
            about["leaves"] = [
                {
                    "name": jax.tree_util.keystr(path),
                    "shape": list(leaf.shape),
                    "dtype": str(leaf.dtype),
                    "host": on_host(leaf),
                    _CHECKSUM: _checksum(leaf, mesh),
                }
                for path, leaf in named
            ]
            if mesh is None or not mesh.is_multi_process:
                with _one_error(target):
                    _check_arrays(orbax, plain / _ARRAYS, about["leaves"])
                about[_SUMS] = _sums(folder)
            if is_first:
                about["files"] = _sizes(folder)
                (folder / _ABOUT).write_text(json.dumps(about | {_CHECKSUM: _checksum_of_json(about)}, indent=1))
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OSError(error.errno, f"no space to save a cache as {target}; nothing was kept") from None


@contextlib.contextmanager
def _one_error(target: pathlib.Path) -> Iterator[None]:
    """Turn an error of orbax into an error of a single sentence."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        if any(words in text for words in _FULL_IN_WORDS):
            raise OSError(errno.ENOSPC, "no space left") from None
        if isinstance(error, OSError):
            raise
        raise OSError(f"the cache cannot be saved as {target}, nothing was kept: {text[:300]}") from error


@contextlib.contextmanager
def _quiet_threads() -> Iterator[None]:
    """Stop the threads of orbax from logging errors, which arrive as exceptions too."""
    logger = logging.getLogger("absl")
    logger.addFilter(_says_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_says_nothing)


def _says_nothing(record: logging.LogRecord) -> bool:
    return False


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
            ``params``, or a file is damaged. The message names the damaged file or array.
        ImportError: orbax-checkpoint is not installed (extra ``train``).
    """
    plan = plan_of(params)
    check_all_processes(None if plan is None else plan.mesh, "load_cache")
    source = pathlib.Path(directory).absolute()
    about = _read_about(source)
    weights, made, leaves, its_method, its_model, files = (about[name] for name in _KEYS)
    kv_dtype = about.get(_KV_DTYPE)
    blank = jax.eval_shape(lambda: blank_cache(resolve(method), config, weights, None, kv_dtype))
    structure = jax.tree.structure(blank)
    given, maker = f"{describe(resolve(method))} on {config!r}", f"{its_method} on {its_model}"
    if str(structure) != made and given != maker:
        raise ValueError(f"the cache in {source} was made by {maker}, got {given}")
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(blank)[0]]
    # A field whose meaning changes gets another name, or another number of axes.
    axes = [x.ndim for x in jax.tree.leaves(blank)] == [len(leaf["shape"]) for leaf in leaves]
    if str(structure) != made or names != [leaf["name"] for leaf in leaves] or not axes:
        raise ValueError(
            f"the cache in {source} was saved by another version of kvjax, in which {its_method} keeps other arrays; "
            "prefill again with this version"
        )
    orbax = _orbax()
    shared = plan is not None and plan.mesh.is_multi_process  # each process would read all files
    _check_files(source, files, {} if shared else about.get(_SUMS, {}))
    if plan is not None:
        blank = jax.eval_shape(lambda: blank_cache(resolve(method), config, weights, plan, kv_dtype))
        _check_parts(source, resolve(method), blank, leaves)
    like = [
        jax.ShapeDtypeStruct(tuple(leaf["shape"]), leaf["dtype"], sharding=where)
        for leaf, where in zip(leaves, _places(blank, leaves), strict=True)
    ]
    try:
        with plain_path(source) as plain, contextlib.closing(orbax.StandardCheckpointer()) as checkpointer:
            arrays = checkpointer.restore(plain / _ARRAYS, _numbered(like))
    except (MemoryError, jax.errors.JaxRuntimeError):  # the device is too small
        raise
    except Exception as error:  # orbax and its storage raise Exception itself, too
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"the arrays in {source / _ARRAYS} are damaged: {said}") from error
    # They are in host memory already, but their types do not say so yet.
    placed = [to_host(arrays[f"{i:05d}"]) if leaf["host"] else arrays[f"{i:05d}"] for i, leaf in enumerate(leaves)]
    for array, leaf in zip(placed, leaves, strict=True):
        if (got := _checksum(array, None if plan is None else plan.mesh)) != leaf[_CHECKSUM]:
            raise ValueError(
                f"the array {leaf['name']} in {source / _ARRAYS} is damaged: got the checksum {got}, expected "
                f"{leaf[_CHECKSUM]}"
            )
    return jax.tree.unflatten(jax.tree.structure(blank), placed)


def _check_arrays(orbax: Any, arrays: pathlib.Path, leaves: list[dict[str, Any]]) -> None:
    """Refuse arrays that do not read back as they were written, a few at a time, in host memory."""
    groups, room = [[]], _READ_BACK
    for i, leaf in enumerate(leaves):
        size = math.prod(leaf["shape"]) * np.dtype(leaf["dtype"]).itemsize
        if size > room:
            groups, room = [*groups, []], _READ_BACK
        groups[-1].append(i)
        room -= size
    with contextlib.closing(orbax.PyTreeCheckpointer()) as checkpointer:
        for group in groups:
            names = [f"{i:05d}" for i in group]
            how = orbax.args.PyTreeRestore(
                item=dict.fromkeys(names, 0),
                restore_args=dict.fromkeys(names, orbax.RestoreArgs(restore_type=np.ndarray)),
                partial_restore=True,
            )
            found = checkpointer.restore(arrays, args=how)
            for name, i in zip(names, group, strict=True):
                if (got := _checksum(found[name], None)) != (expected := leaves[i][_CHECKSUM]):
                    raise OSError(f"{leaves[i]['name']} was read back with the checksum {got}, expected {expected}")


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
    """Choose the sharding of each array of a cache. Without it orbax would ask for the devices of the saved cache."""
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


def _read_about(source: pathlib.Path) -> dict[str, Any]:
    """Read ``kvjax.json``, and check that it is as `save_cache` wrote it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has changed since.
    """
    file = source / _ABOUT
    if not file.is_file():
        raise FileNotFoundError(f"no saved cache in {source}: expected a file {_ABOUT} there")
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        expected = about.pop(_CHECKSUM)
        for name in _KEYS:
            about[name]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} does not describe a saved cache: {error!r}") from error
    if (got := _checksum_of_json(about)) != expected:
        raise ValueError(
            f"{file} is not as save_cache wrote it: got content of the checksum {got}, expected {expected}; a cache that was "
            "changed cannot be loaded"
        )
    return about


def _check_files(source: pathlib.Path, files: dict[str, int], sums: dict[str, str]) -> None:
    """Refuse a directory in which a file is missing, or has another size or another content than it was saved with."""
    found = _sizes(source)
    for name, size in files.items():
        if found.get(name) != size:
            got = "no such file" if name not in found else f"{found[name]} bytes"
            raise ValueError(f"the cache in {source} is damaged: {name} should have {size} bytes, got {got}")
    read = _sums(source) if sums else {}
    for name, expected in sums.items():
        if read[name] != expected:
            got = f"got the checksum {read[name]}, expected {expected}"
            raise ValueError(f"the cache in {source} is damaged: {name} is not as it was saved: {got}")


def _sums(folder: pathlib.Path) -> dict[str, str]:
    """Hash every file of the arrays to sixteen hexadecimal digits, by its path in ``folder``, in threads."""
    names = list(_sizes(folder))

    def hashed(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(hashed, names), strict=True))


def _sizes(folder: pathlib.Path) -> dict[str, int]:
    """Measure the bytes of every file of the arrays, by its path in ``folder``."""
    files = sorted(path for path in (folder / _ARRAYS).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _checksum(array: Any, mesh: Mesh | None) -> str:
    """Hash the dtype, the shape and the bytes of an array on the devices of ``mesh``, to sixteen hexadecimal digits."""
    array = readable(mesh, array)
    # NumPy's copy of a part is freed with the part. A copy of the whole array would stay as long as the array lives.
    part = array.addressable_data(0) if isinstance(array, jax.Array) and len(array.devices()) == 1 else array
    numbers = np.ascontiguousarray(part).reshape(-1)
    digest = hashlib.sha256(f"{array.dtype} {list(array.shape)} ".encode())
    digest.update(memoryview(numbers.view(np.uint8)))
    return digest.hexdigest()[:16]


def _checksum_of_json(value: Any) -> str:
    """Hash a JSON value to sixteen hexadecimal digits, however its file is laid out."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _numbered(leaves: list) -> dict[str, Any]:
    return {f"{i:05d}": leaf for i, leaf in enumerate(leaves)}


def _orbax() -> Any:
    """Import ``orbax.checkpoint``."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        reason: BaseException | None = error
        while reason is not None:  # an interrupt while a compiled module starts arrives as the cause of an ImportError
            if isinstance(reason, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            reason = reason.__cause__ or reason.__context__
        if not (error.name or "").startswith("orbax"):
            raise
        raise ImportError("saving and loading caches needs orbax-checkpoint: pip install 'kvjax[train]'") from error
    return orbax.checkpoint
