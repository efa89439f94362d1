"""Save and load a cache, compressed or not, with orbax.

A directory holds the arrays (orbax) and ``kvjax.json``, which says what model and method made them; loading checks both.
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
from kvjax.checks import describe
from kvjax.method import Method
from kvjax.registry import resolve
from kvjax.step import layer_methods, layer_specs
from kvjax.typing import Model
from pallas_kernels.host import on_host, to_host

_ABOUT = "kvjax.json"


def save_cache(directory: str | pathlib.Path, cache: Cache) -> None:
    """Write ``cache`` to a new directory; nothing is left behind if writing fails.

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
        config: the model's description; must be the one that made the cache.
        method: the method (or its name); static fields must be those that made the cache, traced ones are restored.

    Raises:
        FileNotFoundError: no saved cache there.
        ValueError: made by another model or method.
    """
    source = pathlib.Path(directory).absolute()
    if not (source / _ABOUT).is_file():
        raise FileNotFoundError(f"no saved cache in {source}: expected a file {_ABOUT} there")
    try:
        about = json.loads((source / _ABOUT).read_text())
        about["weights"], about["structure"], about["leaves"], about["method"], about["model"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{source / _ABOUT} does not describe a saved cache: {error!r}") from error
    structure = _structure(resolve(method), config, about["weights"])
    if str(structure) != about["structure"]:
        given = f"{describe(resolve(method))} on {config!r}"
        raise ValueError(f"the cache in {source} was made by {about['method']} on {about['model']}, got {given}")
    device = jax.local_devices()[0]
    # Straight to where it belongs: what is in host memory may be more than the device has.
    where = {
        kept: jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host") if kept else None for kept in (False, True)
    }
    like = [
        jax.ShapeDtypeStruct(tuple(leaf["shape"]), leaf["dtype"], sharding=where[leaf["host"]]) for leaf in about["leaves"]
    ]
    checkpointer = _checkpointer()
    try:
        arrays = checkpointer.restore(source / "arrays", _numbered(like))
    finally:
        checkpointer.close()
    # It is there already, but the array's type does not say so yet.
    placed = [
        to_host(arrays[f"{i:05d}"]) if leaf["host"] else arrays[f"{i:05d}"] for i, leaf in enumerate(about["leaves"])
    ]
    return jax.tree.unflatten(structure, placed)


def _numbered(leaves: list) -> dict[str, Any]:
    return {f"{i:05d}": leaf for i, leaf in enumerate(leaves)}


def _structure(method: Method, model: Model, weights: str) -> Any:
    """Tree structure of a cache of this method and model; sizes do not enter it, so the smallest ones do."""

    def build() -> Cache:
        methods = layer_methods(method, model)
        specs = layer_specs(methods, model, 1, 1, 1)
        layers = tuple(m.finish(m.init(spec), spec) for m, spec in zip(methods, specs, strict=True))
        cache = Cache(
            layers=layers,
            shared=method.init_shared(specs),
            method=method,
            length=jnp.zeros((1,), jnp.int32),
            logits=jnp.zeros((1, model.vocab_size), jnp.float32),
            model=model,
            weights=weights,
        )
        return method.observe(cache, decoding=False)

    return jax.tree.structure(jax.eval_shape(build))


def _checkpointer() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError("saving and loading caches needs orbax-checkpoint: pip install 'kvjax[train]'") from error
    return orbax.checkpoint.StandardCheckpointer()
