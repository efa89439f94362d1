"""A decode step's query, rotated to score and to attend, and whether the step reuses its selection (TokenSelect)."""

from typing import Annotated

import jax.numpy as jnp
from jax import Array

from pallas_kernels import axes
from pallas_kernels.dispatch import Operation
from pallas_kernels.query.tokenselect.step_query import pallas_mosaic_gpu, pallas_triton, reference
from pallas_kernels.query.tokenselect.step_query.result import StepQuery
from pallas_kernels.signature import declared

__all__ = ["STEP_QUERY", "StepQuery", "step_query"]

STEP_QUERY = Operation.of("step_query", pallas_triton, pallas_mosaic_gpu, reference)


@declared(STEP_QUERY, derivative="through ``xla``, the queries only")
def step_query(
    query: Annotated[Array, "B H G D"],
    last: Annotated[Array, "float32 B H G D"],
    ready: Annotated[Array, "bool B"],
    hits: Annotated[Array, "int32 B"],
    refreshes: Annotated[Array, "int32 B"],
    cursor: Annotated[Array, "int32 B"],
    position: Annotated[Array, "int32 B"],
    *,
    budget: Annotated[Array | int, "int32 []"],
    theta: Annotated[Array | float, "float32 []"],
    inv_freq: Annotated[Array, "float32 D/2"],
    num_sink: int,
    num_local: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> StepQuery:
    """Rotate the query of a decode step to score and to attend, and compare it with the query of the last step that selected.

    On a GPU this is one kernel; without it, each of a dozen small results would be a launch of its own.

    Args:
        query: not rotated.
        last: the query of the last step that selected, not rotated.
        ready: whether some step has selected.
        hits: steps so far that reused a selection.
        refreshes: steps so far that selected.
        cursor: tokens stored, the step's own included.
        position: position of the step's token; a row with a negative one does not change.
        budget: tokens to select. A row selects if more than ``num_sink + budget + num_local`` are stored.
        theta: a step whose cosine with ``last``, over all heads together, is at least this reuses the selection. Devices that
            share the heads compare all of them together.
        inv_freq: radians per place.
        num_sink: first tokens, which are always attended to.
        num_local: newest tokens, which are no candidates; also the place from which the query scores.
        implementation: "pallas_triton" takes D a power of two.
    """
    knobs = jnp.asarray(budget, jnp.int32), jnp.asarray(theta, jnp.float32), jnp.asarray(inv_freq)
    products = None  # a kernel sums over the heads itself, but it cannot sum over devices
    if axes.is_split(axes.MODEL):
        products = axes.total(reference.products(query.astype(jnp.float32), last))
    args = query, last, ready, hits, refreshes, cursor, position, *knobs, products
    sizes = {"num_sink": num_sink, "num_local": num_local}
    return STEP_QUERY.run(*args, **sizes, implementation=implementation, platform=platform)
