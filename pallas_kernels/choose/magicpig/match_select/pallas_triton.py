"""MagicPIG's selection as three Pallas Triton kernels. Counts of equal buckets are small, so there are few different counts.

1. ``bucket_matches``, grid (B, H, blocks): the word of each token (see `score.magicpig.bucket_matches.pallas_triton`),
   and how many tokens of each block have each count.
2. ``match_cut``, grid (B, H): the count that as many tokens reach as there is room for, and how many tokens stand in the
   list before each block's tokens.
3. ``match_list``, grid (B, H, blocks): a block's tokens go into the list behind the tokens of earlier blocks. The programs
   also write all other entries. The result does not depend on the order of programs.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.block_specs import of_head, whole
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.kth_search import rank
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.region_list import fill, put
from pallas_kernels.score.magicpig.bucket_matches import pallas_triton as matches
from pallas_kernels.score.magicpig.bucket_matches.pallas_triton import HALF, Config, default_config

_CUT_WARPS = 16
_HELD = 2**13  # counts that `match_cut` loads together


def _cut(count_ref, cut_ref, before_ref, sampled_ref, *, capacity):
    # Of one head: count [blocks, C]. Results: cut [4], before [2, blocks], sampled [1].
    blocks, bins = count_ref.shape
    rows = max(min(_HELD // bins, pl.next_power_of_2(blocks)), 1)
    bin_of, row = jnp.arange(bins, dtype=jnp.int32), jnp.arange(rows, dtype=jnp.int32)

    def load(step):
        block = step * rows + row
        at, column = (jnp.broadcast_to(x, (rows, bins)) for x in (block[:, None], bin_of[None, :]))
        found = plt.load(count_ref.at[jnp.minimum(at, blocks - 1), column], mask=at < blocks, other=0)
        return block, found.astype(jnp.int32)

    steps, none = pl.cdiv(blocks, rows), jnp.zeros((rows, bins), jnp.int32)
    number = jnp.sum(lax.fori_loop(0, steps, lambda step, total: total + load(step)[1], none), axis=0)
    sampled = jnp.sum(number)
    reach = sampled - lax.cumsum(number, axis=0) + number  # tokens that have this count or more
    full = sampled > capacity
    threshold = jnp.where(full, jnp.sum((reach >= capacity).astype(jnp.int32)) - 1, 0)
    over = jnp.sum(jnp.where(bin_of > threshold, number, 0))
    cut_ref[0], cut_ref[1] = threshold, jnp.where(full, capacity - over, 0)
    cut_ref[2], sampled_ref[0] = jnp.minimum(sampled, capacity), sampled

    def place(step, before):
        block, found = load(step)
        # Two counts by one reduction, in the halves of a word. A block has less than 2**15 tokens.
        above = jnp.where(bin_of > threshold, 1, 0)[None, :]
        equal = jnp.where(bin_of == threshold, 1 << HALF, 0)[None, :]
        both = jnp.sum(found * (above + equal), axis=1)
        for i, own in enumerate((both & ((1 << HALF) - 1), both >> HALF)):
            plt.store(before_ref.at[i, block], before[i] + lax.cumsum(own, axis=0) - own, mask=block < blocks)
        return before[0] + jnp.sum(both & ((1 << HALF) - 1)), before[1] + jnp.sum(both >> HALF)

    lax.fori_loop(0, steps, place, (jnp.int32(0), jnp.int32(0)))


def _list(
    word_ref, cut_ref, before_ref, near_ref, length_ref, slots_ref, mask_ref, own_ref, *, first, capacity, block, interpret
):  # fmt: skip
    # Of one head: word [N]; cut [4]; before [2, blocks]. Of all rows: near, length [B]. Results of one head: slots, mask [E],
    # own [G * E].
    b, program, entries = pl.program_id(0), pl.program_id(2), slots_ref.shape[0]
    near, group = near_ref[b], own_ref.shape[0] // entries
    threshold, ties, chosen = (cut_ref[i] for i in range(3))
    blocks = before_ref.shape[1]
    entry, used, here = fill(slots_ref, mask_ref, blocks, first, capacity, chosen, near, length_ref[b], interpret)
    for g in range(group):
        put(own_ref, g * entries + entry, used, here, interpret)
    begin = program * block

    @pl.when((begin < near) & (begin + block > first) & (chosen > 0))
    def list_block():
        slot = begin + jnp.arange(block, dtype=jnp.int32)
        word = plt.load(word_ref.at[slot], mask=slot < word_ref.shape[0], other=0)
        over, equal = (before_ref[i, program] for i in range(2))
        keep, place, _, _ = rank(word >> HALF, threshold, ties, over, equal)
        put(slots_ref, first + place, slot, keep, interpret)
        for g in range(group):
            put(own_ref, g * entries + first + place, (word >> g) & 1 > 0, keep, interpret)


def match_select(query, ids, near, length, *, first, capacity, room, num_bits, config: Config | None = None, interpret=False):
    """List the first, the sampled and the last slots of each KV head; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, tables, held = ids.shape
    config = default_config(batch * heads, held, tables) if config is None else config
    group, entries = query.shape[2], first + capacity + room
    word, count = matches.words(query, ids, near, first=first, counted=True, config=config, interpret=interpret)

    def shape(dtype, *size):
        return jax.ShapeDtypeStruct((batch, heads, *size), dtype)

    blocks = count.shape[2]
    results = [shape(jnp.int32, 4), shape(jnp.int32, 2, blocks), shape(jnp.int32, 1)]
    cut, before, sampled = triton_call(
        functools.partial(_cut, capacity=capacity),
        grid=(batch, heads),
        in_specs=[of_head(count)],
        out_specs=[*map(of_head, results)],
        out_shape=results,
        name="match_cut",
        num_warps=_CUT_WARPS,
        interpret=interpret,
    )(count)
    results = [shape(jnp.int32, entries), shape(jnp.bool_, entries), shape(jnp.bool_, group * entries)]
    slots, mask, own = triton_call(
        functools.partial(_list, first=first, capacity=capacity, block=config.block, interpret=interpret),
        grid=(batch, heads, blocks),
        in_specs=[*map(of_head, (word, cut, before)), whole(near), whole(length)],
        out_specs=[*map(of_head, results)],
        out_shape=results,
        name="match_list",
        num_warps=config.num_warps,
        interpret=interpret,
    )(word, cut, before, near, length)
    return slots, mask, own.reshape(batch, heads, group, entries), sampled[..., 0]


def check(query, ids, near, length, *, first, capacity, room, num_bits):
    """Raise ``NotImplementedError`` for sizes that the kernels do not take."""
    matches.check(query, ids, near, first=first, num_bits=num_bits)
