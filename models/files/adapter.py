"""Low-rank adapters: a small file that changes a model without holding the model's weights (LoRA, arXiv:2106.09685).

An adapter has two factors for every kernel of the decoder's layers, in the layout of this library, where projections that
read the same input are fused. All layers are stacked::

    attention/qkv, attention/out, mlp/gate_up, mlp/down:    a [L, in, R]    b [L, R, out]

The columns of ``mlp/gate_up`` are gate and up, out = 2F. The adapted kernel is ``kernel + a @ b``. It is computed once, when
the model is loaded: an adapted model costs as much as its base.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pallas_kernels.formats.coded_matrix import CodedMatrix

from ..sizes.architecture import Architecture
from ..sizes.checks import check_counts, check_number
from ..sizes.rope_scaling import RopeScaling
from .directories import read_json
from .eight_bits import SCALE, numbers, problem
from .replaced_files import replaced_files

WEIGHTS = "adapter_model.safetensors"
DESCRIPTION = "adapter_config.json"
KERNELS = ("attention/qkv/kernel", "attention/out/kernel", "mlp/gate_up/kernel", "mlp/down/kernel")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The base of an adapter, and the adapter's changes besides the kernels.

    Attributes:
        base: the name of the model that the adapter was trained on, for messages.
        fingerprint: the fingerprint of the base's parameters; see `fingerprint`.
        rank: R, columns of the first factor.
        stretch: length of the adapted model's context / length of the base's context; see `stretched`.

    Raises:
        ValueError: a field has the wrong type, or the rank or the stretch is below 1.
    """

    base: str
    fingerprint: str
    rank: int
    stretch: float

    def __post_init__(self) -> None:
        for name in ("base", "fingerprint"):
            if type(value := vars(self)[name]) is not str:
                raise ValueError(f"AdapterConfig: {name} must be a text, got {value!r}")
        check_counts("AdapterConfig", rank=self.rank)
        check_number("AdapterConfig", "stretch", self.stretch, least=1)


def fingerprint(params: Mapping[str, Any]) -> str:
    """Hash a model's parameters into 16 hexadecimal digits that tell the model from other models of the same shape.

    The digits depend on the shapes of all parameters, as the factors see them, and on the values of the norms' scales in
    bfloat16. They are therefore the same for parameters that were loaded in float32 and in bfloat16.
    """
    digest = hashlib.sha256()
    for path, leaf in sorted(flatten_dict(params, sep="/").items()):
        digest.update(f"{path} {_as_product(path, leaf.shape)}\n".encode())
        if path.endswith("scale"):
            digest.update(np.asarray(leaf).astype(ml_dtypes.bfloat16).tobytes())
    return digest.hexdigest()[:16]


def adapted(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Compute ``kernel + a @ b`` in float32.

    Args:
        kernel: [..., in, out], or [..., in, 2, F] with out = 2F.
        a: [..., in, R].
        b: [..., R, out].

    Returns:
        The adapted kernel in the shape and dtype of ``kernel``.
    """
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    delta = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return (kernel.astype(jnp.float32) + delta.reshape(kernel.shape)).astype(kernel.dtype)


def merge_adapter(params: Mapping[str, Any], factors: Mapping[str, Any]) -> dict[str, Any]:
    """Add an adapter's factors to the parameters of its base.

    Returns:
        The adapted parameters: a tree like ``params``, with its dtypes and devices. Leaves without factors are shared.
    """
    flat, flat_factors = (cast(dict[str, Any], flatten_dict(tree, sep="/")) for tree in (params, factors))
    num_layers = sum(name.startswith("layers_") for name in params)
    problems = _misfits(flat, flat_factors, num_layers)
    if problems:
        raise ValueError("the adapter does not fit the model: " + "; ".join(problems))
    merger = functools.cache(_merger)  # one program for each kernel's shape
    for layer in range(num_layers):
        for path in KERNELS:
            name = path.removesuffix("/kernel")
            at = f"layers_{layer}/{path}"
            kernel = jnp.asarray(flat[at])
            a, b = (np.asarray(flat_factors[f"{name}/{factor}"][layer]) for factor in "ab")
            flat[at] = merger(kernel.sharding)(kernel, a, b.reshape(len(b), *kernel.shape[1:]))
    return unflatten_dict(flat, sep="/")


def _merger(sharding: Sharding) -> Callable[[jax.Array, np.ndarray, np.ndarray], jax.Array]:
    """Return `adapted` for a kernel [in, ...], a [in, R] and b [R, ...]; each device of a mesh computes its part."""

    def merge(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return adapted(kernel, a, b.reshape(len(b), -1))

    if not isinstance(sharding, NamedSharding):
        return jax.jit(merge)
    rows, *columns = tuple(sharding.spec) or (None,)
    specs = PartitionSpec(rows), PartitionSpec(None, *columns)
    shardings = tuple(NamedSharding(sharding.mesh, spec) for spec in specs)
    run = jax.jit(jax.shard_map(merge, mesh=sharding.mesh, in_specs=(sharding.spec, *specs), out_specs=sharding.spec))
    return lambda kernel, *factors: run(kernel, *jax.device_put(factors, shardings))


def _as_product(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a parameter as a factor of a product: gate and up are one matrix, [..., in, 2F]."""
    return (*shape[:-2], shape[-2] * shape[-1]) if path.endswith("gate_up/kernel") else tuple(shape)


def _misfits(flat: Mapping[str, Any], factors: Mapping[str, Any], num_layers: int) -> list[str]:
    """List in words what is wrong with the names and shapes of factors."""
    parts = {"router": "experts", "linear": "layers of linear attention", "latents": "latent attention"}
    present = {name for path in flat for name in path.split("/")}
    if found := [part for name, part in parts.items() if name in present]:
        return [f"the model has {found[0]}, expected one matrix for each projection"]
    names = [path.removesuffix("/kernel") for path in KERNELS]
    expected = {f"{name}/{factor}" for name in names for factor in "ab"}
    problems = [f"missing {name}" for name in sorted(expected - factors.keys())]
    problems += [f"unused {name}" for name in sorted(factors.keys() - expected)]
    for name in names if not problems else ():
        rows, columns = _as_product(name + "/kernel", flat[f"layers_0/{name}/kernel"].shape)
        rank = factors[f"{name}/a"].shape[-1] if factors[f"{name}/a"].ndim else 1
        for factor, shape in (("a", (num_layers, rows, rank)), ("b", (num_layers, rank, columns))):
            if (got := tuple(factors[f"{name}/{factor}"].shape)) != shape:
                problems.append(f"{name}/{factor}: got {list(got)}, expected {list(shape)}")
    return problems


def stretched[Config: Architecture](config: Config, factor: float) -> Config:
    """Stretch a model's context: divide its slow rotary frequencies by a factor, so that no angle is new to the model.

    The rule is Llama 3's (`RopeScaling`), with its own bounds: frequencies with four or more turns in the old context stay.
    """
    if factor == 1:
        return config
    if config.rope_scaling is not None:
        raise ValueError(f"a context can be stretched once, this model has {config.rope_scaling}")
    old = config.max_position_embeddings
    scaling = RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=old)
    return dataclasses.replace(config, rope_scaling=scaling, max_position_embeddings=int(old * factor))


def apply_adapter[Config: Architecture](
    params: Mapping[str, Any], config: Config, directory: str | os.PathLike[str]
) -> tuple[dict[str, Any], Config]:
    """Apply the adapter in a directory to a model.

    Args:
        params: the base's parameters.
        config: the base.
        directory: holds ``adapter_model.safetensors`` and ``adapter_config.json``; see `save_adapter`.

    Returns:
        The parameters and the configuration of the adapted model.

    Raises:
        FileNotFoundError: a file is absent.
        ValueError: a file is damaged, or the adapter belongs to another base.
        TypeError: parameters are in codes.
    """
    factors, about = load_adapter(directory)
    if any(isinstance(leaf, CodedMatrix) for leaf in flatten_dict(params).values()):
        raise TypeError("an adapter needs parameters as numbers, got codes: from_pretrained adds it before it rounds")
    digest = fingerprint(params)
    if digest != about.fingerprint:
        raise ValueError(
            f"the adapter in {directory} was trained on {about.base} (fingerprint {about.fingerprint}), "
            f"and cannot be applied to this model (fingerprint {digest})"
        )
    return merge_adapter(params, factors), stretched(config, about.stretch)


def load_adapter(directory: str | os.PathLike[str]) -> tuple[dict[str, Any], AdapterConfig]:
    """Load the factors (NumPy arrays in the file's dtype, from 8 bits in float32) and the description of an adapter."""
    directory = Path(directory)
    for name in (WEIGHTS, DESCRIPTION):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"no {name} in {directory}")
    described = read_json(directory / DESCRIPTION)
    names = [field.name for field in dataclasses.fields(AdapterConfig)]
    if absent := [name for name in names if name not in described]:
        raise ValueError(f"{directory / DESCRIPTION} lacks {', '.join(absent)}")
    try:
        with safe_open(directory / WEIGHTS, framework="numpy") as opened:
            stored = opened.keys()  # the opened file itself is not iterable
            factors = {name: _factor(opened, name) for name in stored if not _scales(name, stored)}
    except SafetensorError as error:
        raise ValueError(f"{directory / WEIGHTS} is damaged: {error}") from error
    for name, leaf in factors.items():
        if any(other.startswith(f"{name}/") for other in factors):
            raise ValueError(f"{directory / WEIGHTS} is damaged: {name} is both a factor and a folder of factors")
        if not np.isfinite(leaf).all():
            raise ValueError(f"{directory / WEIGHTS} is damaged: {name} has values that are not finite")
    try:
        about = AdapterConfig(**{name: described[name] for name in names})
    except ValueError as error:
        raise ValueError(f"{directory / DESCRIPTION}: {error}") from error
    return unflatten_dict(factors, sep="/"), about


def _scales(name: str, names: Collection[str]) -> bool:
    return name.endswith(SCALE) and name.removesuffix(SCALE) in names


def _factor(opened: Any, name: str) -> np.ndarray:
    """Read a factor in the file's dtype; of a factor in 8 bits, its numbers in float32."""
    if opened.get_slice(name).get_dtype() == "I8" and (wrong := problem(opened, name)):
        raise ValueError(f"{WEIGHTS} is damaged: {wrong}")
    return numbers(opened, name, (slice(None),) * len(opened.get_slice(name).get_shape()))


def save_adapter(directory: str | os.PathLike[str], factors: Mapping[str, Any], about: AdapterConfig) -> None:
    """Write an adapter: the factors in bfloat16, and their description.

    Both files are written to a temporary folder and moved at the end, so a failure leaves the directory unchanged.
    """
    flat = flatten_dict(factors, sep="/")
    stored = {name: np.ascontiguousarray(np.asarray(leaf).astype(ml_dtypes.bfloat16)) for name, leaf in flat.items()}
    with replaced_files(directory, (WEIGHTS, DESCRIPTION)) as scratch:
        save_file(stored, scratch / WEIGHTS)
        text = json.dumps(dataclasses.asdict(about), indent=2) + "\n"
        (scratch / DESCRIPTION).write_text(text, encoding="utf-8")
