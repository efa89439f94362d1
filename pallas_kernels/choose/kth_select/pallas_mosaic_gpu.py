"""The best entries of score rows through Mosaic GPU: a row lies in the registers of one program, or of a cluster of up to 8.

Nothing is read twice, and no candidate leaves the registers: each step of the search is a histogram of the cluster.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.pallas import pl
from pallas_kernels._mosaic_gpu.search import MOST, fill, listed, team_for, threshold_of
from pallas_kernels._triton.kth_search import order_key
from pallas_kernels.machine import current_machine
from pallas_kernels.numerics import finite_or_zero

TAKES = f"{arrays.HOPPER}, rows and lists of up to {arrays.MOST_PARTS * MOST} entries"
SHORT, FEW = 2**14, 16  # entries of a row; so many rows may be twice as long, since their clusters run at once


def _body(*refs, joining, budget, traced, most, capacity, heads, team):
    # score [L, S], or logits [L * G, S] and lse [L, N, G] if joining; budget [n] if traced; then list, keep [L, K] and
    # count [L].
    score_ref, lse_ref, budget_ref = refs[0], refs[1 : 1 + joining], refs[1 + joining : 1 + joining + traced]
    list_ref, keep_ref, count_ref, scratch, bins = refs[1 + joining + traced :]
    row = lax.axis_index("x")
    asked = budget_ref[0][budget(row)] if traced else jnp.int32(budget)
    wanted = jnp.minimum(jnp.maximum(asked, 0), most)

    def finish(chosen):
        fill(list_ref, keep_ref, row, chosen, team)
        arrays.put(count_ref, jnp.where(team.member() < 1, row, -1), chosen)

    def score(line):
        return team.load(score_ref, line, -jnp.inf)

    def total(head, parts_of):
        size = arrays.size_of(-(-parts_of // team.groups))
        at = team.group() * size + arrays.counted(size)
        lse = arrays.load(lse_ref[0], jnp.where(at < parts_of, (row * parts_of + at) * heads + head, -1), -jnp.inf)
        top = finite_or_zero(team.joined([(lse, "max")], scratch, 6)[0])
        return finite_or_zero(top + jnp.log(team.joined([(jnp.exp(lse - top), "add")], scratch, 7)[0]))

    @pl.when(wanted <= 0)  # a row that wants nothing is not read
    def _():
        finish(jnp.int32(0))

    @pl.when(wanted > 0)
    def _():
        if joining:
            shares = (score(row * heads + head) - total(head, lse_ref[0].shape[1]) for head in range(heads))
            key = order_key(functools.reduce(jnp.maximum, shares))
        else:
            key = order_key(score(row))
        threshold, ties, chosen = threshold_of(key, wanted, most, team, scratch, bins)
        word = (key > threshold).astype(jnp.int32) + ((key == threshold).astype(jnp.int32) << 16)
        keep, place, _ = listed(word, ties, team, scratch)
        arrays.store(list_ref, jnp.where(keep & (place < chosen), row * capacity + place, -1), team.entries())
        finish(chosen)
        team.end()


def kth_select(score, budget, capacity, lse=None):
    """Return slots, keep and count, as the operation does."""
    (rows, heads), slots = score.shape[:2], score.shape[-1]
    lists, team = rows * heads, team_for(slots)
    traced = isinstance(budget, jax.Array)
    if traced:
        lines, columns = (1,) * (2 - budget.ndim) + budget.shape

        def place(row):
            b, h = lax.div(row, heads), lax.rem(row, heads)
            return (b if lines > 1 else 0 * b) * columns + (h if columns > 1 else 0)

    flat = [score.reshape(-1, slots), *([] if lse is None else [lse.reshape(lists, *lse.shape[2:])])]
    found, keep, count = arrays.program(
        functools.partial(
            _body, joining=len(flat) - 1, budget=place if traced else int(budget), traced=traced, most=min(capacity, slots),
            capacity=capacity, heads=score.shape[2] if lse is not None else 1, team=team,
        ),
        [
            jax.ShapeDtypeStruct((lists, capacity), jnp.int32),
            jax.ShapeDtypeStruct((lists, capacity), jnp.bool_),
            jax.ShapeDtypeStruct((lists,), jnp.int32),
        ],
        grid=(lists,),
        parts=team.parts,
        groups=team.groups,
        scratch=team.scratch,
    )(*flat, *([budget.reshape(-1)] if traced else []))  # fmt: skip
    return found.reshape(rows, heads, -1), keep.reshape(rows, heads, -1), count.reshape(rows, heads)


def check(score, budget, capacity, lse=None):
    """Raise ``NotImplementedError`` for other GPUs, for rows that no cluster holds, and for sizes that need 64 bits."""
    arrays.check_hopper()
    slots = score.shape[-1]
    if (
        not 1 <= slots <= arrays.MOST_PARTS * MOST
        or capacity > arrays.MOST_PARTS * MOST
        or max(score.size, score.size // slots * capacity) >= 2**31
    ):
        raise NotImplementedError(
            f"got score {score.shape} and {capacity=}, expected rows of 1 to {arrays.MOST_PARTS * MOST}"
        )


def first(score, *_, **__):
    """Tell whether rows are so short, or few, that Triton's three kernels take longer."""
    most = SHORT * (1 + (math.prod(score.shape[:2]) <= FEW))
    return current_machine().capability == (9, 0) and score.shape[-1] <= most
