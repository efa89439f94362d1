"""The subject of a training run: all parameters of a model, or an adapter of a base whose parameters stay frozen."""

from __future__ import annotations

import abc
import dataclasses
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

import models
from models.files.adapter import KERNELS, AdapterConfig, adapted, fingerprint, init_adapter, save_adapter, stretched

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def stack_layers(params: Any) -> dict[str, Any]:
    """Stack the parameters of all layers, so that one compiled layer runs them all: {"layers": leaves [L, ...], ...}."""
    names = [name for name in params if name.startswith("layers_")]
    layers = [params[f"layers_{i}"] for i in range(len(names))]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return {**{name: leaf for name, leaf in params.items() if name not in names}, "layers": stacked}


class Subject(abc.ABC):
    """The subject of a training run.

    Attributes:
        config: the model, with the compute dtype.
        frozen: arrays that training reads and does not change.
        teacher: the model with the frozen parameters, whose predictions of prose are to stay; None without a teacher.
    """

    config: models.ModelConfig
    frozen: Any
    teacher: models.ModelConfig | None

    @property
    @abc.abstractmethod
    def identity(self) -> dict[str, Any]:
        """Values, besides the course, that must not change between a run and its continuation; JSON values."""

    @abc.abstractmethod
    def initial(self, seed: int) -> Any:
        """Make the trained arrays at the beginning, float32."""

    @abc.abstractmethod
    def params(self, frozen: Any, trained: Any) -> dict[str, Any]:
        """Build the model's parameters with stacked layers (see `stack_layers`); differentiable in ``trained``."""

    @abc.abstractmethod
    def export(self, directory: pathlib.Path, trained: Any) -> None:
        """Write the trained arrays in the form in which they are loaded."""


@dataclasses.dataclass(frozen=True)
class WholeModel(Subject):
    """All parameters of a new model.

    Attributes:
        config: the model.
        tokenizer: directory with its tokenizer files.
        frozen: nothing.
        teacher: none.
    """

    config: models.ModelConfig
    tokenizer: pathlib.Path
    frozen: Any = ()
    teacher: models.ModelConfig | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """No values: the course determines the model."""
        return {}

    def initial(self, seed: int) -> Any:
        """Draw random parameters."""
        return models.random_params(dataclasses.replace(self.config, dtype="float32"), jax.random.key(seed))

    def params(self, frozen: Any, trained: Any) -> dict[str, Any]:
        """Stack the layers of the trained parameters."""
        return stack_layers(trained)

    def export(self, directory: pathlib.Path, trained: Any) -> None:
        """Write the model in Hugging Face layout and bfloat16, with its tokenizer."""
        models.save_pretrained(directory, jax.device_get(trained), dataclasses.replace(self.config, dtype="bfloat16"))
        for name in TOKENIZER_FILES:
            shutil.copyfile(self.tokenizer / name, directory / name)


@dataclasses.dataclass(frozen=True)
class Adapter(Subject):
    """Low-rank factors beside a base; see `models.files.adapter`.

    Attributes:
        config: the adapted model: the base with other rotary frequencies, or a longer context.
        frozen: the base's parameters with stacked layers.
        teacher: the base.
        about: the adapter's base and sizes.
        base: the base's parameters.
    """

    config: models.ModelConfig
    frozen: Any
    teacher: models.ModelConfig
    about: AdapterConfig
    base: Any

    @classmethod
    def of(cls, name: str, params: Any, config: models.ModelConfig, rank: int, stretch: float) -> Adapter:
        """Make an adapter for a base.

        Args:
            name: the base's name.
            params: the base's parameters.
            config: the base.
            rank: columns of the first factors.
            stretch: the adapted model's context is longer by this factor.
        """
        about = AdapterConfig(base=name, fingerprint=fingerprint(params), rank=rank, stretch=stretch)
        return cls(stretched(config, stretch), stack_layers(params), config, about, params)

    @property
    def identity(self) -> dict[str, Any]:
        """The base, and the adapter's size."""
        return dataclasses.asdict(self.about)

    def initial(self, seed: int) -> Any:
        """Draw factors that change nothing yet."""
        return init_adapter(self.base, self.config.num_layers, self.about.rank, jax.random.key(seed))

    def params(self, frozen: Any, trained: Any) -> dict[str, Any]:
        """Build the parameters of the adapted base."""
        layers, factors = flatten_dict(frozen["layers"], sep="/"), flatten_dict(trained, sep="/")
        for path in KERNELS:
            name = path.removesuffix("/kernel")
            layers[path] = adapted(layers[path], factors[f"{name}/a"], factors[f"{name}/b"])
        return {**frozen, "layers": unflatten_dict(layers, sep="/")}

    def export(self, directory: pathlib.Path, trained: Any) -> None:
        """Write the adapter's two files."""
        save_adapter(directory, jax.device_get(trained), self.about)
