"""Attention probability of every slot as one Pallas Triton kernel.

Each program has a block of slots and goes through the queries that can see it, in blocks of (token, head of the group). A
decode step has one block of queries. In a prompt, the first slots are seen by most queries; their programs begin first.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_dtypes
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.shared_memory import fitting_block
from pallas_kernels.numerics import LOG2_E, finite_or_zero, product_precision

PART = 64  # slots of one program
TILE = 128  # pairs of a token and a query head per step
STAGES = 3  # depth of Triton's software pipeline over blocks of queries


def _kernel(asked_ref, query_ref, lse_ref, key_ref, position_ref, *refs, scale, tile, reduce):
    # Of a row: asked [T], the positions of the queries. Of one head: query [G, T, D], lse [G, T], key [S, D], position [S],
    # out [S]. Only if there are several blocks of queries: reach [N], the highest position up to each block.
    *reach_ref, out_ref = refs
    group, tokens = lse_ref.shape
    slots = position_ref.shape[0]
    slot = pl.program_id(2) * PART + jnp.arange(PART, dtype=jnp.int32)
    inside = slot < slots
    position = plt.load(position_ref.at[slot], mask=inside, other=-1)
    key = key_ref[jnp.minimum(slot, slots - 1), :]

    def weights(step):
        pair = step * tile + jnp.arange(tile, dtype=jnp.int32)
        token = jnp.minimum(jax.lax.div(pair, group), tokens - 1)
        member = jax.lax.rem(pair, group)
        asked = jnp.where(pair < group * tokens, asked_ref[token], -1)
        seen = (position >= 0)[None, :] & (position[None, :] <= asked[:, None])
        query = query_ref[member, token, :]
        logits = plt.dot(query, key, trans_b=True, precision=product_precision(query.dtype)) * (scale * LOG2_E)
        shift = finite_or_zero(lse_ref[member, token]) * LOG2_E
        return jnp.exp2(jnp.where(seen, logits - shift[:, None], -jnp.inf))

    join, over = (jnp.add, jnp.sum) if reduce == "sum" else (jnp.maximum, jnp.max)
    if not reach_ref:
        mass = weights(0)
    else:
        # Threads keep sums, or the largest weights, of their own until the end.
        reach = reach_ref[0][:]
        least = jnp.min(jnp.where(position >= 0, position, jnp.iinfo(jnp.int32).max))
        start = jnp.sum(reach < least, dtype=jnp.int32)
        mass = jnp.zeros((tile, PART), jnp.float32)
        mass = jax.lax.fori_loop(start, pl.cdiv(group * tokens, tile), lambda step, mass: join(mass, weights(step)), mass)
    plt.store(out_ref.at[slot], over(mass, axis=0), mask=inside)


def column_mass(query, key, lse, *, query_position, key_position, scale, limit, block, reduce, interpret=False):
    """Sum each slot's attention probability, or take the largest; ``interpret=True`` runs anywhere, slowly."""
    rows, heads, group, tokens, dim = query.shape
    slots, pairs = key.shape[2], group * tokens
    tile = _tile(query)
    blocks = pl.cdiv(pairs, tile)

    def of_row(length):
        return pl.BlockSpec((None, length), lambda b, h, i: (b, 0))

    def of_head(*shape):
        return pl.BlockSpec((None, None, *shape), lambda b, h, i: (b, h) + (0,) * len(shape))

    reach = []
    if blocks > 1:
        # The last block's reach is repeated, up to a power of two: it never counts, or the loop has no step.
        last = jnp.minimum((jnp.arange(pl.next_power_of_2(blocks), dtype=jnp.int32) + 1) * tile - 1, pairs - 1) // group
        reach = [jax.lax.cummax(query_position, axis=1)[:, last]]
    return triton_call(
        functools.partial(_kernel, scale=scale, tile=tile, reduce=reduce),
        grid=(rows, heads, pl.cdiv(slots, PART)),
        in_specs=[
            of_row(tokens),
            of_head(group, tokens, dim),
            of_head(group, tokens),
            of_head(slots, dim),
            of_head(slots),
            *(of_row(x.shape[1]) for x in reach),
        ],
        out_specs=of_head(slots),
        out_shape=jax.ShapeDtypeStruct((rows, heads, slots), jnp.float32),
        interpret=interpret,
        name="column_mass",
        num_stages=STAGES,
        num_warps=8 if query.dtype.itemsize == 4 else 4,  # with 4, products of float32 spill registers
    )(query_position, query, lse, key, key_position, *reach)


def check(query, key, lse, *, query_position, key_position, scale, limit, block, reduce):
    """Raise ``NotImplementedError`` for dtypes and sizes that the kernel does not take."""
    dim = query.shape[4]
    check_dtypes(query)
    if dim < 16 or dim > 256 or dim & (dim - 1) or not key.shape[2]:
        raise NotImplementedError(f"got head_dim {dim} and {key.shape[2]} slots, expected a power of two from 16 to 256")
    _tile(query)


def _tile(query):
    """Choose the pairs of a token and a query head per step, a power of two; ``NotImplementedError`` if none fits the GPU."""
    _, _, group, tokens, dim = query.shape

    def needed(tile):  # the keys, and the queries of each step that is on its way
        return query.dtype.itemsize * dim * (PART + tile * (STAGES if group * tokens > tile else 1))

    most = TILE if query.dtype.itemsize < 4 else TILE // 4  # products of float32 take many registers
    most = most if group > 1 else most // 2  # rows of queries that follow each other are loaded with more registers
    return fitting_block(min(most, pl.next_power_of_2(group * tokens)), needed)
