"""The cache of a whole model: what `kvjax.prefill` returns and the other functions take and return."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from kvjax.mesh.sharding import Plan
from kvjax.protocol.describe import count_rows, describe_numbers, megabytes, show_value
from kvjax.protocol.typing import Model, pytree, static, traced
from pallas_kernels.host import on_host, to_device, to_host


@pytree
class Cache:
    """Everything that `generate` needs to go on: a pytree, which functions take and return."""

    layers: tuple[Any, ...] = traced("the method's state of each layer; every leaf has axis B first")
    shared: Any = traced("the method's state that all layers read, written once per token")
    method: Any = traced("the method that made the layers")
    length: Array = traced("int32 [B], tokens seen so far, which is the position of the next token")
    logits: Array = traced("float32 [B, V], of the next token")
    model: Model = static("the model description that made it")
    weights: str = static('fingerprint of the parameters\' names and shapes, "" if unknown', default="")
    plan: Plan | None = static("how it is spread over devices, None for one device", default=None)
    kv_dtype: str | None = static("of stored keys and values, None for the model's dtype", default=None)

    @property
    def batch(self) -> int:
        """Rows B."""
        return self.length.shape[0]

    def __repr__(self) -> str:
        if not isinstance(self.length, jax.Array):  # a placeholder of a tree that JAX rebuilds
            return f"Cache(length={self.length!r}, ...)"
        arrays = [x for x in jax.tree.leaves((self.layers, self.shared)) if isinstance(x, jax.Array)]
        sizes = [(x.size * x.dtype.itemsize, on_host(x)) for x in arrays]
        total, in_host = sum(size for size, _ in sizes), sum(size for size, host in sizes if host)
        model, method = self.model, show_value(self.method, brief=True)
        return (
            f"Cache({count_rows(self.length)}, {describe_numbers(self.length)} tokens, {method}, "
            f"{len(self.layers)} layers of {model.num_kv_heads} KV heads x {model.head_dim}, {megabytes(total)}"
            + (f", in {self.kv_dtype}" if self.kv_dtype else "")
            + (f", {megabytes(in_host)} of them in host memory" if in_host else "")
            + (f", over {self.plan})" if self.plan else ")")
        )


def check_alive(cache: Cache) -> None:
    """Refuse an object that is no cache, and a cache that was consumed."""
    if not isinstance(cache, Cache):
        raise ValueError(f"expected a Cache, as prefill returns it and a Generation has, got {type(cache).__name__}")
    # A NumPy view of an array keeps JAX from deleting it, so any array that is gone tells.
    arrays = [x for x in jax.tree.leaves(cache) if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    if any(x.is_deleted() for x in arrays):
        raise ValueError(
            "this cache was consumed by an earlier generate, stream, extend or decode_step: use the cache that this call "
            "returned, or kvjax.fork the cache before the call"
        )


def repeat_rows(cache: Cache, copies: int) -> Cache:
    """Run `fork` without its checks."""

    def copy(x: Array) -> Array:  # outside of a trace no shape needs a program
        return jnp.copy(x) if isinstance(x, Tracer) else jax.device_put(x, may_alias=False)

    def repeat(x: Array) -> Array:
        if copies == 1:
            return copy(x)
        repeated = jnp.repeat(to_device(x), copies, axis=0)
        return to_host(repeated) if on_host(x) else repeated

    def rows(tree: Any) -> Any:
        return jax.tree.map(repeat, tree)

    return dataclasses.replace(
        cache,
        layers=rows(cache.layers),
        shared=rows(cache.shared),
        method=jax.tree.map(copy, cache.method),
        length=rows(cache.length),
        logits=rows(cache.logits),
    )
