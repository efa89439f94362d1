"""A decode step's query, rotated to score and to attend, and whether the step reuses its selection (TokenSelect)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import axes
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.query.step_query import pallas_triton, reference
from pallas_kernels.query.step_query.result import StepQuery

__all__ = ["STEP_QUERY", "StepQuery", "step_query"]

STEP_QUERY = Operation(
    "step_query",
    {
        "pallas_triton": Implementation(pallas_triton.step_query, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.step_query),
    },
)


def step_query(
    query: jax.Array,
    last: jax.Array,
    ready: jax.Array,
    hits: jax.Array,
    refreshes: jax.Array,
    cursor: jax.Array,
    position: jax.Array,
    *,
    budget: jax.Array | int,
    theta: jax.Array | float,
    inv_freq: jax.Array,
    num_sink: int,
    num_local: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> StepQuery:
    """Rotate the query of a decode step to score and to attend, and compare it with the query of the last step that selected.

    On a GPU this is one kernel; without it, each of a dozen small results would be a launch of its own.

    Differentiable: through ``xla``, the queries only.

    Args:
        query: [B, H, G, D], not rotated.
        last: float32 [B, H, G, D], the query of the last step that selected, not rotated.
        ready: bool [B], whether some step has selected.
        hits: int32 [B], steps so far that reused a selection.
        refreshes: int32 [B], steps so far that selected.
        cursor: int32 [B], tokens stored, the step's own included.
        position: int32 [B], position of the step's token; a row with a negative one does not change.
        budget: int32 scalar, tokens to select. A row selects if more than ``num_sink + budget + num_local`` are stored.
        theta: float32 scalar. A step whose cosine with ``last``, over all heads together, is at least this reuses the
            selection. Devices that share the heads compare all of them together.
        inv_freq: float32 [D/2], radians per place.
        num_sink: first tokens, which are always attended to.
        num_local: newest tokens, which are no candidates; also the place from which the query scores.
        implementation: "pallas_triton" (GPU; D a power of two), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Raises:
        ValueError: the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    knobs = jnp.asarray(budget, jnp.int32), jnp.asarray(theta, jnp.float32), jnp.asarray(inv_freq)
    products = None  # a kernel sums over the heads itself, but it cannot sum over devices
    if axes.is_split(axes.MODEL):
        products = axes.total(reference.products(query.astype(jnp.float32), last))
    args = query, last, ready, hits, refreshes, cursor, position, *knobs, products
    sizes = {"num_sink": num_sink, "num_local": num_local}
    return STEP_QUERY.run(*args, **sizes, implementation=implementation, platform=platform)
