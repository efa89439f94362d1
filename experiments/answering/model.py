"""Load a model with its tokenizer: the loader of every command."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

import models
from experiments.answering.mesh import groups_of, make_mesh, mesh_axes
from experiments.cli import Settings, option
from pallas_kernels.formats.coded_matrix import CodedMatrix

DTYPES = ("float32", "bfloat16")
WEIGHT_DTYPES = ("int8", "int4")
_NUMBERS = 64  # values of a leaf, at least; enough to differ between two quantisations of a model


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """Which model answers; the base of the settings of all commands that load a model.

    Attributes:
        model: a name (see kvjax ls models), a Hugging Face directory, a GGUF file, or a repository OWNER/NAME of the hub
        dtype: dtype of computation (default: float32 on a CPU, bfloat16 elsewhere)
        weight_dtype: keep kernels and tables in int8 or int4 (default: as numbers in the dtype of computation)
        offline: never download a model that is not on this machine
    """

    model: str = "builtin"
    dtype: str | None = option(None, choices=DTYPES)
    weight_dtype: str | None = option(None, choices=WEIGHT_DTYPES)
    offline: bool = False

    def load(self) -> LoadedModel:
        """Load the model; see `load_model`."""
        return load_model(self.model, self.dtype, offline=self.offline, weight_dtype=self.weight_dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSettings(ModelSettings):
    """Which model answers, on which devices; the base of the settings of commands that run on several devices.

    Attributes:
        mesh: the devices over which the model and its rows are spread, such as data=2,model=4: model divides the KV heads,
            data the rows of a batch, slots the tokens of a row (default: one device)

    Raises:
        ValueError: the text describes no mesh, see `experiments.answering.mesh.mesh_axes`.
    """

    mesh: str | None = None

    def __post_init__(self) -> None:
        mesh_axes(self.mesh)

    def load(self) -> LoadedModel:
        """Load the model onto the devices of the mesh; see `load_model`."""
        options = {"offline": self.offline, "weight_dtype": self.weight_dtype}
        return load_model(self.model, self.dtype, mesh=make_mesh(self.mesh), **options)


@dataclasses.dataclass(frozen=True, repr=False)
class LoadedModel(models.Loaded):
    """A model that is ready to answer.

    Attributes:
        kv_dtype: dtype of the keys and values that the model's caches store, as in `kvjax.prefill`.
    """

    kv_dtype: str | None = None

    @property
    def tokenizer_file(self) -> pathlib.Path:
        """The tokenizer.json from which worker processes load the tokenizer."""
        return self.directory / "tokenizer.json"

    @property
    def dtypes(self) -> str:
        """The dtype of computation, and the dtypes of weights and of stored keys and values that differ from it."""
        leaves = jax.tree.leaves(self.params, is_leaf=lambda leaf: isinstance(leaf, CodedMatrix))
        bits = min((leaf.bits for leaf in leaves if isinstance(leaf, CodedMatrix)), default=None)
        weights = [] if bits is None else [f"weights int{bits}"]
        return ", ".join([self.config.dtype, *weights, *([f"keys and values {self.kv_dtype}"] if self.kv_dtype else [])])

    @property
    def groups(self) -> int:
        """The number of groups of devices that share the rows of a batch; the rows are a multiple of it."""
        return groups_of(self.mesh)

    def check_positions(self, what: str, tokens: int) -> None:
        """Refuse more tokens than the model has positions, before a text of this length is made.

        ``what`` names the length.
        """
        if tokens > (most := self.config.max_position_embeddings):
            raise ValueError(f"{what} must be at most {most} tokens, the positions of {self.name}, got {tokens}")

    @property
    def weights(self) -> str:
        """Twelve hexadecimal digits that tell the parameters from others of the same name, by some values of every leaf."""
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(self.params):
            digest.update(_some(leaf).tobytes())
        return digest.hexdigest()[:12]


def _some(leaf: Array) -> np.ndarray:
    """Sample some values of a parameter, float32: every n-th of the flat array, read in place."""
    at = np.stack(np.unravel_index(np.arange(0, leaf.size, max(1, leaf.size // _NUMBERS)), leaf.shape))
    values = np.zeros(at.shape[1], np.float32)
    for shard in leaf.addressable_shards:
        bounds = [part.indices(size) for part, size in zip(shard.index, leaf.shape, strict=True)]
        first, end, _ = np.asarray(bounds, int).reshape(-1, 3).T[..., None]
        here = ((at >= first) & (at < end)).all(axis=0)
        if shard.replica_id == 0 and here.any():
            # On a CPU np.asarray gives the array itself; elsewhere it would copy the whole array.
            data = np.asarray(shard.data) if jax.default_backend() == "cpu" else shard.data
            values[here] = np.asarray(data[tuple((at - first)[:, here])], np.float32)
    return values


def load_model(
    model: str | pathlib.Path,
    dtype: str | None = None,
    *,
    offline: bool = False,
    mesh: Mesh | None = None,
    weight_dtype: str | None = None,
) -> LoadedModel:
    """Load a GGUF file, or what `models.checkpoint_directory` takes, for `models.load`'s dtypes and mesh.

    See there for errors. Without a dtype it is float32 on a CPU and bfloat16 elsewhere. ``offline`` forbids the download of
    an absent model.
    """
    return of_loaded(models.load(model, dtype, offline=offline, mesh=mesh, weight_dtype=weight_dtype))


def check_system(template: models.ChatTemplate | None, system: str | None) -> None:
    """Raise ``ValueError`` if there is a text of a system turn, and no chat template that could hold it."""
    if template is None and system is not None:
        raise ValueError(f"system belongs to a chat template, which this run does not have, got {system!r:.60}")


def forms_asked(directory: pathlib.Path) -> str:
    """Say which forms of question the shipped model answers; "" for a model in another directory."""
    if directory != models.builtin_directory():
        return ""
    return (
        "the shipped model answers only the forms of question that it was trained for: needles, variables, pass keys, number "
        "strings and values of keys (models/builtin/MODEL_CARD.md); for other questions name a language model by --model"
    )


def of_loaded(model: models.Loaded) -> LoadedModel:
    """Convert a model that `models.load` has loaded."""
    return LoadedModel(**vars(model))
