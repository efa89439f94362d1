"""Tokens of the best sentences through Mosaic GPU, a program of one warpgroup for each list.

The search is that of `kth_select`; one running count gives both the rank among equal scores and the entry of the list.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.pallas import plgpu
from pallas_kernels._mosaic_gpu.search import MOST, threshold_of
from pallas_kernels._triton.kth_search import NEVER, order_key
from pallas_kernels.choose.sentencekv.sentence_cut.rules import CLOSES, bounds

HALF = 2**16 - 1
TAKES = f"{arrays.HOPPER}, S up to {MOST}"


def _body(
    cursor_ref, event_ref, budget_ref, count_ref, length_ref, sentence_ref, position_ref, score_ref, slots_ref, listed_ref,
    words, *, heads, rules, num_slots, sentences,
):  # fmt: skip
    # Of all lists: cursor, event [B]; budget [1]; count, length [L]; sentence, position, slots, listed [L, S]; score [L, N].
    index = lax.axis_index("x")
    row = lax.div(index, heads)
    count, length = arrays.scalar(count_ref, index), arrays.scalar(length_ref, index)
    written = jnp.where(arrays.scalar(event_ref, row) == CLOSES, 0, length + 1)
    high, space = bounds(arrays.scalar(cursor_ref, row), written, arrays.scalar(budget_ref, row * 0), rules)
    size = arrays.run_of(num_slots)
    slot = arrays.in_order(size)
    sentence, position = (arrays.load_run(ref, index, index * 0, size, -1) for ref in (sentence_ref, position_ref))
    stored = position >= 0
    inside = (slot >= rules.sinks) & (slot < high)
    eligible = stored & inside & (sentence >= 0) & (sentence < count)
    # NaN and -inf rank last, but before slots that are not eligible: they get the least finite score.
    least = float(jnp.finfo(jnp.float32).min)
    worth = arrays.load(score_ref, jnp.where(eligible, index * sentences + sentence, -1), least)
    key = jnp.where(eligible, order_key(jnp.where(worth > least, worth, least)), NEVER)
    threshold, ties, _ = threshold_of(key, space, 1, None, repeated=True)
    threshold = jnp.where(space > 0, threshold, 2**31 - 1)  # where nothing is wanted, the threshold may be below some keys
    # Taken are all stored slots outside of the bounds, all slots above the threshold, and of equal ones the lower slots.
    sure, equal = (stored & ~inside) | (key > threshold), eligible & (key == threshold)
    word = sure.astype(jnp.int32) + (equal.astype(jnp.int32) << 16)
    earlier, total = arrays.before(word, words), jnp.sum(word)
    chosen = sure | (equal & ((earlier >> 16) < ties))
    end, taken = ((x & HALF) + jnp.minimum(x >> 16, ties) for x in (earlier, total))
    # Chosen slots go to the front, and zeros for all other slots behind them, so every entry is written exactly once.
    place = jnp.where(chosen, end, taken + slot - end)
    at = jnp.where(place < num_slots, index * num_slots + place, -1)
    arrays.store(slots_ref, at, jnp.where(chosen, slot, 0))
    arrays.store(listed_ref, at, chosen.astype(jnp.int32))


def sentence_cut(score, sentence, position, count, length, cursor, event, budget, *, rules):
    """List the first, the newest and the best slots between them by sentence."""
    rows, heads, num_slots = sentence.shape
    lists = rows * heads
    body = functools.partial(_body, heads=heads, rules=rules, num_slots=num_slots, sentences=score.shape[2])
    slots, listed = arrays.program(
        body,
        [jax.ShapeDtypeStruct((lists, num_slots), dtype) for dtype in (jnp.int32, jnp.bool_)],
        grid=(lists,),
        scratch=[plgpu.SMEM((4,), jnp.int32)],
    )(
        cursor,
        event,
        budget.reshape(1),
        count.reshape(-1),
        length.reshape(-1),
        *(x.reshape(lists, -1) for x in (sentence, position, score)),
    )
    return slots.reshape(sentence.shape), listed.reshape(sentence.shape)


def check(score, sentence, position, count, length, cursor, event, budget, *, rules):
    """Raise ``NotImplementedError`` for other GPUs, and for more slots than one program holds."""
    arrays.check_hopper()
    if not 0 < sentence.shape[2] <= MOST or not score.shape[2] or max(sentence.size, score.size) >= 2**31:
        raise NotImplementedError(f"got {sentence.shape[2]} slots, expected 1 to {MOST}")
