"""The k-th largest of keys that lie in the registers of one program, or of the programs of a cluster."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.team import BINS, HALF, Team
from pallas_kernels._triton.kth_search import ALL, INFINITE, NEVER

ALONE = 2**13  # entries of a row for which one program is enough
EACH = 16  # entries of a thread: a warpgroup more costs more than so many
MOST = 2**14 + 2**12  # keys of a program: they are in registers, and counts of two kinds share a word


def team_for(slots: int) -> Team:
    """Choose who shares a row."""
    parts = next((n for n in (1, 2, 4) if slots <= n * ALONE), arrays.MOST_PARTS)
    groups = next((n for n in (1, 2, 4) if slots <= n * parts * EACH * t.THREADS), 8)
    return Team(groups, parts, arrays.size_of(-(-slots // (parts * groups))))


def threshold_of(
    key: jax.Array, wanted: Any, most: int, team: Team, scratch: Any, bins: Any, repeated: bool = False
) -> tuple[Any, Any, Any]:
    """Find the threshold that the best keys reach, by histograms, of which each divides an interval of keys by `BINS`.

    The first interval begins at the least of many maxima, of which there are as many as are wanted: most keys are below it,
    and are counted nowhere.

    Args:
        key: int32 [N], this warpgroup's.
        wanted: int32, keys to choose of the whole row, at most ``most``.
        most: its upper bound.
        team: who shares the row.
        scratch: with ``bins`` `Team.scratch`.
        bins: see ``scratch``.
        repeated: many keys are equal, so each step also finds the least and the greatest that are left; one program alone.

    Returns:
        int32: the threshold; how many of the keys that equal it are chosen, from the first on; how many keys are chosen.
    """
    team.clear(bins)
    may, tops = key > NEVER, team.folded(key, min(team.each, -(-most // (team.members * t.THREADS))), "max")
    full = tops > NEVER
    low, lowest, high, held, tall = team.joined(
        [
            (jnp.where(full, tops, INFINITE), "min"),
            (jnp.where(may, key, INFINITE), "min"),
            (tops, "max"),
            (may.astype(jnp.int32), "add"),
            (full.astype(jnp.int32), "add"),
        ],
        scratch,
    )
    folds = [(0, "min", False), (1, "min", False), (2, "max", False), (3, "low", False), (3, "high", False)]
    low, lowest, high, held, tall = team.together([low, lowest, high, held + (tall << 16)], folds, scratch, 8)
    wanted = jnp.minimum(held, wanted)
    low = jnp.where((held > wanted) & (tall >= wanted), low, lowest)

    def unsettled(state):
        low, high, reach, *_ = state
        return (reach > wanted) & (wanted > 0) & (high > low + 1)

    def narrow(state):
        low, high, _, over, first = state
        shift = jnp.maximum(33 - BINS.bit_length() - lax.clz(high - 1 - low), 0)
        team.tally(bins, first, key, low, high, shift)
        team.meet()
        found, bin_of = team.counts(bins, first)
        upto = over + found + team.before(found, scratch, small=False)[0]
        mine = (upto >= wanted) & (upto - found < wanted)  # one bin has the wanted key
        number, over, reach = team.joined([(jnp.where(mine, x, -1), "max") for x in (bin_of, upto - found, upto)], scratch)
        low = low + (number << shift)
        high = jnp.minimum(high, low + (1 << shift))
        if repeated:
            inside = (key >= low) & (key < high)
            least, most = ((jnp.where(inside, key, x), fold) for x, fold in ((INFINITE, "min"), (NEVER, "max")))
            low, high = team.joined([least, most], scratch, 5)
            high = high + 1
        return low, high, reach, over, BINS - first

    state = low, high + 1, held, jnp.int32(0), jnp.int32(0)
    low, _, reach, over, _ = lax.while_loop(unsettled, narrow, state)
    return jnp.where(wanted > 0, low, 2**31 - 1), jnp.where(reach > wanted, wanted - over, ALL), wanted


def listed(word: jax.Array, ties: Any, team: Team, scratch: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose entries of a row, all of one kind and the first ``ties`` of another.

    Args:
        word: int32 [N], whose bits 0 and 16 tell the kinds.
        ties: int32.
        team: who shares the row; `Team.end` has to follow.
        scratch: the first of `Team.scratch`.

    Returns:
        which entries are chosen, bool [N]; how many are chosen before each, int32 [N]; and how many in all, int32.
    """
    earlier, total = team.before(word, scratch)
    folds = [(0, fold, earlier) for earlier in (True, False) for fold in ("low", "high")]
    over, equal, over_all, equal_all = team.together([total], folds, scratch, 9)
    equal = equal + (earlier >> 16)
    chosen = ((word & 1) > 0) | ((word > HALF) & (equal < ties))
    return chosen, over + (earlier & HALF) + jnp.minimum(equal, ties), over_all + jnp.minimum(equal_all, ties)


def fill(list_ref: Any, keep_ref: Any, row: Any, chosen: Any, team: Team) -> None:
    """Write zeros behind the ``chosen`` first entries of a list [L, K], and the mask that tells which are chosen."""
    capacity = list_ref.shape[1]
    share = arrays.size_of(-(-capacity // team.members))
    at = team.member() * share + arrays.counted(share)
    inside = at < capacity
    arrays.store(list_ref, jnp.where(inside & (at >= chosen), row * capacity + at, -1), arrays.spread(0, share))
    arrays.store(keep_ref, jnp.where(inside, row * capacity + at, -1), (at < chosen).astype(jnp.int32))
