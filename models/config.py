"""The description of a decoder that a user holds: its architecture, its files' ``config.json``, and the decoder itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import errors

from pallas_kernels.formats.coded_matrix import CodedMatrix

from .files.hf import config as hf_config
from .layers.transformer import Transformer
from .sizes.architecture import Architecture

_WRONG_PARAMS = (
    errors.ApplyScopeInvalidVariablesStructureError,
    errors.ApplyScopeInvalidVariablesTypeError,
    errors.ScopeCollectionNotFound,
    errors.ScopeParamNotFoundError,
    errors.ScopeParamShapeError,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Architecture):
    """Sizes and switches of one decoder; hashable, so it can be part of a jit key.

    The fields are those of `models.sizes.architecture.Architecture`.

    Raises:
        ValueError: a size is not positive, ``num_q_heads`` is no multiple of ``num_kv_heads``, ``head_dim`` is odd, the
            dtype or the family is unknown, or ``windows`` has another number of layers.
    """

    can_guess: ClassVar[bool] = True  # `apply` takes ``guess``

    @property
    def can_probe(self) -> bool:
        """Whether `apply` takes ``nudges``: not in layers without keys, or with latent keys."""
        return self.latent is None and self.linear is None

    def __post_init__(self):
        super().__post_init__()
        hf_config.check_family(self.family)

    def apply(
        self,
        params: Any,
        tokens: jax.Array,
        attend: Any,
        states: tuple,
        *,
        last: jax.Array | None = None,
        guess: Collection[int] = (),
        nudges: Sequence[jax.Array] | None = None,
    ) -> tuple[jax.Array, tuple]:
        """Run the decoder; see `models.layers.transformer.Transformer` for shapes and errors.

        Raises:
            ValueError: ``params`` belong to another model, or have a dtype that is not floating-point.
        """
        return self._run(params, tokens, attend, tuple(states), last, guess, nudges)

    def embed(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Embed ``tokens`` int32 [B, T]: the hidden states [B, T, d] before the first layer. Errors are those of `apply`."""
        return self._run(params, tokens, method="begin")

    def run_layer(self, params: Any, layer: int, hidden: jax.Array, attend: Any, state: Any) -> tuple[jax.Array, Any]:
        """Run one layer on hidden states [B, T, d]; return those behind the layer, and the layer's new state."""
        return self._run(params, layer, hidden, attend, state, method="run_layer")

    def alone(self, params: Any, layer: int) -> tuple[ModelConfig, Any] | None:
        """Return ``layer`` as a model of one layer, and its parameters; None with layers of linear attention."""
        if self.linear is not None:
            return None
        experts = self.experts if self.experts is not None and layer in self.experts.layers else None
        model = dataclasses.replace(
            self,
            num_layers=1,
            windows=self.windows[layer : layer + 1],
            ropes=self.ropes[layer : layer + 1],
            experts=None if experts is None else dataclasses.replace(experts, layers=(0,)),
        )
        return model, None if params is None else {"layers_0": params[f"layers_{layer}"]}

    def head(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Compute the logits float32 [B, V] of hidden states [B, d] behind the last layer."""
        return self._run(params, hidden, method="end")

    def _run(self, params: Any, *args: Any, method: str | None = None) -> Any:
        """Run a method of the decoder; without a name all of it."""
        plain = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, CodedMatrix))
        plain = [leaf for leaf in plain if not isinstance(leaf, CodedMatrix)]
        kinds = {str(leaf.dtype) for leaf in plain if not jnp.issubdtype(leaf.dtype, jnp.floating)}
        if kinds:
            raise ValueError(f"params must be floating-point numbers, got {', '.join(sorted(kinds))}")
        try:
            return Transformer(self).apply({"params": params}, *args, method=method)
        except _WRONG_PARAMS as error:
            reason = str(error).partition(" (http")[0]  # Flax adds the address of its manual
            raise ValueError(
                f"params must belong to this model of {self.num_layers} layers and hidden_size={self.hidden_size}, got "
                f"other parameters: {reason}"
            ) from error

    @classmethod
    def from_hf(cls, hf: dict[str, Any], dtype: str | None = None) -> ModelConfig:
        """Translate a Hugging Face ``config.json``.

        Args:
            hf: the file as a dict; its ``model_type`` is one of `models.files.hf.config.MODEL_TYPES` (Yi's is llama).
            dtype: dtype of computation, or None for the file's dtype. float16 becomes float32, because bfloat16 would
                drop some of its bits.

        Raises:
            ValueError: this decoder would not compute exactly what the file declares.
            TypeError: ``hf`` is no dict.
        """
        if not isinstance(hf, dict):
            raise TypeError(f"expected the dict of a config.json, got {type(hf).__name__} (from_pretrained reads a folder)")
        fields = hf_config.read(hf)
        if dtype is not None:
            fields["dtype"] = dtype
        return cls(**fields)

    def to_hf(self) -> dict[str, Any]:
        """Return a dict for ``config.json`` that ``transformers`` and `from_hf` can read.

        Raises:
            ValueError: no family of ``transformers``, or not the one in ``family``, has this combination of switches.
        """
        return hf_config.write(vars(self))
