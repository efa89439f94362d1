"""Parameters from and to Hugging Face checkpoint directories, and random ones where only shapes matter."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from . import hf_config
from .checkpoint_table import EMBEDDING, LM_HEAD, checkpoint_table
from .config import DTYPES, ModelConfig
from .hub import checkpoint_directory, read_json
from .transformer import Transformer, initializer

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FILE_DTYPES = ("F32", "F16", "BF16")
_BUFFERS = (".rotary_emb.inv_freq",)  # written by old versions, recomputed from the config
_HOST_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def param_shapes(config: ModelConfig) -> dict[str, Any]:
    """Parameter tree with a `jax.ShapeDtypeStruct` in ``config.dtype`` at each leaf; nothing allocated."""

    def init(key):
        tokens = jnp.zeros((1, 1), jnp.int32)
        return Transformer(config).init(
            key, tokens, lambda layer, state, q, k, v: (q, state), (None,) * config.num_layers
        )

    return jax.eval_shape(init, jax.random.key(0))["params"]


def random_params(config: ModelConfig, key: jax.Array, sharding: Any = None) -> dict[str, Any]:
    """Freshly initialised parameters in ``config.dtype``, made in place.

    Each leaf comes from its own jitted call with its final dtype and sharding, so besides the parameters there
    is only one leaf's float32 working memory: an 8B in bfloat16 (16 GB) fits one 80 GB GPU.

    Args:
        config: the model.
        key: PRNG key.
        sharding: None for the default device, one `jax.sharding.Sharding` for every leaf, or a tree of them
            shaped like the parameters.

    Raises:
        ValueError: if ``sharding`` is a tree of another shape.
    """
    shapes = flatten_dict(param_shapes(config), sep="/")
    shardings = flatten_dict(sharding, sep="/") if isinstance(sharding, dict) else dict.fromkeys(shapes, sharding)
    if shardings.keys() != shapes.keys():
        differing = sorted(shardings.keys() ^ shapes.keys())
        raise ValueError(f"sharding must be a tree shaped like the parameters, differs at {', '.join(differing)}")
    makers: dict[Any, Any] = {}  # layers repeat the same few leaves: compile each once
    params = {}
    for index, (path, leaf) in enumerate(shapes.items()):
        kind = "/".join(path.split("/")[-2:])
        recipe = (kind, leaf.shape, shardings[path])
        if recipe not in makers:
            makers[recipe] = _maker(kind, config, leaf, shardings[path])
        params[path] = makers[recipe](jax.random.fold_in(key, index))
    return unflatten_dict(params, sep="/")


def _maker(kind: str, config: ModelConfig, leaf: jax.ShapeDtypeStruct, sharding: Any):
    """A jitted ``key -> leaf``. Drawn in float32: a bfloat16 draw has only 128 distinct values."""
    init = initializer(kind, config)
    return jax.jit(lambda key: init(key, leaf.shape, jnp.float32).astype(leaf.dtype), out_shardings=sharding)


def from_pretrained(directory: str | os.PathLike, dtype: str | None = None) -> tuple[dict[str, Any], ModelConfig]:
    """Load ``config.json`` and ``*.safetensors`` of a Hugging Face directory; torch is not needed.

    Reads one parameter at a time, so the host holds one parameter besides what the device takes.

    Args:
        directory: holds ``config.json``, ``model.safetensors`` or the shards named by
            ``model.safetensors.index.json``, optionally ``generation_config.json`` (more end-of-text ids). The name
            of a Hugging Face repository is looked up in the local cache; nothing is downloaded.
        dtype: "float32" or "bfloat16" to compute and store in, or None for what ``config.json`` declares.

    Returns:
        The parameters in the config's dtype, and the config.

    Raises:
        FileNotFoundError: for an absent directory, config, weight file or shard.
        ValueError: for an unsupported config, a damaged file, or, all in one message, every tensor that is
            missing, unused, of a wrong shape or dtype.
    """
    directory = checkpoint_directory(directory)
    config = _read_config(directory, dtype)
    sources = _tensor_files(directory)
    table = checkpoint_table(config)
    if config.tie_word_embeddings and EMBEDDING not in sources and LM_HEAD in sources:
        table[0] = dataclasses.replace(table[0], names=(LM_HEAD,))
    _check(directory, config, table, sources)
    if config.tie_word_embeddings and {EMBEDDING, LM_HEAD} <= sources.keys():
        first, second = (_read(sources[name], name) for name in (EMBEDDING, LM_HEAD))
        if not np.array_equal(first, second):
            raise ValueError(f"{directory}: embeddings are tied, but {EMBEDDING} and {LM_HEAD} differ")
    host_dtype = _HOST_DTYPES[config.dtype]
    params = {}
    for leaf in table:
        joined = leaf.join([_read(sources[name], name) for name in leaf.names])
        params[leaf.path] = jnp.asarray(np.ascontiguousarray(joined.astype(host_dtype, copy=False)))
    return unflatten_dict(params, sep="/"), config


def _read_config(directory: Path, dtype: str | None) -> ModelConfig:
    """``config.json`` with the end-of-text ids of ``generation_config.json`` added."""
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no config.json in {directory}")
    try:
        config = ModelConfig.from_hf(read_json(path), dtype)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    generation = directory / "generation_config.json"
    if not generation.is_file():
        return config
    ids = (*config.eos_token_ids, *hf_config.eos_ids(read_json(generation).get("eos_token_id")))
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(ids)))


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Every tensor's name and its file; a single file wins over an index, as in transformers."""
    single, index = directory / _WEIGHTS, directory / _INDEX
    if single.is_file():
        files = [single]
    elif index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f"{index} must map tensor names to files under 'weight_map'")
        files = [directory / file for file in sorted(set(weight_map.values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise FileNotFoundError(f"{index} names shards that are not there: {', '.join(absent)}")
    else:
        found = sorted(path.name for path in directory.glob("*.safetensors")) or "no .safetensors file"
        raise FileNotFoundError(f"no {_WEIGHTS} or {_INDEX} in {directory}, found {found}")
    sources = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                names = list(opened.keys())
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: {_damage(file)} ({error})") from error
        sources.update(dict.fromkeys(names, file))
    return sources


def _damage(file: Path) -> str:
    """What is wrong with the length of a safetensors file: 8 bytes of header length, JSON header, data."""
    size = file.stat().st_size
    if size < 8:
        return f"got {size} bytes, expected at least 8"
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        if 8 + header_size > size:
            return f"got {size} bytes, expected at least {8 + header_size}"
        try:
            header = json.loads(stream.read(header_size))
            data = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        except (ValueError, TypeError, AttributeError, KeyError):
            return f"got {size} bytes with a header that does not parse"
    return f"got {size} bytes, expected {8 + header_size + data}"


def _read(file: Path, name: str) -> np.ndarray:
    """One tensor, in the file's dtype."""
    with safe_open(file, framework="numpy") as opened:
        return opened.get_tensor(name)


def _check(directory: Path, config: ModelConfig, table: list, sources: dict[str, Path]) -> None:
    """Raise one error that lists every tensor at odds with the table."""
    expected = {name: leaf.file_shape(i) for leaf in table for i, name in enumerate(leaf.names)}
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in sources]
    if config.tie_word_embeddings:
        expected[LM_HEAD] = (config.vocab_size, config.hidden_size)  # allowed as a second copy
    for file in sorted(set(sources.values())):
        with safe_open(file, framework="numpy") as opened:
            names = opened.keys()  # safe_open itself does not iterate
            for name in names:
                found = opened.get_slice(name)
                shape, dtype = tuple(found.get_shape()), found.get_dtype()
                if name not in expected:
                    if not name.endswith(_BUFFERS):
                        problems.append(f"unused {name} {list(shape)}")
                    continue
                if shape != expected[name]:
                    problems.append(f"misshaped {name}: got {list(shape)}, expected {list(expected[name])}")
                if dtype not in _FILE_DTYPES:
                    problems.append(f"wrong dtype {name}: got {dtype}, expected one of {', '.join(_FILE_DTYPES)}")
    if problems:
        lines = "\n  ".join(problems)
        raise ValueError(f"{directory} does not hold the model of its config.json:\n  {lines}")


def save_pretrained(
    directory: str | os.PathLike, params: dict[str, Any], config: ModelConfig, dtype: str | None = None
) -> None:
    """Write ``config.json`` and ``model.safetensors`` as Hugging Face lays them out.

    Both are written beside their destination and renamed at the end, so a failure leaves what was there.

    Args:
        directory: created if absent.
        params: the model's parameter tree, in any float dtype.
        config: the model.
        dtype: "float32" or "bfloat16" to store in, or None for ``config.dtype``.

    Raises:
        ValueError: if the dtype is unknown or ``params`` is not the tree of ``config``.
    """
    dtype = config.dtype if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    hf = config.to_hf() | {"torch_dtype": dtype}
    flat = flatten_dict(params, sep="/")
    expected = {path: leaf.shape for path, leaf in flatten_dict(param_shapes(config), sep="/").items()}
    problems = [f"missing {path} {list(shape)}" for path, shape in expected.items() if path not in flat]
    for path, leaf in flat.items():
        if path not in expected:
            problems.append(f"unused {path} {list(leaf.shape)}")
        elif leaf.shape != expected[path]:
            problems.append(f"misshaped {path}: got {list(leaf.shape)}, expected {list(expected[path])}")
    if problems:
        raise ValueError("params are not those of config:\n  " + "\n  ".join(problems))
    tensors = {}
    for leaf in checkpoint_table(config):
        host = np.asarray(flat[leaf.path]).astype(_HOST_DTYPES[dtype], copy=False)
        tensors.update(zip(leaf.names, leaf.split(host), strict=True))
    directory = Path(directory)
    created = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=directory) as scratch:
            save_file(tensors, Path(scratch, _WEIGHTS), metadata={"format": "pt"})
            Path(scratch, "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
            for name in (_WEIGHTS, "config.json"):
                os.replace(Path(scratch, name), directory / name)
    except BaseException:
        if created and not any(directory.iterdir()):
            directory.rmdir()
        raise
