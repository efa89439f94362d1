"""Tokens of the best sentences as one Pallas Triton kernel, one program per list.

A search over the scores, read as integers of the same order, finds the threshold (`pallas_kernels._triton.kth_best`). The
tokens of a sentence share a score, so few scores are left after the first step of the search. Slots of the cut sentence are
taken while there is space. One running sum gives both the rank among equal scores and the entry of the list.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.kth_best import threshold_of
from pallas_kernels._triton.kth_search import NEVER, order_key
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.choose.sentencekv.sentence_cut.rules import CLOSES, bounds
from pallas_kernels.score.page_score import pallas_triton as score_kernel

MOST_SLOTS = 1 << 14  # what the registers of one program hold
_BITS = 15  # bits of a running count of at most MOST_SLOTS


def _kernel(
    cursor_ref, event_ref, budget_ref, count_ref, length_ref, sentence_ref, position_ref, score_ref, slots_ref, listed_ref,
    *, heads, rules, size, threads, interpret,
):  # fmt: skip
    # Of all lists: cursor, event [B]; budget [1]; count, length [L]. Of one list: sentence, position, slots, listed [S];
    # score [N].
    index = pl.program_id(0)
    count, closes = count_ref[index], event_ref[index // heads] == CLOSES
    written = jnp.where(closes, 0, length_ref[index] + 1)
    high, space = bounds(cursor_ref[index // heads], written, budget_ref[0], rules)
    num_slots = sentence_ref.shape[0]
    slot = jnp.arange(size, dtype=jnp.int32)
    real = slot < num_slots  # the block is S up to a power of two
    at = jnp.minimum(slot, num_slots - 1)
    sentence, stored = sentence_ref[at], real & (position_ref[at] >= 0)
    inside = (slot >= rules.sinks) & (slot < high)
    eligible = stored & inside & (sentence >= 0) & (sentence < count)
    # NaN and -inf rank last, but before slots that are not eligible: they get the least finite score.
    least = float(jnp.finfo(jnp.float32).min)
    worth = score_ref[jnp.where(eligible, sentence, 0)]
    worth = jnp.where(worth > least, worth, least)
    key = jnp.where(eligible, order_key(worth), NEVER)
    threshold, _, left = threshold_of(key, space, 0, threads, interpret, repeated=True)
    threshold = jnp.where(space > 0, threshold, 2**31 - 1)  # where nothing is wanted, the threshold may be below some keys
    # Taken are all stored slots outside of the bounds, all slots above the threshold, and of equal ones the lower slots.
    sure = (stored & ~inside) | (key > threshold)
    equal = eligible & (key == threshold)
    # One running sum for two counts: sure slots in the high bits, equal ones in the low bits.
    run = jax.lax.cumsum((sure.astype(jnp.int32) << _BITS) + equal.astype(jnp.int32))
    equals = run & ((1 << _BITS) - 1)
    chosen = sure | (equal & (equals <= left))
    end = (run >> _BITS) + jnp.minimum(equals, left)  # how many are chosen up to here
    taken = jnp.max(end)
    # Chosen slots go to the front, and zeros for all other slots behind them, so every entry is written exactly once.
    place = jnp.where(chosen, end - 1, taken + slot - end)
    plt.store(slots_ref.at[place], jnp.where(chosen, slot, 0), mask=place < num_slots)
    plt.store(listed_ref.at[place], chosen, mask=place < num_slots)


def sentence_cut(
    score, sentence, position, count, length, cursor, event, budget, *, rules, query=None, vector=None, added=None,
    num_warps: int | None = None, interpret=False,
):  # fmt: skip
    """List the first, the newest and the best slots between them by sentence; ``interpret=True`` runs anywhere, slowly."""
    if score is None:
        options = {"added": added, "reduce": "sum", "interpret": interpret}
        score = score_kernel.scores(query, vector, None, count, name="vector_score", **options)
    rows, heads, num_slots = sentence.shape
    lists, size = rows * heads, pl.next_power_of_2(num_slots)
    warps = min(max(size // 256, 1), 16) if num_warps is None else num_warps
    operands = [cursor, event, budget.reshape(1), count.reshape(lists), length.reshape(lists)]
    lines = [x.reshape(lists, -1) for x in (sentence, position, score)]
    slots, listed = triton_call(
        functools.partial(_kernel, heads=heads, rules=rules, size=size, threads=32 * warps, interpret=interpret),
        grid=(lists,),
        in_specs=[
            *(pl.BlockSpec(x.shape, lambda i: (0,)) for x in operands),
            *(pl.BlockSpec((None, x.shape[1]), lambda i: (i, 0)) for x in lines),
        ],
        out_specs=[pl.BlockSpec((None, num_slots), lambda i: (i, 0))] * 2,
        out_shape=[jax.ShapeDtypeStruct((lists, num_slots), dtype) for dtype in (jnp.int32, jnp.bool_)],
        num_warps=warps,
        num_stages=1,
        interpret=interpret,
        name="sentence_cut",
    )(*operands, *lines)
    return slots.reshape(sentence.shape), listed.reshape(sentence.shape)


def check(score, sentence, position, count, length, cursor, event, budget, *, rules, query=None, vector=None, added=None):
    """Raise ``NotImplementedError`` for more slots than one program holds, and vectors that `check_scores` refuses."""
    if score is None:
        score_kernel.check_scores(query, vector, None)
    if not 0 < sentence.shape[2] <= MOST_SLOTS or not (vector if score is None else score).shape[2]:
        raise NotImplementedError(f"got {sentence.shape[2]} slots, expected 1 to {MOST_SLOTS}")
