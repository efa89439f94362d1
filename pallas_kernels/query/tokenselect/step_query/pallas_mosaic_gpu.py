"""A decode step's query through Mosaic GPU: a program of one warpgroup for each row of the batch."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.pallas import pl
from pallas_kernels._mosaic_gpu.threads import THREADS
from pallas_kernels.query.tokenselect.step_query.result import StepQuery

MOST = 2**15  # elements of a row's query, in registers
TAKES = f"{arrays.HOPPER}, D a power of two up to {2 * THREADS}, H * G * D up to {MOST}"


def _body(*refs, elements, dim, num_sink, num_local, given):
    # query [B, H, G, D]; cursor, position [B]; budget, theta [1]; inv_freq [D/2]; products [B, 3] if given; then in place:
    # last [B, H, G, D], ready, hits, refreshes [B]; and the other results.
    query_ref, cursor_ref, position_ref, budget_ref, theta_ref, inv_freq_ref, *refs = refs
    products_ref, refs = refs[:given], refs[given:]
    last_ref, ready_ref, hits_ref, refreshes_ref, mean_ref, rotated_ref, miss_ref, stop_ref, wanted_ref = refs
    row, half = lax.axis_index("x"), dim // 2
    pair = arrays.counted(arrays.size_of(elements // 2))
    first = lax.div(pair, half) * dim + lax.rem(pair, half)
    places = [jnp.where(pair < elements // 2, row * elements + first + i, -1) for i in (0, half)]
    now, then = ([arrays.load(ref, place) for place in places] for ref in (query_ref, last_ref))
    cursor, position, ready, hits, refreshes = (
        arrays.scalar(ref, row) for ref in (cursor_ref, position_ref, ready_ref, hits_ref, refreshes_ref)
    )
    budget, theta = (arrays.scalar(ref, row * 0) for ref in (budget_ref, theta_ref))
    arrays.meet()  # all is read that may be written
    if given:
        of_now, of_then, of_both = (arrays.scalar(products_ref[0], row * 3 + i) for i in range(3))
    else:
        pairs = (now, now), (then, then), (now, then)
        of_now, of_then, of_both = (jnp.sum(a[0] * b[0] + a[1] * b[1]) for a, b in pairs)
    cosine = of_both / jnp.maximum(jnp.sqrt(of_now * of_then), 1e-30)
    limit = num_sink + budget + num_local
    sparse = (cursor > limit) & (position >= 0)
    hit = sparse & (ready > 0) & (cosine >= theta)
    miss = sparse & ~hit
    inv_freq = arrays.load(inv_freq_ref, lax.rem(arrays.counted(THREADS), half))
    # The query scores from place num_local, and attends from the last place of the list of tokens.
    for ref, place in ((mean_ref, jnp.int32(num_local)), (rotated_ref, jnp.minimum(cursor, limit) - 1)):
        angle = place.astype(jnp.float32) * inv_freq
        cos, sin = (arrays.repeated(x, pair.shape[0] // THREADS) for x in (jnp.cos(angle), jnp.sin(angle)))
        arrays.store(ref, places[0], now[0] * cos - now[1] * sin)
        arrays.store(ref, places[1], now[1] * cos + now[0] * sin)
    missed, one = miss.astype(jnp.int32), hit.astype(jnp.int32)
    arrays.put(ready_ref, row, jnp.maximum(ready, missed))
    arrays.put(hits_ref, row, hits + one)
    arrays.put(refreshes_ref, row, refreshes + missed)
    arrays.put(miss_ref, row, missed)
    arrays.put(stop_ref, row, jnp.where(miss, cursor - num_local, 0))
    arrays.put(wanted_ref, row, jnp.where(miss, budget, 0))

    @pl.when(miss)
    def _():
        for place, x in zip(places, now, strict=True):  # in place: a row that does not select keeps its last query
            arrays.store(last_ref, place, x)


def step_query(
    query, last, ready, hits, refreshes, cursor, position, budget, theta, inv_freq, products=None, *, num_sink, num_local
):
    """Rotate the query of a decode step, and decide whether the step selects."""
    batch, heads, group, dim = query.shape
    body = functools.partial(
        _body, elements=heads * group * dim, dim=dim, num_sink=num_sink, num_local=num_local, given=products is not None
    )
    shape, flag, number = jax.ShapeDtypeStruct, *(jax.ShapeDtypeStruct((batch,), x) for x in (jnp.bool_, jnp.int32))
    out_type = shape(query.shape, jnp.float32), shape(query.shape, query.dtype), flag, number, number
    operands = query, cursor, position, budget.reshape(1), theta.reshape(1), inv_freq
    last, ready, hits, refreshes, mean, rotated, miss, stop, wanted = arrays.in_place(
        body, (last, ready, hits, refreshes), out_type=out_type, grid=(batch,)
    )(*operands, *([] if products is None else [products]))
    return StepQuery(mean, rotated, last, ready, hits, refreshes, miss, stop, wanted)


def check(query, *_, **__):
    """Raise ``NotImplementedError`` for other GPUs, dtypes, head dims and queries than the kernel takes."""
    arrays.check_hopper()
    arrays.check_floats(query)
    _, heads, group, dim = query.shape
    if dim & (dim - 1) or not 2 <= dim <= 2 * THREADS or heads * group * dim > MOST:
        raise NotImplementedError(f"got query {query.shape}, expected D a power of two, at most {MOST} elements of a row")
