"""Tokens of the best sentences through Mosaic GPU, a program for each list.

Scores of vectors stay in shared memory. The search is that of `kth_select`; one running count gives both the rank among equal
scores and the entry of the list.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.pallas import plgpu
from pallas_kernels._mosaic_gpu.products import Products
from pallas_kernels._mosaic_gpu.search import MOST, listed, team_for, threshold_of
from pallas_kernels._triton.kth_search import NEVER, order_key
from pallas_kernels.choose.sentencekv.sentence_cut.rules import CLOSES, bounds
from pallas_kernels.score.page_score.pallas_mosaic_gpu import check_scores

TAKES = f"{arrays.HOPPER}, S and N up to {MOST}"
STEPS = 2  # vectors of which a thread reads a part together


def _score(refs, shared, index, count, n, team, sentences):
    """Write the scores of the finished sentences, and of a few more, to ``shared`` float32 [N + 1]."""
    query_ref, vector_ref, *added_ref = refs
    (row, _, writes), step_row = n.entries(), n.step_rows()
    each = team.groups * n.rows  # vectors that the warpgroups read in a step

    def load(step):
        at = jnp.minimum(step * each + team.group() * n.rows + step_row, sentences - 1)
        return n.chunks((vector_ref,), index * sentences + at)

    def add(step, chunks):
        ahead, at = load(step + 1), step * each + team.group() * n.rows + row
        product = n.multiply(query, chunks, [vector_ref.dtype])
        arrays.store_shared(shared, jnp.where(writes & (at < sentences), at, sentences), product)
        return ahead

    first = load(jnp.int32(0))
    query = n.queries(query_ref, index, *added_ref)
    lax.fori_loop(0, lax.div(jnp.minimum(count, sentences) + (each - 1), each), add, first)
    team.meet()


def _body(
    cursor_ref, event_ref, budget_ref, count_ref, length_ref, sentence_ref, position_ref, *refs,
    heads, rules, num_slots, sentences, team, products,
):  # fmt: skip
    # Of all lists: cursor, event [B]; budget [1]; count, length [L]; sentence, position, slots, listed [L, S]; score [L, N],
    # or query [L, G, D], vector [L * N, D] and, if any, added [L, G, D].
    *refs, slots_ref, listed_ref, scratch, bins, shared = (*refs, *(None,) * (products is None))
    index = lax.axis_index("x")
    row = lax.div(index, heads)
    count, length = arrays.scalar(count_ref, index), arrays.scalar(length_ref, index)
    written = jnp.where(arrays.scalar(event_ref, row) == CLOSES, 0, length + 1)
    high, space = bounds(arrays.scalar(cursor_ref, row), written, arrays.scalar(budget_ref, row * 0), rules)
    slot = team.entries()
    sentence, position = (team.load(ref, index, -1) for ref in (sentence_ref, position_ref))
    if products is not None:
        _score(refs, shared, index, count, products, team, sentences)
    stored = position >= 0
    inside = (slot >= rules.sinks) & (slot < high)
    eligible = stored & inside & (sentence >= 0) & (sentence < count)
    # NaN and -inf rank last, but before slots that are not eligible: they get the least finite score.
    least = float(jnp.finfo(jnp.float32).min)
    if products is None:
        worth = arrays.load(refs[0], jnp.where(eligible, index * sentences + sentence, -1), least)
    else:
        worth = arrays.load_shared(shared, jnp.where(eligible, sentence, sentences))
    key = jnp.where(eligible, order_key(jnp.where(worth > least, worth, least)), NEVER)
    threshold, ties, _ = threshold_of(key, space, num_slots, team, scratch, bins, team.parts == 1)
    # Taken are all stored slots outside of the bounds, all slots above the threshold, and of equal ones the lower slots.
    sure, equal = (stored & ~inside) | (key > threshold), eligible & (key == threshold)
    word = sure.astype(jnp.int32) + (equal.astype(jnp.int32) << 16)
    chosen, end, taken = listed(word, ties, team, scratch)
    # Chosen slots go to the front, and zeros for all other slots behind them, so every entry is written exactly once.
    place = jnp.where(chosen, end, taken + slot - end)
    at = jnp.where(place < num_slots, index * num_slots + place, -1)
    arrays.store(slots_ref, at, jnp.where(chosen, slot, 0))
    arrays.store(listed_ref, at, chosen.astype(jnp.int32))
    team.end()


def sentence_cut(
    score, sentence, position, count, length, cursor, event, budget, *, rules, query=None, vector=None, added=None
):  # fmt: skip
    """List the first, the newest and the best slots between them by sentence."""
    rows, heads, num_slots = sentence.shape
    lists, team = rows * heads, team_for(num_slots)
    sentences, products, scratch = (vector if score is None else score).shape[2], None, team.scratch
    if score is None:
        products = Products(*query.shape[2:], STEPS, summed=True)
        given = [query.reshape(lists, *query.shape[2:]), vector.reshape(-1, vector.shape[3])]
        given += [] if added is None else [added.reshape(lists, *added.shape[2:])]
        scratch = [*scratch, plgpu.SMEM((sentences + 1,), jnp.float32)]
    else:
        given = [score.reshape(lists, sentences)]
    body = functools.partial(
        _body, heads=heads, rules=rules, num_slots=num_slots, sentences=sentences, team=team, products=products
    )
    slots, mask = arrays.program(
        body,
        [jax.ShapeDtypeStruct((lists, num_slots), dtype) for dtype in (jnp.int32, jnp.bool_)],
        grid=(lists,),
        parts=team.parts,
        groups=team.groups,
        scratch=scratch,
    )(
        cursor,
        event,
        budget.reshape(1),
        count.reshape(-1),
        length.reshape(-1),
        *(x.reshape(lists, -1) for x in (sentence, position)),
        *given,
    )
    return slots.reshape(sentence.shape), mask.reshape(sentence.shape)


def check(score, sentence, position, count, length, cursor, event, budget, *, rules, query=None, vector=None, added=None):
    """Raise ``NotImplementedError`` for other GPUs, for more slots than a program holds, and as `check_scores` does."""
    arrays.check_hopper()
    scored = vector if score is None else score
    if not 0 < sentence.shape[2] <= MOST or not 0 < scored.shape[2] <= MOST or max(sentence.size, scored.size) >= 2**31:
        raise NotImplementedError(f"got {sentence.shape[2]} slots and {scored.shape[2]} sentences, expected 1 to {MOST}")
    if score is None:
        check_scores(query, (vector,))
