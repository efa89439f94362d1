"""Gemma 1, 2 and 3 of Google's package ``gemma`` under kvjax: its own module and parameters, text alone.

The package's parts compute all but attention. Flax hands each call of a module ``Attention`` to this file, which computes the
module's projections and gives them to the caller's ``attend``.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from ..sizes.parts import LayerRope
from ..sizes.rope_scaling import LinearScaling


@dataclasses.dataclass(frozen=True)
class GemmaModel:
    """A `kvjax.protocol.typing.Model` around a text model of ``gemma.gm.nn``, such as ``gm.nn.Gemma3_1B()``.

    Its parameters are the package's, as ``gm.ckpts.load_params`` or ``transformer.init(...)["params"]`` returns them.

    Raises:
        ValueError: the module is a Gemma 3n or 4, whose layers share keys and differ in their heads.
    """

    transformer: Any  # the package's Linen module, which is hashable
    max_position_embeddings: int = 131_072  # which the package does not know; 32,768 for the 270M and 1B, 8,192 for Gemma 2
    eos_token_ids: tuple[int, ...] = (1, 106)  # <eos> and <end_of_turn> of Gemma 3; of Gemma 2: (1, 107)
    dtype: str = "bfloat16"  # of the stored keys and values: that of the parameters

    rope_scaling: ClassVar[None] = None  # `ropes` has each layer's

    def __post_init__(self):
        newer = [name for name in ("per_layer_input_dim", "global_key_size") if hasattr(self.config, name)]
        if newer:
            raise ValueError(
                f"transformer: {type(self.transformer).__name__} has layers that share keys or differ in their heads "
                f"({newer[0]}), expected a Gemma 1, 2 or 3"
            )

    @property
    def config(self) -> Any:
        """The package's ``TransformerConfig``."""
        return self.transformer.config

    @property
    def num_layers(self) -> int:
        return len(self.config.attention_types)

    @property
    def num_q_heads(self) -> int:
        return self.config.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.config.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.config.head_dim

    @property
    def hidden_size(self) -> int:
        return self.config.embed_dim

    @property
    def vocab_size(self) -> int:
        return self.config.num_embed

    @property
    def rope_theta(self) -> float:
        return float(self.config.global_base_frequency)

    @property
    def local(self) -> tuple[bool, ...]:
        """Whether each layer has a sliding window."""
        return tuple(kind.name == "LOCAL_SLIDING" for kind in self.config.attention_types)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.config.sliding_window_size if near else None for near in self.local)

    @property
    def ropes(self) -> tuple[LayerRope, ...]:
        def rope(near: bool) -> LayerRope:
            theta, factor = (
                getattr(self.config, f"{'local' if near else 'global'}_{what}") for what in ("base_frequency", "scale_factor")
            )
            return LayerRope(theta=float(theta), scaling=None if factor == 1 else LinearScaling(factor=float(factor)))

        return tuple(map(rope, self.local))

    @property
    def attention_softcap(self) -> float | None:
        return self.config.attn_logits_soft_cap

    def apply(
        self, params: Any, tokens: jax.Array, attend: Callable, states: tuple, *, last: jax.Array | None = None
    ) -> tuple[jax.Array, tuple]:
        """Run the package's layers on ``tokens`` int32 [B, T]; see `kvjax.protocol.typing.Model.apply`."""

        def run(model: Any) -> tuple[jax.Array, tuple]:
            x, new = model.embedder.encode(tokens), []
            for layer, state in enumerate(states):
                x, state = self._block(model, layer, x, attend, state)
                new.append(state)
            x = x if last is None else jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
            return self._logits(model, x), tuple(new)

        return self.transformer.apply({"params": params}, method=run)

    def embed(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Embed ``tokens``; see `kvjax.protocol.typing.LayeredModel`, also for the next two."""
        return self.transformer.apply({"params": params}, method=lambda model: model.embedder.encode(tokens))

    def run_layer(self, params: Any, layer: int, hidden: jax.Array, attend: Callable, state: Any) -> tuple[jax.Array, Any]:
        """Run one of the package's layers."""
        run = lambda model: self._block(model, layer, hidden, attend, state)  # noqa: E731
        return self.transformer.apply({"params": params}, method=run)

    def head(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Compute logits."""
        return self.transformer.apply({"params": params}, method=lambda model: self._logits(model, hidden))

    def _block(self, model: Any, layer: int, x: jax.Array, attend: Callable, state: Any) -> tuple[jax.Array, Any]:
        new = []

        def answer(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
            if (type(context.module).__name__, context.method_name) != ("Attention", "__call__"):
                return call(*args, **kwargs)
            out, after = self._attended(context.module, args[0], lambda *qkv: attend(layer, state, *qkv))
            new.append(after)
            return None, out  # in the place of the package's cache

        with nn.intercept_methods(answer):
            x = model.blocks[layer](x, None, None, None)[1]  # positions, cache and mask are read by `Attention` alone
        return x, new[0]

    def _logits(self, model: Any, x: jax.Array) -> jax.Array:
        logits, cap = model.embedder.decode(model.final_norm(x)).astype(jnp.float32), self.config.final_logit_softcap
        return logits if cap is None else jnp.tanh(logits / cap) * cap

    def _attended(self, module: Any, x: jax.Array, attend: Callable) -> tuple[jax.Array, Any]:
        """Compute a module ``Attention`` of ``x`` [B, T, d] by ``attend``; return its output and the layer's new state."""
        if module.use_qkv_einsum:
            q, k, v = module.qkv_einsum("BTD,SNDH->SBTNH", x)
        else:
            q = module.q_einsum("BTD,NDH->BTNH", x)
            k, v = module.kv_einsum("BSD,CKDH->CBSKH", x)
        if module.use_qk_norm:
            q, k = module._query_norm(q), module._key_norm(k)
        scale = module.query_pre_attn_scalar * math.sqrt(self.head_dim)  # attention divides by sqrt(D), under every method
        q = q * jnp.asarray(scale, q.dtype)
        if k.dtype != self.dtype:
            raise ValueError(f"dtype: got {self.dtype!r}, expected {str(k.dtype)!r}, that of the keys of these parameters")
        rows, count, heads, dim = q.shape
        grouped = q.reshape(rows, count, self.num_kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
        out, state = attend(grouped, k.swapaxes(1, 2), v.swapaxes(1, 2))
        out = out.transpose(0, 3, 1, 2, 4).reshape(rows, count, heads, dim).astype(x.dtype)
        return module.attn_vec_einsum("BTNH,NHD->BTD", out), state

    def weight_bytes(self, params: Any, rows: int) -> int:
        """Count the bytes of ``params`` that a decode step reads: all, since the table is the LM head too."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(params))
