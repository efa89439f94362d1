"""Collision votes and their best keys in one kernel through Mosaic GPU; plain JAX makes the tables of votes.

A list's keys lie in the registers of a cluster of up to 8 programs, as in `kth_select`. Each has the tables in shared memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.pallas import plgpu
from pallas_kernels._mosaic_gpu.search import MOST, places, threshold_of
from pallas_kernels._triton.kth_search import NEVER
from pallas_kernels.choose.pariskv.collision.votes import cluster_scores, sizes
from pallas_kernels.formats.key_codes import CLUSTERS, rotation

ALONE = 2**11  # keys for which one program is enough
PARTS = (1, 2, 4, 8)  # programs of a cluster
TOGETHER = 8  # keys whose ids a thread loads together
BYTES = 4  # of a word


def tier_tables(scores, counts, cutoffs):
    """Make what `votes.tier_weights` returns without a sort, as bytes in words: int32 [B * H, N * 64]."""
    own, other = scores[..., :, None], scores[..., None, :]
    lower = jnp.tri(CLUSTERS, k=-1, dtype=jnp.bool_)[None, None, None]  # of equal scores the lower cluster is first
    better = (other > own) | ((other == own) & lower)
    before = jnp.sum(jnp.where(better, counts[..., None, :], 0), axis=-1, dtype=jnp.int32)
    tiers = jnp.sum(before[..., None] < cutoffs[:, :, None, None], axis=-1, dtype=jnp.int32)
    shift = 8 * jnp.arange(BYTES, dtype=jnp.int32).reshape(1, 1, 1, 1, BYTES)
    words = jnp.sum(tiers.reshape(*tiers.shape[:3], -1, BYTES) << shift, axis=-1, dtype=jnp.int32)
    return words.reshape(tiers.shape[0] * tiers.shape[1], -1)


def _load_ids(ids_ref, row, slices):
    """Load the ids of keys ``row`` int32 [N], as words: a list of int32 [N]."""
    ref, own, count = plgpu.RefType(), t.own(row.shape[0] // t.THREADS), slices // BYTES
    one = plgpu.ShapeDtypeStruct(row.shape, jnp.int32, layout=own)

    @plgpu.inline_mgpu(arg_types=(ref, own), return_type=(one,) * count)
    def run(ctx, ids, row):
        base, found = t.address(ids), []
        for x in t.numbers_of(row):
            place = t.at(base, t.element(x, slices, t.number(0)), 1)
            found.append([x for i in range(0, count, BYTES) for x in t.load_words(place, 4 * i, min(BYTES, count - i))])
        return tuple(t.made_of(list(x)) for x in zip(*found, strict=True))

    return run(ids_ref, row)


def _add_votes(table, words, shared, at):
    """Sum up the votes of keys, whose ids are ``words``, in ``table``, and write them to ``shared`` at int32 [N]."""
    ref, own = plgpu.RefType(), t.own(at.shape[0] // t.THREADS)

    @plgpu.inline_mgpu(arg_types=(ref, (own,) * len(words), ref, own))
    def run(ctx, table, words, shared, at):
        base, to = (t.number(t.address(x)) for x in (table, shared))
        for place, *mine in zip(t.numbers_of(at), *map(t.numbers_of, words), strict=True):
            votes = t.number(0)
            for i in range(len(mine) * BYTES):
                id_ = (mine[i // BYTES] >> (8 * (i % BYTES))) & (CLUSTERS - 1)
                votes = votes + t.number(t.ptx("ld.shared.u8 $0, [$1];", base + id_ + i * CLUSTERS, result=t.i32()))
            t.ptx("st.shared.b32 [$0], $1;", to + place * 4, votes)

    run(table, tuple(words), shared, at)


def _body(
    table_ref, ids_ref, position_ref, stop_ref, count_ref, list_ref, table, votes, words, peers, *, heads, slots, slices,
    capacity, first, size, parts,
):  # fmt: skip
    # table [L, N * 64]; ids [L * S, N]; position [L, S]; stop [B]; count [L]; list [L, C]. In shared memory: the table, the
    # votes of this program's keys, and what the search takes.
    line, part = lax.axis_index("x"), lax.axis_index("part") if parts > 1 else jnp.int32(0)
    stop, wanted = arrays.scalar(stop_ref, lax.div(line, heads)), arrays.scalar(count_ref, line)
    width = slices * CLUSTERS // BYTES
    arrays.begin_parts(peers, parts)
    table[...] = arrays.load(table_ref, line * width + arrays.counted(width))
    arrays.meet()
    entry = arrays.counted(t.THREADS * TOGETHER)

    def place_of(entry):  # of its votes in shared memory: neither neighbours nor threads meet in a bank
        turn = lax.rem(entry, size // t.THREADS)
        return turn * t.THREADS + ((lax.div(entry, size // t.THREADS) + turn) & (t.THREADS - 1))

    def load(step):
        slot = jnp.minimum(part * size + step * entry.shape[0] + entry, slots - 1)
        return tuple(_load_ids(ids_ref, line * slots + slot, slices))

    def add(step, ids):
        ahead = load(step + 1)
        _add_votes(table, ids, votes, place_of(step * entry.shape[0] + entry))
        return ahead

    lax.fori_loop(0, size // entry.shape[0], add, load(jnp.int32(0)))
    arrays.meet()
    key_of = arrays.in_order(size)
    slot = part * size + key_of
    inside = (slot >= first) & (slot < jnp.minimum(stop, slots))
    position = arrays.load_run(position_ref, line, part * size, size, -1)
    key = jnp.where(inside & (position >= 0), arrays.load_shared(votes, place_of(key_of)), NEVER)
    threshold, ties, chosen = threshold_of(key, wanted, parts, peers, repeated=True)
    keep, place = places(key, threshold, ties, part, parts, words, peers)
    listed = keep & (place < jnp.minimum(chosen, capacity))
    arrays.store(list_ref, jnp.where(listed, line * capacity + place, -1), slot)


def collision(query, signs, counts, ids, position, stop, shares, *, first, capacity, part=None):
    """List the keys of the zone with the most votes."""
    batch, heads, slots, slices = ids.shape
    query = query.astype(jnp.float32).mean(axis=2)
    query = query if signs is None else rotation(query, signs)
    _, count, cutoffs = sizes(counts, shares, capacity)
    tables, lists, unit = tier_tables(cluster_scores(query), counts, cutoffs), batch * heads, t.THREADS * TOGETHER
    parts = next((n for n in PARTS if slots <= n * ALONE), PARTS[-1])
    size = -(-slots // (parts * unit)) * unit
    scratch = [(tables.shape[1],), (size,), (4,), (arrays.PEERS,)]
    (listed,) = arrays.program(
        functools.partial(
            _body, heads=heads, slots=slots, slices=slices, capacity=capacity, first=first, size=size, parts=parts
        ),
        [jax.ShapeDtypeStruct((lists, capacity), jnp.int32)],
        grid=(lists,),
        parts=parts,
        scratch=[plgpu.SMEM(x, jnp.int32) for x in scratch],
    )(tables, ids.reshape(lists * slots, slices), position.reshape(lists, slots), stop, count.reshape(-1))
    return query, listed.reshape(batch, heads, capacity), count


def check(query, signs, counts, ids, position, stop, shares, *, first, capacity, part=None):
    """Raise ``NotImplementedError`` for other GPUs, parts of a row, and sizes that the kernel does not take."""
    arrays.check_hopper()
    batch, heads, slots, slices = ids.shape
    if part is not None or slices % BYTES:
        raise NotImplementedError(
            f"got a part of each row, or {slices} slices, expected whole rows and a multiple of {BYTES}"
        )
    most = PARTS[-1] * MOST
    if not 1 <= slots <= most or not 1 <= capacity <= most or batch * heads * slots >= 2**31:
        raise NotImplementedError(f"got {slots} slots and room for {capacity}, expected 1 to {most}")
