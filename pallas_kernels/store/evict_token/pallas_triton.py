"""Online eviction as one Pallas Triton kernel, where XLA takes eight launches.

A program per head finds the slot of its worst token and moves the newest token there, in place.

The cursor is moved in place, too, because a loop of steps would copy it in every layer, which takes a third of the kernel's
time. So a head's program may read the row's cursor before or after it was moved. The head's own positions tell which: no slot
behind the slots in use holds a token.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_bytes
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.formats.quantised import Quantised

MOST_SLOTS = 2**14  # one program holds the scores of a head in registers
_NEVER = jnp.iinfo(jnp.int32).max


def _kernel(*refs, tokens, scored, gained, first, any_age):
    # Of all rows: limits [2] (budget and recent), cursor [B]. Of one head: `tokens` arrays of keys and values [S, D] (and
    # scales [S] or [S, 4]), position [S], and score [S] and gain [S] if given. Results: all of these but the gain and a
    # score of all heads, and the cursor [B], in the same memory.
    limits_ref, cursor_ref, *refs = refs
    count = tokens + 1 + scored + gained
    given, written = refs[:count], refs[count:]
    position_ref, *score_refs = given[tokens:]
    position_out, *score_out, moved_ref = written[tokens:]
    b, num_slots = pl.program_id(0), position_ref.shape[0]
    found = cursor_ref[b]
    behind = plt.load(position_ref.at[jnp.clip(found, 0, num_slots - 1)])
    cursor = found + ((found < num_slots) & (behind >= 0)).astype(jnp.int32)  # as it was before any program
    full, last = cursor > limits_ref[0], jnp.clip(cursor - 1, 0, num_slots - 1)
    # Read before another thread may write them: a value at a known slot needs no reduction.
    carried, at_last = position_ref[last], sum(ref[last] for ref in score_refs)

    slot = jnp.arange(pl.next_power_of_2(num_slots), dtype=jnp.int32)
    inside = slot < num_slots
    position = plt.load(position_ref.at[slot], mask=inside, other=-1)
    may_go = position >= max(first, 0)
    if not any_age:
        may_go &= position <= jnp.max(position) - limits_ref[1]
    if scored:
        # The lowest score; of equal scores the newest position; of equal positions, which do not occur, the last slot.
        score = sum(plt.load(ref.at[slot], mask=inside, other=0.0) for ref in score_refs)
        bound = jnp.where(may_go, score, jnp.inf)
        lowest = may_go & (bound == jnp.min(bound))
        tie = jnp.where(lowest, position, -1)
        worst = jnp.max(jnp.where(lowest & (tie == jnp.max(tie)), slot, 0))
        if score_out:  # the newest token takes its score with it, and its old slot gets 0
            moved = jnp.where(slot == worst, at_last, jnp.where(slot == last, 0.0, score))
            plt.store(score_out[0].at[slot], jnp.where(full, moved, score), mask=inside)
    else:
        age = jnp.where(may_go, position, _NEVER)
        worst = jnp.max(jnp.where(may_go & (age == jnp.min(age)), slot, 0))

    @pl.when(full)
    def _():
        for ref, out in zip(given[:tokens], written[:tokens], strict=True):
            rest = (slice(None),) * (len(ref.shape) - 1)
            out[(worst, *rest)] = ref[(last, *rest)]
        position_out[worst] = carried
        position_out[last] = jnp.int32(-1)
        moved_ref[b] = cursor - 1  # the same from all heads


def evict_token(
    key, value, position, cursor, score, *, budget, gain=None, first=0, recent=0, num_warps: int = 8, interpret=False
):
    """Evict the token of each head with the lowest score; ``interpret=True`` runs anywhere, slowly."""
    batch, heads = position.shape[:2]
    limits = jnp.stack([jnp.asarray(budget, jnp.int32), jnp.asarray(recent, jnp.int32)])
    tokens, structure = jax.tree.flatten((key, value))
    own = score is not None and score.shape[1] == heads  # the score of all heads does not move
    written = [*tokens, position, *([score] if own else [])]
    lines = [*written, *(x for x in (None if own else score, gain) if x is not None)]
    specs = [_of_head(x, heads) for x in lines]
    whole = pl.BlockSpec(cursor.shape, lambda b, h: (0,))
    out = triton_call(
        functools.partial(
            _kernel,
            tokens=len(tokens),
            scored=score is not None,
            gained=gain is not None,
            first=first,
            any_age=isinstance(recent, int) and recent <= 0,  # then the newest position need not be found
        ),
        grid=(batch, heads),
        in_specs=[pl.BlockSpec((2,), lambda b, h: (0,)), whole, *specs],
        out_specs=[*specs[: len(written)], whole],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*written, cursor)],
        input_output_aliases={1: len(written)} | {2 + i: i for i in range(len(written))},
        num_warps=num_warps,
        num_stages=1,
        interpret=interpret,
        name="evict_token",
    )(limits, cursor, *lines)
    key, value = jax.tree.unflatten(structure, out[: len(tokens)])
    position, *moved_score = out[len(tokens) : -1]
    return key, value, position, out[-1], moved_score[0] if moved_score else None


def _of_head(x, heads):
    """Show a program its head of x [B, H, ...], or the only entry of x [B, 1, ...], which all heads share."""
    rest, shared = x.shape[2:], x.shape[1] < heads
    return pl.BlockSpec((None, None, *rest), lambda b, h: (b, 0 if shared else h) + (0,) * len(rest))


def check(key, value, position, cursor, score, *, budget, gain=None, first=0, recent=0):
    """Raise ``NotImplementedError`` for heads with more slots than one program holds, or rows that are no block."""
    slots, dim = key.shape[2:]
    if dim & (dim - 1):
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two")
    if not 1 <= slots <= MOST_SLOTS:
        raise NotImplementedError(f"got {slots} slots, expected 1 to {MOST_SLOTS}")
    for store in (key, value):
        if isinstance(store, Quantised):
            check_bytes(store.codes)
