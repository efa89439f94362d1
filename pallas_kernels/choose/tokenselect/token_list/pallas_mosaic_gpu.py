"""A row's list of tokens through Mosaic GPU: a program of one warpgroup for each row and block of entries."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays

BLOCK = 512  # entries of a program
TAKES = arrays.HOPPER


def _body(fresh_ref, length_ref, awake_ref, budget_ref, *refs, capacity, width, num_sink, num_local, kept):
    # fresh [B, K]; length, awake [B]; budget [1]; miss [B] if tokens were chosen before, and these [B, K], in place; then
    # token, used [B, E].
    miss_ref, refs = refs[:kept], refs[kept:]
    *chosen_ref, token_ref, used_ref = refs
    row = lax.axis_index("x")
    place = lax.axis_index("y") * BLOCK + arrays.counted(BLOCK)
    item = place - num_sink
    listed = jnp.where((item >= 0) & (item < capacity), row * capacity + item, -1)
    picked = arrays.load(fresh_ref, listed)
    if kept:
        # In place without a race: the thread that reads an entry writes it.
        old = arrays.load(chosen_ref[0], listed)
        picked = jnp.where(arrays.scalar(miss_ref[0], row) > 0, picked, old)
        arrays.store(chosen_ref[0], listed, picked)
    # Sinks, then chosen tokens, then newest tokens, counted from the row's end. A row that fits lists all its tokens.
    length, budget = arrays.scalar(length_ref, row), arrays.scalar(budget_ref, row * 0)
    limit = num_sink + budget + num_local
    token = jnp.where(place < num_sink + budget, picked, place + (length - limit))
    token = jnp.where((place < num_sink) | (length <= limit), place, token)
    used = (place < jnp.minimum(length, limit)) & (arrays.scalar(awake_ref, row) >= 0)
    at = jnp.where(place < width, row * width + place, -1)
    arrays.store(token_ref, at, jnp.where(used, token, 0))
    arrays.store(used_ref, at, used.astype(jnp.int32))


def token_list(fresh, length, awake, budget, *old, num_sink, num_local, extra):
    """List the sinks, the chosen tokens and the newest tokens of each row."""
    batch, capacity = fresh.shape
    width = num_sink + capacity + num_local + extra
    body = functools.partial(_body, capacity=capacity, width=width, num_sink=num_sink, num_local=num_local, kept=bool(old))
    lists = [jax.ShapeDtypeStruct((batch, width), dtype) for dtype in (jnp.int32, jnp.bool_)]
    run = arrays.in_place(body, old[1:], out_type=lists, grid=(batch, -(-width // BLOCK)))
    results = run(fresh, length, awake, budget.reshape(1), *old[:1])
    return tuple(results) if old else (fresh, *results)


def check(fresh, length, awake, budget, *old, num_sink, num_local, extra):
    """Raise ``NotImplementedError`` for other GPUs."""
    arrays.check_hopper()
