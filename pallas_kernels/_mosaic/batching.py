"""Kernels for TPUs under ``jax.vmap``: the mapped axis joins the rows of the batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def rows_together(run: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``run`` usable under ``vmap``; its arguments and its results are arrays whose first axis is B.

    Pallas itself would run a kernel that has operands in scalar memory once for each index of the mapped axis.
    """
    call = custom_vmap(run)

    def mapped(size: int, batched: list[Any], *arrays: Any) -> tuple[Any, Any]:
        def folded(x: jax.Array, own: bool) -> jax.Array:
            x = x if own else jnp.broadcast_to(x[None], (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        results = call(*jax.tree.map(folded, arrays, tuple(batched)))
        results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    call.def_vmap(mapped)
    return call
