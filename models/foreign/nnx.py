"""A decoder in ``flax.nnx`` under kvjax: its own module and parameters, with kvjax's attention and cache."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx

from ..sizes.parts import LayerRope


def projections(module: Any, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute q [B, T, N, D], k and v [B, T, H, D] of ``x`` [B, T, E] as `flax.nnx.MultiHeadAttention` does."""
    q, k, v = module.query(x), module.key(x), module.value(x)
    return (module.query_ln(q), module.key_ln(k), v) if module.normalize_qk else (q, k, v)


def output(module: Any, attended: jax.Array) -> jax.Array:
    """Compute what `flax.nnx.MultiHeadAttention` returns from ``attended`` [B, T, N, D]."""
    return module.out(attended)


class _InPlace:
    """Stands in a module's place while the model runs, and answers its calls; its attributes are the module's."""

    def __init__(self, module: Any, answer: Callable):
        self.module, self.answer = module, answer

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
        return self.answer(self.module, x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NNXModel:
    """A `kvjax.protocol.typing.Model` around a module of ``flax.nnx``, whose layers call a module ``attention`` once each.

    Make it with `of`. ``project(module, x)`` returns q [B, T, N, D], k and v [B, T, H, D] of ``x`` [B, T, E], before RoPE.
    ``output(module, attended)`` returns what the attention module's call returns, from [B, T, N, D]. Other arguments of the
    call, such as a mask or a cache, are not read.
    """

    graph: Any  # nnx.GraphDef of the module
    run: Callable  # run(module, tokens, position) -> logits [B, T, V], both int32 [B, T]; not jitted. A function of a module
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str  # of the stored keys and values
    rope_theta: float | None = None  # None: queries and keys do not rotate
    rope_scaling: Any = None
    attention: type = nnx.MultiHeadAttention
    project: Callable = projections
    output: Callable = output
    head: str | None = None  # the attribute of the first module behind the layers, which then gets the last token alone
    eos_token_ids: tuple[int, ...] = ()

    takes_position: ClassVar[bool] = True

    @classmethod
    def of(cls, module: nnx.Module, *, attention: type = nnx.MultiHeadAttention, **fields: Any) -> tuple[Self, Any]:
        """Split a module into its description and its parameters, an `nnx.State`.

        Args:
            module: the decoder. Where ``fields`` do not give them, the sizes are the first attention module's ``num_heads``,
                ``num_kv_heads`` and ``head_dim``, and the dtype is that of its parameters.
            attention: the class of its attention modules.
            **fields: the other fields; ``run``, ``vocab_size`` and ``max_position_embeddings`` must be given.

        Raises:
            ValueError: the module has no such attention.
        """
        found = [node for _, node in nnx.iter_graph(module) if isinstance(node, attention)]
        if not found:
            raise ValueError(f"module: {type(module).__name__} has no {attention.__name__}; expected attention= its class")
        names = {"num_q_heads": "num_heads", "num_kv_heads": "num_kv_heads", "head_dim": "head_dim"}
        sizes = {field: getattr(found[0], name) for field, name in names.items() if field not in fields}
        dtype = str(jax.tree.leaves(nnx.state(found[0], nnx.Param))[0].dtype)
        graph, params = nnx.split(module)
        return cls(graph=graph, attention=attention, **{"num_layers": len(found), "dtype": dtype, **sizes, **fields}), params

    @property
    def ropes(self) -> tuple[LayerRope, ...]:
        still = LayerRope(theta=1.0, rotated=0)
        rope = still if self.rope_theta is None else LayerRope(theta=self.rope_theta, scaling=self.rope_scaling)
        return (rope,) * self.num_layers

    def apply(
        self, params: Any, tokens: jax.Array, attend: Callable, states: tuple, *, position: jax.Array,
        last: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple]:  # fmt: skip
        """Run the module on ``tokens`` int32 [B, T]; see `kvjax.protocol.typing.Model.apply`.

        Raises:
            ValueError: the module calls its attention another number of times than it has layers.
        """
        new = []

        def attended(module: Any, x: jax.Array) -> Any:
            if len(new) == self.num_layers:
                raise ValueError(f"run calls {self.attention.__name__} more often than num_layers={self.num_layers} times")
            q, k, v = self.project(module, x)
            rows, count, heads, dim = q.shape
            grouped = q.reshape(rows, count, self.num_kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
            out, state = attend(len(new), states[len(new)], grouped, k.swapaxes(1, 2), v.swapaxes(1, 2))
            new.append(state)
            return self.output(module, out.transpose(0, 3, 1, 2, 4).reshape(rows, count, heads, dim).astype(q.dtype))

        def cut(module: Any, x: jax.Array) -> Any:
            return module(x if last is None else jnp.take_along_axis(x, last[:, None, None], axis=1))

        model = nnx.merge(self.graph, params)  # a copy, which is thrown away
        _put(model, self.attention, attended)
        if self.head is not None:
            vars(model)[self.head] = _InPlace(getattr(model, self.head), cut)
        logits = self.run(model, tokens, position).astype(jnp.float32)
        if len(new) < self.num_layers:
            raise ValueError(f"run calls {self.attention.__name__} {len(new)} times, expected num_layers={self.num_layers}")
        if last is not None:
            at = last[:, None, None] if self.head is None else jnp.zeros_like(last)[:, None, None]
            logits = jnp.take_along_axis(logits, at, axis=1)[:, 0]
        return logits, tuple(new)

    def weight_bytes(self, params: Any, rows: int) -> int:
        """Count the bytes of ``params``; a decode step reads at most these."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def _put(module: Any, kind: type, answer: Callable) -> None:
    """Let ``answer`` stand in the place of every module of the class ``kind`` below a module."""
    for _, node in list(nnx.iter_graph(module)):
        if isinstance(node, nnx.Module) and not isinstance(node, kind):
            vars(node).update({name: _InPlace(x, answer) for name, x in vars(node).items() if isinstance(x, kind)})
