"""The kernels for long rows of `pallas_triton`, through jax-triton."""

import jax
import jax.numpy as jnp

from pallas_kernels._triton.jax_triton_call import launch, package
from pallas_kernels._triton.pallas import pl
from pallas_kernels.choose.kth_select import pallas_triton


def kth_select(score, budget, capacity, lse=None):
    """Return slots, keep and count, as the operation does; ``check`` refuses ``lse``."""
    from pallas_kernels.choose.kth_select import jax_triton_body

    shape, slots = score.shape[:2], score.shape[2]
    lists = shape[0] * shape[1]
    config = pallas_triton.Config().filled(capacity)
    width, most = min(config.width, config.nodes), min(capacity, slots)
    steps, segments = pallas_triton.stretches(lists, slots, config)
    flat = score.reshape(lists, slots)
    budget = jnp.broadcast_to(jnp.asarray(budget, jnp.int32), shape).reshape(lists)

    def whole(*sizes, dtype=jnp.int32):
        return jax.ShapeDtypeStruct((lists, *sizes), dtype)

    (node,) = launch(
        jax_triton_body.maxima, (flat,), (whole(config.nodes),), grid=(lists, config.nodes // width),
        num_warps=config.warps[0], SLOTS=slots, NODES=config.nodes, WIDTH=width,
        DEPTH=min(config.depth, pl.next_power_of_2(pl.cdiv(slots, config.nodes))),
    )  # fmt: skip
    stretch = steps * config.tile
    listed = whole(segments, stretch)
    candidates = launch(
        jax_triton_body.filter, (flat, node, budget), (whole(segments), whole(2), listed, listed), grid=(lists, segments),
        num_warps=config.warps[1], SLOTS=slots, NODES=config.nodes, STEPS=steps, TILE=config.tile, MOST=most,
    )  # fmt: skip
    outs = launch(
        jax_triton_body.choose, (*candidates, budget),
        (whole(capacity), whole(capacity, dtype=jnp.bool_), whole(), listed, listed), grid=(lists,),
        num_warps=config.warps[2], K=capacity, SEGMENTS=segments, STRETCH=stretch, TILE=config.hold, MOST=most,
    )  # fmt: skip
    return tuple(x.reshape(*shape, *x.shape[1:]) for x in outs[:3])


def check(score, budget, capacity, lse=None):
    """Raise ``NotImplementedError`` where "pallas_triton" does, for logits, and where the package is missing."""
    if lse is not None:
        raise NotImplementedError("got logits of query heads, expected one score for each entry")
    pallas_triton.check(score, budget, capacity)
    package()
