"""Parameters from and to Hugging Face checkpoint directories, and random parameters for when only shapes matter."""

import collections
import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from safetensors.numpy import save_file

from pallas_kernels.formats.coded_matrix import CodedMatrix
from pallas_kernels.machine import say_once

from .config import ModelConfig
from .files import gguf as gguf_files
from .files.adapter import DESCRIPTION, apply_adapter
from .files.coded import check_weight_dtype, code_params, coded, coded_shapes, in_floats, random_codes
from .files.directories import checkpoint_directory, locate_gguf, read_json
from .files.end_tokens import end_ids
from .files.hf.checks import eos_ids
from .files.replaced_files import replaced_files
from .files.tables.checkpoint import checkpoint_table
from .files.tables.leaf import AnyLeaf, Leaf, Parts
from .files.tensors import WEIGHTS, SafeTensors
from .hub.named_models import adapter_directory
from .hub.progress import megabytes, progress, say
from .layers.modules import initializer, shape_of
from .layers.transformer import Transformer
from .sharding import check_mesh, leaf_shardings, on_host, param_sharding, placed, shard_params, spans_processes
from .sizes.architecture import HOST_DTYPES, check_dtype
from .text.tokenizer import special_ids, special_tokens, tokenizer_files

_CONFIG = "config.json"
# Settings of generation_config.json that change greedy tokens -> the value that changes nothing.
_CHANGES_GREEDY = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), 1.0),
    **dict.fromkeys(("no_repeat_ngram_size", "min_new_tokens", "min_length"), 0),
    **dict.fromkeys((
        "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
        "forced_eos_token_id", "exponential_decay_length_penalty",
    ), None),
}  # fmt: skip
_DRAWS = "temperature", "top_k", "top_p", "min_p"  # its settings of sampling, which hold if it states do_sample
_READERS = 8  # threads that decode weights
_LONG = 10**9  # bytes of parameters from which loading shows its progress, and saving says its size


def param_shapes(config: ModelConfig, weight_dtype: str | None = None) -> dict[str, Any]:
    """Build the parameter tree with a `jax.ShapeDtypeStruct` in ``config.dtype`` at each leaf. Nothing is allocated.

    Args:
        config: the model.
        weight_dtype: as in `from_pretrained`; its codes are `CodedMatrix` of shapes.

    Raises:
        ValueError: ``weight_dtype`` is unknown, or the model has experts or latent attention.
    """
    check_weight_dtype(weight_dtype, config)

    def init(key):
        tokens = jnp.zeros((1, 1), jnp.int32)
        kept = config.recurrent or (None,) * config.num_layers

        def attend(layer, state, q, *rest, sinks=None):
            """Return the query; in a recurrent layer, what its function makes of empty arrays."""
            if kept[layer] is None:
                return q, state
            return q(tuple(jnp.zeros((1, *shape), of) for shape, of in kept[layer]), jnp.ones((1, 1), bool))[0], state

        return Transformer(config).init(key, tokens, attend, (None,) * config.num_layers)

    shapes = jax.eval_shape(init, jax.random.key(0))["params"]
    return shapes if weight_dtype is None else coded_shapes(shapes, weight_dtype)


def random_params(
    config: ModelConfig, key: jax.Array, *, mesh: Mesh | None = None, weight_dtype: str | None = None
) -> dict[str, Any]:
    """Draw random parameters in ``config.dtype``, allocated one leaf after the other.

    Each leaf comes from a jitted call of its own, with its final dtype and sharding. So besides the parameters only one leaf
    in float32 needs memory: an 8B model in bfloat16 (16 GB) fits one 80 GB GPU.

    Args:
        config: the model.
        key: PRNG key.
        mesh: devices over which the parameters are split as by `from_pretrained`; no device makes more than its parts. The
            values are the same as on one device. None means the default device.
        weight_dtype: as in `from_pretrained`: kernels and tables are random codes.

    Raises:
        ValueError: `from_pretrained` refuses the mesh.
        TypeError: ``mesh`` is no mesh, ``config`` is no `ModelConfig`, or ``key`` is no PRNG key.
    """
    if not isinstance(config, ModelConfig) or not isinstance(key, (jax.Array, np.ndarray)):
        got = f"{type(config).__name__} and {type(key).__name__}"
        raise TypeError(f"expected random_params(config, jax.random.key(seed)) with a ModelConfig, got {got}")
    shapes = cast("dict[str, Any]", flatten_dict(param_shapes(config, weight_dtype), sep="/"))
    check_mesh(config, mesh)
    makers: dict[Any, Any] = {}  # layers repeat the same few leaves, each of which compiles once
    params = {}
    for index, (path, leaf) in enumerate(shapes.items()):
        kind = "/".join(path.split("/")[-2:])
        sharding = None if mesh is None else leaf_shardings(path, leaf, mesh)
        recipe = (kind, shape_of(path, leaf), str(sharding))
        if recipe not in makers:
            makers[recipe] = _maker(kind, config, leaf, sharding)
        params[path] = makers[recipe](jax.random.fold_in(key, index))
    return unflatten_dict(params, sep="/")


def _maker(kind: str, config: ModelConfig, leaf: Any, sharding: Any):
    """Return a jitted function from a key to a leaf. It draws in float32: bfloat16 has only 128 different draws."""
    if isinstance(leaf, CodedMatrix):
        return jax.jit(lambda key: random_codes(leaf, key), out_shardings=sharding)
    init = initializer(kind, config)
    return jax.jit(lambda key: init(key, leaf.shape, jnp.float32).astype(leaf.dtype), out_shardings=sharding)


def from_pretrained(
    directory: str | os.PathLike[str],
    dtype: str | None = None,
    *,
    offline: bool = False,
    mesh: Mesh | None = None,
    weight_dtype: str | None = None,
) -> tuple[dict[str, Any], ModelConfig]:
    """Load ``config.json`` and ``*.safetensors`` of a Hugging Face directory, or a GGUF file. torch is not needed.

    Parameters are read a few at a time: besides the parameters on the device, the host holds only these. With a mesh, each
    device gets its part of every parameter as `models.sharding` divides them, and no device holds more. A process reads from
    safetensors only the parts of its own devices, and a shared part only once. Every process reads the whole of a GGUF file.

    Args:
        directory: has ``config.json``; ``model.safetensors``, or the shards that ``model.safetensors.index.json`` names;
            and possibly ``generation_config.json`` with more end-of-text ids. Or a GGUF file, or a directory that holds
            one and no ``config.json``. Or a name in `NAMED_MODELS`, or the name of a Hugging Face repository; a named
            checkpoint is downloaded if it is not on this machine, see `checkpoint_directory`.
        dtype: dtype of computation and storage, "float32" or "bfloat16"; None means the dtype in ``config.json``. A GGUF file
            declares no dtype: None then takes bfloat16 if the embedding is stored in bfloat16, and float32 otherwise.
        offline: whether to raise an error instead of downloading.
        mesh: devices with an axis "model", over which the parameters are split, or an axis "data", along which they are
            replicated, or both; with axes of any type, and of one process or several. None means the default device.
        weight_dtype: None keeps floating-point numbers. "int8" stores kernels and tables in 8 bits, with a scale for each
            number of a product. "int4" stores kernels in 4 bits with a scale and a minimum for every 32 numbers, and tables
            in 8 bits. Codes of a GGUF file are kept if they are Q8_0, and for "int4" also Q4_0, Q4_1 and Q4_K; other types
            of 5 to 8 bits become 8 bits.

    Returns:
        The parameters in the config's dtype, or as `pallas_kernels.formats.coded_matrix.CodedMatrix`, and the config.

    Raises:
        FileNotFoundError: the directory, the config, a weight file or a shard is absent.
        OSError: a download failed, see `checkpoint_directory`.
        ValueError: the config or the architecture is not supported, a file is damaged, or tensors are missing, unused, or
            of a wrong shape or dtype; the message names all of these tensors. Or the mesh has other axes, or its axis
            "model" does not divide the model's KV heads, intermediate size and vocabulary. Or ``weight_dtype`` is unknown, or
            the model has experts or latent attention, whose weights have no codes.
        TypeError: ``mesh`` is no mesh.
    """
    check_dtype(dtype)
    check_weight_dtype(weight_dtype)
    adapter = adapter_directory(directory)
    if adapter is None:
        return _load(directory, dtype, offline, mesh, weight_dtype)
    if mesh is not None:
        check_mesh(read_config(directory, dtype, offline=offline), mesh)
    params, config = _load(directory, dtype, offline, None if weight_dtype else mesh, None)  # an adapter changes floats
    params, config = apply_adapter(params, config, adapter)
    if weight_dtype is not None:
        params = code_params(params, weight_dtype)
        params = params if mesh is None else shard_params(params, mesh)
    return params, config


def read_config(directory: str | os.PathLike[str], dtype: str | None = None, *, offline: bool = False) -> ModelConfig:
    """Read the description of a checkpoint alone; of a model with an adapter it is that of the base.

    Args:
        directory: as in `from_pretrained`, which names the errors too.
        dtype: as in `from_pretrained`.
        offline: as in `from_pretrained`.
    """
    check_dtype(dtype)
    return _open(directory, dtype, offline)[2]


def _open(
    directory: str | os.PathLike[str], dtype: str | None, offline: bool
) -> tuple[Path, gguf_files.GGUFFile | None, ModelConfig]:
    """Find a checkpoint, and read its description; the file is None for a directory in Hugging Face layout."""
    path = locate_gguf(directory, offline=offline)
    if path is None:
        path = checkpoint_directory(directory, offline=offline)
        return path, None, _read_config(path, dtype)
    file = gguf_files.open_file(path)
    return path, file, ModelConfig(**vars(gguf_files.read_config(file, dtype)))


def _load(
    directory: str | os.PathLike[str], dtype: str | None, offline: bool, mesh: Mesh | None, weight_dtype: str | None
) -> tuple[dict[str, Any], ModelConfig]:
    """Load parameters and config without an adapter."""
    path, file, config = _open(directory, dtype, offline)
    check_mesh(config, mesh)
    check_weight_dtype(weight_dtype, config)
    table, coder = checkpoint_table(config), None
    if file is None:
        tensors = SafeTensors.of(path, config, table)
    else:
        tensors = gguf_files.GGUFTensors.of(file, config, table)
        coder = None if weight_dtype is None else gguf_files.coder(tensors, weight_dtype)
        if weight_dtype is None and mesh is None:
            coder = functools.partial(gguf_files.decoded, tensors, dtype=config.dtype)
    return _assemble(config, table, tensors.parts, mesh, path.name, weight_dtype, coder), config


def _assemble(
    config: ModelConfig,
    table: list[AnyLeaf],
    parts: Callable[[AnyLeaf, np.dtype], Parts],
    mesh: Mesh | None,
    name: str,
    weight_dtype: str | None,
    coder: Callable[[Leaf], CodedMatrix | jax.Array | None] | None,
) -> dict[str, Any]:
    """Load the parameters of ``table`` in the config's dtype, on the default device or on ``mesh``, one after the other.

    Args:
        config: the model.
        table: its parameters.
        parts: returns for a parameter and a dtype the function that reads its parts.
        mesh: see `from_pretrained`.
        name: the model's name beside the progress of a model that takes long to load.
        weight_dtype: see `from_pretrained`.
        coder: makes the codes of a parameter, or without a ``weight_dtype`` its numbers. None, or where it returns None:
            numbers come from ``parts``.
    """
    dtype, params = HOST_DTYPES[config.dtype], {}
    total = sum(math.prod(leaf.shape) for leaf in table) * dtype.itemsize
    shows = total >= _LONG and jax.process_index() == 0
    with progress(f"loading {name}") if shows else contextlib.nullcontext(lambda done, total: None) as tell:
        done = 0

        def read(leaf: AnyLeaf) -> Any:
            whole = (slice(None),) * len(leaf.shape)
            own = coder(cast("Leaf", leaf)) if coder and (weight_dtype is None or leaf.has_codes) else None
            if own is not None:
                return own
            if weight_dtype is not None and leaf.has_codes:
                return coded(leaf.path, parts(leaf, dtype)(whole), weight_dtype)
            return parts(leaf, dtype)(whole) if mesh is None else None

        for leaf, found in zip(table, _ahead(read, table), strict=True):
            if isinstance(found, CodedMatrix):
                param = found if mesh is None else placed(leaf.path, found, mesh)
            elif mesh is None:
                param = jnp.asarray(found)
            else:
                sharding = param_sharding(leaf.path, len(leaf.shape), mesh)
                once = functools.cache(parts(leaf, dtype))  # read replicas once
                param = jax.make_array_from_callback(leaf.shape, sharding, once, dtype=dtype)
            params[leaf.path] = jax.block_until_ready(param)  # else the host would hold all arrays that await their transfer
            done += math.prod(leaf.shape) * dtype.itemsize
            tell(done, total)
    return unflatten_dict(params, sep="/")


def _ahead[Item, Found](read: Callable[[Item], Found], items: Iterable[Item]) -> Iterator[Found]:
    """Run ``read`` for each item, in order; threads read the next few in the meantime."""
    count, waiting = min(_READERS, os.cpu_count() or 1), collections.deque[Future[Found]]()
    read = jax.default_device(jax.config.jax_default_device)(read)  # a caller may have set it for its own thread alone
    with ThreadPoolExecutor(count, "weights") as pool:
        for item in items:
            waiting.append(pool.submit(read, item))
            if len(waiting) > count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _read_config(directory: Path, dtype: str | None) -> ModelConfig:
    """Read the config of ``config.json``; ``generation_config.json`` and the tokenizer's files add end-of-text ids."""
    path = directory / _CONFIG
    if not path.is_file() and (directory / DESCRIPTION).is_file():
        raise FileNotFoundError(
            f"{directory} holds an adapter (LoRA) without its model: merge it, with PEFT by merge_and_unload() and "
            "save_pretrained(), and pass that directory"
        )
    if not path.is_file():
        raise FileNotFoundError(f"no config.json and no GGUF file in {directory}")
    declared = read_json(path)
    try:
        config = ModelConfig.from_hf(declared, dtype)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    generation = directory / "generation_config.json"
    stated = read_json(generation) if generation.is_file() else {}
    try:
        named = eos_ids(stated.get("eos_token_id"))
    except ValueError as error:
        raise ValueError(f"{generation}: {error}") from error
    left_out = [name for name, neutral in _CHANGES_GREEDY.items() if stated.get(name) not in (None, [], neutral)]
    left_out += [name for name in _DRAWS if stated.get("do_sample") is True and stated.get(name) is not None]
    if left_out:
        settings = ", ".join(f"{name}={stated[name]!r:.40}" for name in left_out)
        say_once(
            f"{generation} states {settings}, which transformers applies and kvjax does not, penalties to greedy tokens too: "
            "pass what you want to generate as sampler=kvjax.decoding.Sampler(...)"
        )
    special = special_ids(directory)
    by_text = (special.get(special_tokens(directory).get("eos_token", "")), *end_ids(special))
    known = (i for i in by_text if i is not None and i < config.vocab_size)
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *named, *known))))


def save_pretrained(
    directory: str | os.PathLike[str],
    params: dict[str, Any],
    config: ModelConfig,
    dtype: str | None = None,
    *,
    tokenizer: Any = None,
) -> None:
    """Write ``config.json``, ``model.safetensors`` and possibly a tokenizer in Hugging Face's layout.

    All files are written to a temporary folder and moved at the end, so a failure leaves the directory unchanged. If the
    parameters span processes, every process must call this, and the first process writes the files.

    Args:
        directory: is created if absent.
        params: the model's parameter tree, in any float dtype, on one device or many. Codes are written as their numbers.
        config: the model.
        dtype: dtype of the file, "float32" or "bfloat16"; None means ``config.dtype``. A line on standard error says the size
            of a file of more than 1 GB.
        tokenizer: the checkpoint whose tokenizer and chat template are copied, such as the directory or the name that
            `from_pretrained` read; or a tokenizer object, see `as_tokenizer`. None writes no tokenizer.

    Raises:
        ValueError: the dtype is unknown, ``params`` is not the tree of ``config``, or the tokenizer does not fit ``config``.
        TypeError: ``params`` is no dict, or ``config`` is no `ModelConfig`.
    """
    if not isinstance(config, ModelConfig) or not isinstance(params, dict):
        got = f"{type(params).__name__} and {type(config).__name__}"
        raise TypeError(f"expected save_pretrained(directory, params, config) with a dict and a ModelConfig, got {got}")
    dtype = config.dtype if dtype is None else dtype
    check_dtype(dtype)
    words = {} if tokenizer is None else tokenizer_files(tokenizer, config)
    hf = config.to_hf() | {"torch_dtype": dtype}
    flat = cast(dict[str, Any], flatten_dict(params, sep="/"))
    shapes = cast(dict[str, Any], flatten_dict(param_shapes(config), sep="/"))
    expected = {path: leaf.shape for path, leaf in shapes.items()}
    problems = [f"missing {path} {list(shape)}" for path, shape in expected.items() if path not in flat]
    for path, leaf in flat.items():
        if path not in expected:
            problems.append(f"unused {path} {list(shape_of(path, leaf))}")
        elif (shape := shape_of(path, leaf)) != expected[path]:
            problems.append(f"misshaped {path}: got {list(shape)}, expected {list(expected[path])}")
    if problems:
        raise ValueError("params do not belong to config:\n  " + "\n  ".join(problems))
    tensors, shared = {}, spans_processes(params)
    size = sum(math.prod(shape) for shape in expected.values()) * HOST_DTYPES[dtype].itemsize
    if size > _LONG and jax.process_index() == 0:
        say(f"writing {directory}: {megabytes(size)} in {dtype}" + ', dtype="bfloat16" takes half' * (dtype == "float32"))
    for leaf in checkpoint_table(config):
        param = jax.tree.map(on_host, flat[leaf.path])
        host = np.asarray(in_floats(leaf.path, param, HOST_DTYPES[dtype])).astype(HOST_DTYPES[dtype], copy=False)
        if jax.process_index() == 0 or not shared:
            tensors.update(leaf.split(host))
    try:
        if tensors:
            _write(directory, tensors, words, hf)
    finally:
        if shared:
            multihost_utils.sync_global_devices("save_pretrained")


def _write(
    directory: str | os.PathLike[str], tensors: dict[str, np.ndarray], words: dict[str, bytes], hf: dict[str, Any]
) -> None:
    """Write all files, or none; ``words`` are the files of the tokenizer."""
    with replaced_files(directory, (WEIGHTS, *words, _CONFIG)) as scratch:
        for name, data in words.items():
            (scratch / name).write_bytes(data)
        save_file(tensors, scratch / WEIGHTS, metadata={"format": "pt"})
        (scratch / _CONFIG).write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
