"""Parameters from and to Hugging Face checkpoint directories, and random parameters for when only shapes matter."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from . import gguf_files
from .adapter import apply_adapter
from .checkpoint_table import EMBEDDING, LM_HEAD, Leaf, checkpoint_table, tensor_problems
from .config import DTYPES, HOST_DTYPES, ModelConfig
from .config_checks import eos_ids
from .hub import checkpoint_directory, leaves_folder, read_json
from .named_models import adapter_directory
from .replaced_files import replaced_files
from .transformer import Transformer, initializer

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FILE_DTYPES = ("F32", "F16", "BF16")
_BUFFERS = (".rotary_emb.inv_freq",)  # in files of old versions; computed from the config here


def param_shapes(config: ModelConfig) -> dict[str, Any]:
    """The parameter tree with a `jax.ShapeDtypeStruct` in ``config.dtype`` at each leaf. Nothing is allocated."""

    def init(key):
        tokens = jnp.zeros((1, 1), jnp.int32)
        return Transformer(config).init(
            key, tokens, lambda layer, state, q, k, v: (q, state), (None,) * config.num_layers
        )

    return jax.eval_shape(init, jax.random.key(0))["params"]


def random_params(config: ModelConfig, key: jax.Array, sharding: Any = None) -> dict[str, Any]:
    """Random parameters in ``config.dtype``, allocated one leaf after the other.

    Each leaf comes from a jitted call of its own, with its final dtype and sharding. So besides the parameters only one leaf
    in float32 needs memory: an 8B model in bfloat16 (16 GB) fits one 80 GB GPU.

    Args:
        config: the model.
        key: PRNG key.
        sharding: None for the default device, one `jax.sharding.Sharding` for every leaf, or a tree of shardings with the
            structure of the parameters.

    Raises:
        ValueError: ``sharding`` is a tree of another structure.
    """
    shapes = flatten_dict(param_shapes(config), sep="/")
    shardings = flatten_dict(sharding, sep="/") if isinstance(sharding, dict) else dict.fromkeys(shapes, sharding)
    if shardings.keys() != shapes.keys():
        differing = sorted(shardings.keys() ^ shapes.keys())
        raise ValueError(f"sharding must be a tree shaped like the parameters, differs at {', '.join(differing)}")
    makers: dict[Any, Any] = {}  # layers repeat the same few leaves, each of which compiles once
    params = {}
    for index, (path, leaf) in enumerate(shapes.items()):
        kind = "/".join(path.split("/")[-2:])
        recipe = (kind, leaf.shape, shardings[path])
        if recipe not in makers:
            makers[recipe] = _maker(kind, config, leaf, shardings[path])
        params[path] = makers[recipe](jax.random.fold_in(key, index))
    return unflatten_dict(params, sep="/")


def _maker(kind: str, config: ModelConfig, leaf: jax.ShapeDtypeStruct, sharding: Any):
    """A jitted function from a key to a leaf. It draws in float32, because bfloat16 has only 128 different draws."""
    init = initializer(kind, config)
    return jax.jit(lambda key: init(key, leaf.shape, jnp.float32).astype(leaf.dtype), out_shardings=sharding)


def from_pretrained(
    directory: str | os.PathLike, dtype: str | None = None, *, offline: bool = False
) -> tuple[dict[str, Any], ModelConfig]:
    """Load ``config.json`` and ``*.safetensors`` of a Hugging Face directory, or a GGUF file. torch is not needed.

    It reads one parameter at a time: besides the parameters on the device, the host holds only one.

    Args:
        directory: has ``config.json``; ``model.safetensors``, or the shards that ``model.safetensors.index.json`` names;
            and possibly ``generation_config.json`` with more end-of-text ids. Or a GGUF file, or a directory that holds
            one and no ``config.json``. Or a name, which is downloaded if it is not on this machine: of `NAMED_MODELS`, or
            of a Hugging Face repository; see `checkpoint_directory`.
        dtype: dtype of computation and storage, "float32" or "bfloat16"; None means that of ``config.json``. A GGUF file
            has none: None then takes bfloat16 if its embedding is stored so, and float32 otherwise.
        offline: whether to raise an error instead of downloading.

    Returns:
        The parameters in the config's dtype, and the config.

    Raises:
        FileNotFoundError: the directory, the config, a weight file or a shard is absent.
        OSError: a download failed, see `checkpoint_directory`.
        ValueError: the config or the architecture is not supported, a file is damaged, or tensors are missing, unused, or
            of a wrong shape or dtype; the message names all such tensors.
    """
    adapter = adapter_directory(directory)
    params, config = _load(directory, dtype, offline)
    return (params, config) if adapter is None else apply_adapter(params, config, adapter)


def _load(directory: str | os.PathLike, dtype: str | None, offline: bool) -> tuple[dict[str, Any], ModelConfig]:
    """Parameters and config without an adapter."""
    gguf_path = gguf_files.locate(directory, offline=offline)
    if gguf_path is not None:
        file = gguf_files.open_file(gguf_path)
        config = gguf_files.read_config(file, dtype)
        table = checkpoint_table(config)
        return _assemble(config, table, gguf_files.GGUFTensors.of(file, config, table).read), config
    directory = checkpoint_directory(directory, offline=offline)
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

    def read(name: str, dtype: np.dtype) -> np.ndarray:
        return _read(sources[name], name).astype(dtype, copy=False)

    return _assemble(config, table, read), config


def _assemble(config: ModelConfig, table: list[Leaf], read: Callable[[str, np.dtype], np.ndarray]) -> dict[str, Any]:
    """The parameters of ``table`` in the config's dtype, joined from the file tensors that ``read`` gives by name."""
    dtype = HOST_DTYPES[config.dtype]
    params = {}
    for leaf in table:
        joined = leaf.join([read(name, dtype) for name in leaf.names])
        params[leaf.path] = jnp.asarray(np.ascontiguousarray(joined))
    return unflatten_dict(params, sep="/")


def _read_config(directory: Path, dtype: str | None) -> ModelConfig:
    """The config of ``config.json``, with the end-of-text ids of ``generation_config.json`` added."""
    path = directory / _CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"no config.json and no GGUF file in {directory}")
    try:
        config = ModelConfig.from_hf(read_json(path), dtype)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    generation = directory / "generation_config.json"
    if not generation.is_file():
        return config
    more = read_json(generation).get("eos_token_id")
    try:
        return dataclasses.replace(
            config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *eos_ids(more))))
        )
    except ValueError as error:
        raise ValueError(f"{generation}: {error}") from error


def _tensor_files(directory: Path) -> dict[str, Path]:
    """The file of every tensor by name. A single file comes before an index, as in transformers."""
    single, index = directory / _WEIGHTS, directory / _INDEX
    if single.is_file():
        files = [single]
    elif index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f"{index} must map tensor names to files under 'weight_map'")
        if outside := [file for file in weight_map.values() if leaves_folder(file)]:
            raise ValueError(f"{index} must name files of its own directory, got {outside[0]!r}")
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
    """What is wrong with a safetensors file, which has 8 bytes of header length, a JSON header, and data."""
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
        except (ValueError, TypeError, AttributeError, KeyError, LookupError, RecursionError):
            return f"got {size} bytes with a header that does not parse"
    return f"got {size} bytes, expected {8 + header_size + data}"


def _read(file: Path, name: str) -> np.ndarray:
    """A tensor in the file's dtype."""
    with safe_open(file, framework="numpy") as opened:
        return opened.get_tensor(name)


def _check(directory: Path, config: ModelConfig, table: list[Leaf], sources: dict[str, Path]) -> None:
    """Refuse tensors that do not fit the table, with one message for all of them."""
    expected = {name: leaf.file_shape(i) for leaf in table for i, name in enumerate(leaf.names)}
    if config.tie_word_embeddings and LM_HEAD in sources:
        expected[LM_HEAD] = (config.vocab_size, config.hidden_size)  # a second copy is allowed
    found, dtypes = {}, {}
    for file in sorted(set(sources.values())):
        with safe_open(file, framework="numpy") as opened:
            names = opened.keys()  # the opened file itself is not iterable
            for name in names:
                if name in expected or not name.endswith(_BUFFERS):
                    found[name], dtypes[name] = (
                        tuple(opened.get_slice(name).get_shape()),
                        opened.get_slice(name).get_dtype(),
                    )
    problems = tensor_problems(expected, found)
    for name in sorted(expected.keys() & found.keys()):
        if dtypes[name] not in _FILE_DTYPES:
            problems.append(f"wrong dtype {name}: got {dtypes[name]}, expected one of {', '.join(_FILE_DTYPES)}")
    if problems:
        lines = "\n  ".join(problems)
        raise ValueError(f"{directory} does not hold the model of its config.json:\n  {lines}")


def save_pretrained(
    directory: str | os.PathLike, params: dict[str, Any], config: ModelConfig, dtype: str | None = None
) -> None:
    """Write ``config.json`` and ``model.safetensors`` in Hugging Face's layout.

    Both are written to a temporary folder and moved at the end: after a failure the directory is as it was before.

    Args:
        directory: is created if absent.
        params: the model's parameter tree, in any float dtype.
        config: the model.
        dtype: dtype of the file, "float32" or "bfloat16"; None means ``config.dtype``.

    Raises:
        ValueError: the dtype is unknown, or ``params`` is not the tree of ``config``.
    """
    dtype = config.dtype if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    hf = config.to_hf() | {"torch_dtype": dtype}
    flat = cast(dict[str, Any], flatten_dict(params, sep="/"))
    shapes = cast(dict[str, Any], flatten_dict(param_shapes(config), sep="/"))
    expected = {path: leaf.shape for path, leaf in shapes.items()}
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
        host = np.asarray(flat[leaf.path]).astype(HOST_DTYPES[dtype], copy=False)
        tensors.update(zip(leaf.names, leaf.split(host), strict=True))
    with replaced_files(directory, (_WEIGHTS, _CONFIG)) as scratch:
        save_file(tensors, scratch / _WEIGHTS, metadata={"format": "pt"})
        (scratch / _CONFIG).write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
