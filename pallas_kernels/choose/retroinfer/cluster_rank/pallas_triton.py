"""The ranking of clusters as three Pallas Triton kernels.

1. ``page_logits``, see `pallas_kernels.score.page_logits`: logits of the clusters, and the log of their softmax denominators.
2. ``cluster_share``, grid (B, H, parts): the scores of a part of the clusters as keys, and the greatest key of every chunk.
3. ``cluster_rank``, grid (B, H, 2): one program lists the best clusters of a head, by two searches over few keys
   (`pallas_kernels._triton.kth_best`), and decides which listed clusters have room. The other program holds the keys of all
   clusters, and searches the threshold of the considered clusters.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.block_specs import of_head, whole
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.kth_best import best_of, chunk_for, contenders, held
from pallas_kernels._triton.kth_search import NEVER, bounds_of, find, order_key, rank
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.shared_memory import check_fits
from pallas_kernels._triton.split import Config
from pallas_kernels.numerics import ceil_share, finite_or_zero
from pallas_kernels.score.page_logits import pallas_triton as logits_kernel

MOST_CLUSTERS = 2**14  # one program holds their scores in registers, and two counts of them fit into a word
PART = 512  # clusters per program of the second kernel; a chunk has at most as many


def _shares(logits_ref, lse_ref, cluster, used):
    """Compute the log of the softmax over the clusters, summed over the group: float32, shaped like ``cluster``."""
    parts = lse_ref.shape[0]
    part = jnp.arange(pl.next_power_of_2(parts), dtype=jnp.int32)

    share = jnp.full(cluster.shape, -jnp.inf, jnp.float32)
    for head in range(logits_ref.shape[0]):  # not a loop of the kernel: nothing waits for the logits of the head before
        lse = jnp.where(part < parts, lse_ref[jnp.minimum(part, parts - 1), head], -jnp.inf)
        top = finite_or_zero(jnp.max(lse))
        denominator = finite_or_zero(top + jnp.log(jnp.sum(jnp.exp(lse - top))))
        own = plt.load(logits_ref.at[head, cluster], mask=cluster < used, other=-jnp.inf) - denominator
        shift = finite_or_zero(jnp.maximum(share, own))
        share = shift + jnp.log(jnp.exp(share - shift) + jnp.exp(own - shift))
    return share


def _share(logits_ref, lse_ref, size_ref, used_ref, key_ref, *refs, chunk):
    # Of one head: logits [G, C]; lse [N, G]; size [C]; used [1]. Of this program: key [P]; most [P / chunk], where it is
    # asked for. Of one head: exact [C], false at first.
    *most_ref, exact_ref = refs
    clusters, part = size_ref.shape[0], key_ref.shape[0]
    cluster = pl.program_id(2) * part + jnp.arange(part, dtype=jnp.int32)
    used = jnp.clip(used_ref[0], 0, clusters)
    filled = plt.load(size_ref.at[cluster], mask=cluster < used, other=0) > 0
    key = jnp.where(filled, order_key(_shares(logits_ref, lse_ref, cluster, used)), NEVER)
    key_ref[...] = key
    plt.store(exact_ref.at[cluster], jnp.zeros((part,), bool), mask=cluster < clusters)
    if most_ref:
        most_ref[0][...] = jnp.max(key.reshape(part // chunk, chunk), axis=1)


def _rank(*refs, chunk, entries, room, threads, interpret):
    # Of one head: most [M], if there are two searches; key [N]; size [C]; used, best, considered [1]; exact [C], aliased.
    # Results: list, ends [K]; the chosen chunks, if there are two searches; considered, exact [C].
    two = entries[0] > 0
    key_ref, size_ref, used_ref, best_ref, considered_ref, _, list_ref, ends_ref, *found_ref, flag_ref, exact_ref = refs[two:]
    first = (refs[0], found_ref[0]) if two else (None, None)
    used = jnp.clip(used_ref[0], 0, size_ref.shape[0])

    @pl.when(pl.program_id(2) == 0)
    def list_best():
        wanted = jnp.minimum(ceil_share(best_ref[0], used), list_ref.shape[0])
        cluster, key = contenders(key_ref, *first, wanted, chunk, entries, threads, interpret)
        keep, place, listed, _ = best_of(key, wanted, 0, threads, interpret)
        plt.store(list_ref.at[place], cluster, mask=keep)
        if not interpret:
            plt.debug_barrier()  # what follows reads what other threads of this program wrote
        _give_room(list_ref, ends_ref, exact_ref, key_ref, size_ref, listed, room)

    @pl.when(pl.program_id(2) == 1)
    def consider():
        _consider(key_ref, flag_ref, ceil_share(considered_ref[0], used))


def _consider(key_ref, out_ref, wanted):
    """Write which clusters are the first ``wanted`` in the ranking."""
    clusters = out_ref.shape[0]
    cluster = jnp.arange(max(pl.next_power_of_2(clusters), 16), dtype=jnp.int32)
    key = plt.load(key_ref.at[cluster], mask=cluster < clusters, other=NEVER)
    low, high, number, infinite = bounds_of(key)

    def count(pivot):
        return jnp.sum((key >= pivot).astype(jnp.int32))

    def below(pivot):
        return jnp.max(jnp.where(key < pivot, key, NEVER))

    # Pairs of pivots need fewer steps, but with so many keys a second count costs more than the steps save.
    threshold, reach, over = find(count, below, low, high, number, wanted, 0, infinite)

    # Ranks take longer than all the rest.
    @pl.when(reach <= wanted)
    def all_that_reach():
        plt.store(out_ref.at[cluster], key >= threshold, mask=cluster < clusters)

    @pl.when(reach > wanted)
    def the_first_of_equals():
        keep, _, _, _ = rank(key, threshold, wanted - over, jnp.int32(0), jnp.int32(0))
        plt.store(out_ref.at[cluster], keep, mask=cluster < clusters)


def _give_room(list_ref, ends_ref, exact_ref, key_ref, size_ref, listed, room):
    """Write the ends of the first ``listed`` clusters of the list and what is behind them, and which clusters have room."""
    capacity = list_ref.shape[0]
    entry = jnp.arange(pl.next_power_of_2(capacity), dtype=jnp.int32)
    there, inside = entry < listed, entry < capacity
    cluster = plt.load(list_ref.at[entry], mask=there, other=0)
    key = plt.load(key_ref.at[cluster], mask=there, other=NEVER)
    size = plt.load(size_ref.at[cluster], mask=there, other=0)

    def narrow(state):
        low, high = state
        middle = (low & high) + ((low ^ high) >> 1)
        heavy = jnp.sum(jnp.where(key >= middle, size, 0)) > room
        return jnp.where(heavy, middle, low), jnp.where(heavy, high, middle)

    # The greatest key at which the clusters of this key or more have more tokens than room; NEVER where all have room.
    start = jnp.where(jnp.sum(size) > room, jnp.max(key), NEVER) + 1
    edge, _ = lax.while_loop(lambda state: state[1] > state[0] + 1, narrow, (jnp.int32(NEVER), start))
    over = jnp.sum(jnp.where(key > edge, size, 0))
    same = key == edge
    until = over + lax.cumsum(jnp.where(same, size, 0), axis=0)
    fits = there & ((key > edge) | (same & (until <= room)))
    plt.store(list_ref.at[entry], cluster, mask=inside)
    plt.store(ends_ref.at[entry], lax.cumsum(jnp.where(fits, size, 0), axis=0), mask=inside)
    # Interpreted, a masked store writes what was there: behind the end it is dropped.
    plt.store(exact_ref.at[jnp.where(fits, cluster, exact_ref.shape[0])], fits, mask=fits)


def cluster_rank(
    query, centroid, size, used, best, considered, *, scale, capacity, room, config: Config | None = None, part: int = PART,
    interpret=False,
):  # fmt: skip
    """Rank the clusters of each KV head by the attention of its query heads; ``interpret=True`` runs anywhere, slowly."""
    rows, heads, clusters, _ = centroid.shape
    logits, lse = logits_kernel.page_logits(query, centroid, used, scale=scale, config=config, interpret=interpret)
    chunk = min(chunk_for(clusters, capacity, MOST_CLUSTERS) or part, part)
    entries, parts = held(clusters, capacity, chunk), pl.cdiv(clusters, part)
    sizes = [part, part // chunk] if entries[0] else [part]
    # Every ref belongs to one head: sums of several indices for each of many clusters would take registers.
    own_row = pl.BlockSpec((1,), lambda b, h, _: (b,))
    flags = jax.ShapeDtypeStruct(size.shape, jnp.bool_)
    key, *most, exact = triton_call(
        functools.partial(_share, chunk=chunk),
        grid=(rows, heads, parts),
        in_specs=[*map(of_head, (logits, lse, size)), own_row],
        out_specs=[*(pl.BlockSpec((None, None, size), lambda b, h, i: (b, h, i)) for size in sizes), of_head(flags)],
        out_shape=[*(jax.ShapeDtypeStruct((rows, heads, parts * size), jnp.int32) for size in sizes), flags],
        interpret=interpret,
        name="cluster_share",
    )(logits, lse, size, used)
    lists = [capacity, capacity, *([entries[1] // chunk] if most else [])]
    outs = [*(jax.ShapeDtypeStruct((rows, heads, size), jnp.int32) for size in lists), flags, flags]
    warps = min(max(pl.next_power_of_2(clusters) // 512, 1), 16)
    ranked = triton_call(
        functools.partial(_rank, chunk=chunk, entries=entries, room=room, threads=32 * warps, interpret=interpret),
        grid=(rows, heads, 2),
        in_specs=[*map(of_head, (*most, key, size)), own_row, *[whole(best.reshape(1))] * 2, of_head(exact)],
        out_specs=[of_head(x) for x in outs],
        out_shape=outs,
        input_output_aliases={len(most) + 5: len(outs) - 1},
        num_warps=warps,
        interpret=interpret,
        name="cluster_rank",
    )(*most, key, size, used, best.reshape(1), considered.reshape(1), exact)
    return logits, *ranked[:2], *ranked[-2:]


def check(query, centroid, size, used, best, considered, *, scale, capacity, room):
    """Raise ``NotImplementedError`` for dtypes, head dims and numbers of clusters that the kernels do not take."""
    clusters = size.shape[2]
    if not 0 < clusters <= MOST_CLUSTERS or capacity > MOST_CLUSTERS:
        raise NotImplementedError(f"got {clusters} clusters and {capacity=}, expected 1 to {MOST_CLUSTERS} of each")
    logits_kernel.check(query, centroid, used, scale=scale)
    check_fits(8 * pl.next_power_of_2(clusters))  # the third kernel lays out addresses of all clusters anew
