"""A tiny model, so that methods can be tested without a checkpoint and without any package but JAX."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.protocol.method import num_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A `kvjax.protocol.typing.Model`: layers of attention between two embeddings, without MLPs.

    ``params``: embed [V, E] and head [E, V]; for every layer qkv [E, (H * G + 2 H) * D] and out [H * G * D, E].
    """

    num_layers: int = 2
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    hidden_size: int = 32  # E
    vocab_size: int = 61
    max_position_embeddings: int = 160
    rope_theta: float = 1e4
    rope_scaling: Any = None
    eos_token_ids: tuple[int, ...] = (60,)
    dtype: str = "float32"
    can_guess: ClassVar[bool] = True
    can_probe: ClassVar[bool] = True
    # The shape of the tokens of every trace; models that differ in this list alone are equal.
    traces: list[tuple[int, ...]] = dataclasses.field(default_factory=list, compare=False, repr=False)

    def random_params(self, seed: int = 0) -> dict[str, Any]:
        """Draw random parameters, large enough that attention is not flat."""
        rng = np.random.default_rng(seed)
        size, dim, heads = self.hidden_size, self.head_dim, self.num_q_heads + 2 * self.num_kv_heads

        def draw(*shape: int) -> jax.Array:
            return jnp.asarray(rng.normal(0, shape[0] ** -0.5, shape), self.dtype)

        layers = [
            {"qkv": 2 * draw(size, heads * dim), "out": draw(self.num_q_heads * dim, size)} for _ in range(self.num_layers)
        ]
        return {"embed": draw(self.vocab_size, size), "layers": layers, "head": 2 * draw(size, self.vocab_size)}

    def apply(
        self,
        params: Any,
        tokens: jax.Array,
        attend: Callable,
        states: tuple,
        *,
        last: jax.Array | None = None,
        guess: Collection[int] = (),
        nudges: Sequence[jax.Array] | None = None,
    ) -> tuple[jax.Array, tuple]:
        """Run all layers on ``tokens`` int32 [B, T]; see `kvjax.protocol.typing.Model.apply`."""
        x, before, new = self.embed(params, tokens), None, []
        for layer, state in enumerate(states):
            guessed = self._projected(params, layer, before)[:1] if before is not None and layer in guess else []
            before = x
            heard = attend
            if nudges is not None:
                kernel = params["layers"][layer]["out"].reshape(self.num_kv_heads, -1, self.head_dim, self.hidden_size)
                heard = functools.partial(attend, written=(_normed(x), kernel))
            x, state = self.run_layer(params, layer, x, heard, state, *guessed)
            x = x if nudges is None else (x + nudges[layer]).astype(x.dtype)
            new.append(state)
        if nudges is not None:
            return x, tuple(new)
        if last is not None:
            x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
        return self.head(params, x), tuple(new)

    def embed(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Embed ``tokens``; see `kvjax.protocol.typing.LayeredModel`."""
        self.traces.append(tokens.shape)
        return params["embed"][tokens]

    def run_layer(
        self, params: Any, layer: int, hidden: jax.Array, attend: Callable, state: Any, *guess: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Run one layer; see `kvjax.protocol.typing.LayeredModel`. It gives ``guess`` to ``attend``."""
        out, state = attend(layer, state, *self._projected(params, layer, hidden), *guess)
        out = out.reshape(len(out), self.num_q_heads, -1, self.head_dim).swapaxes(1, 2).reshape(*hidden.shape[:2], -1)
        return hidden + out.astype(hidden.dtype) @ params["layers"][layer]["out"], state

    def alone(self, params: Any, layer: int) -> tuple["TinyModel", Any]:
        """Return one layer as a model; see `kvjax.protocol.typing.LayeredModel`."""
        return dataclasses.replace(self, num_layers=1), None if params is None else {"layers": [params["layers"][layer]]}

    def head(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Compute logits; see `kvjax.protocol.typing.LayeredModel`."""
        return (_normed(hidden) @ params["head"]).astype(jnp.float32)

    def _projected(self, params: Any, layer: int, x: jax.Array) -> list[jax.Array]:
        """Compute the queries, keys and values of a layer from hidden states [B, T, E]."""
        rows = (_normed(x) @ params["layers"][layer]["qkv"]).reshape(*x.shape[:2], -1, self.head_dim).swapaxes(1, 2)
        q, k, v = jnp.split(rows, (self.num_q_heads, self.num_q_heads + self.num_kv_heads), axis=1)
        return [q.reshape(len(q), self.num_kv_heads, -1, *q.shape[2:]), k, v]

    def weight_bytes(self, params: Any, rows: int) -> int:
        """Count the bytes of ``params`` that a decode step of ``rows`` rows reads."""
        return num_bytes(params) - (self.vocab_size - rows) * num_bytes(params["embed"]) // self.vocab_size


def _normed(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)
