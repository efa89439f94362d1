"""Save and load a cache, compressed or not, with orbax.

A directory holds the arrays, written by orbax, and ``kvjax.json``, which describes the model and the method that made them.
Loading checks both.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache import Cache, check_alive
from kvjax.describe import describe
from kvjax.method import Method
from kvjax.registry import resolve
from kvjax.step import init_shared, layer_methods, layer_specs, observe
from kvjax.typing import Model
from pallas_kernels.host import on_host, to_host

_ABOUT = "kvjax.json"
_KEYS = ("weights", "structure", "leaves", "method", "model")


def save_cache(directory: str | pathlib.Path, cache: Cache) -> None:
    """Write ``cache`` to a new directory. If writing fails, no directory is left.

    Raises:
        ValueError: the directory exists already.
        ImportError: orbax-checkpoint is not installed (extra ``train``).
    """
    check_alive(cache)
    checkpointer = _checkpointer()
    target = pathlib.Path(directory).absolute()
    if target.exists():
        raise ValueError(f"a cache is saved to a new directory, got {target}, which exists already")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = pathlib.Path(tempfile.mkdtemp(prefix=target.name + ".partial-", dir=target.parent))
    partial.chmod(0o755)  # mkdtemp makes it private
    leaves = jax.tree.leaves(cache)
    about = {
        "method": describe(cache.method),
        "model": repr(cache.model),
        "structure": str(jax.tree.structure(cache)),
        "weights": cache.weights,
        "leaves": [{"shape": list(x.shape), "dtype": str(x.dtype), "host": on_host(x)} for x in leaves],
    }
    try:
        checkpointer.save(partial / "arrays", _numbered(leaves))
        checkpointer.wait_until_finished()
        (partial / _ABOUT).write_text(json.dumps(about, indent=1))
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        checkpointer.close()


def load_cache(directory: str | pathlib.Path, *, config: Model, method: Method | str) -> Cache:
    """Read a cache written by `save_cache`.

    Args:
        directory: where it was saved.
        config: the description of the model that made the cache.
        method: the method or its name. Its static fields must equal those of the method that made the cache; traced fields
            are restored.

    Raises:
        FileNotFoundError: there is no saved cache in the directory.
        ValueError: another model or method made the cache, or ``kvjax.json`` is damaged.
        ImportError: orbax-checkpoint is not installed (extra ``train``).
    """
    source = pathlib.Path(directory).absolute()
    if not (source / _ABOUT).is_file():
        raise FileNotFoundError(f"no saved cache in {source}: expected a file {_ABOUT} there")
    try:
        about = json.loads((source / _ABOUT).read_text())
        weights, made, leaves, its_method, its_model = (about[name] for name in _KEYS)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{source / _ABOUT} does not describe a saved cache: {error!r}") from error
    structure = _structure(resolve(method), config, weights)
    if str(structure) != made:
        given = f"{describe(resolve(method))} on {config!r}"
        raise ValueError(f"the cache in {source} was made by {its_method} on {its_model}, got {given}")
    device = jax.local_devices()[0]
    # Arrays of host memory are read straight into it, because the device may be too small for them.
    where = {
        kept: jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host") if kept else None for kept in (False, True)
    }
    like = [
        jax.ShapeDtypeStruct(tuple(leaf["shape"]), leaf["dtype"], sharding=where[leaf["host"]]) for leaf in leaves
    ]
    checkpointer = _checkpointer()
    try:
        arrays = checkpointer.restore(source / "arrays", _numbered(like))
    finally:
        checkpointer.close()
    # They are in host memory already, but their types do not say so yet.
    placed = [to_host(arrays[f"{i:05d}"]) if leaf["host"] else arrays[f"{i:05d}"] for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, placed)


def _numbered(leaves: list) -> dict[str, Any]:
    return {f"{i:05d}": leaf for i, leaf in enumerate(leaves)}


def _structure(method: Method, model: Model, weights: str) -> Any:
    """The tree structure of a cache of this method and model. It does not depend on sizes, so all sizes are 1 here."""

    def build() -> Cache:
        methods = layer_methods(method, model)
        specs = layer_specs(methods, model, 1, 1, 1)
        layers = tuple(m.finish(m.init(spec), spec) for m, spec in zip(methods, specs, strict=True))
        cache = Cache(
            layers=layers,
            shared=init_shared(method, model, specs),
            method=method,
            length=jnp.zeros((1,), jnp.int32),
            logits=jnp.zeros((1, model.vocab_size), jnp.float32),
            model=model,
            weights=weights,
        )
        return observe(cache, decoding=False)

    return jax.tree.structure(jax.eval_shape(build))


def _checkpointer() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError("saving and loading caches needs orbax-checkpoint: pip install 'kvjax[train]'") from error
    return orbax.checkpoint.StandardCheckpointer()
