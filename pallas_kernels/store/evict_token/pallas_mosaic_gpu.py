"""Online eviction through Mosaic GPU, a program for each head, in place.

As in the kernel for Triton, the cursor is moved in place too, so a head's program may read it before or after it was moved:
the head's own positions tell which.
"""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.pallas import pl
from pallas_kernels._mosaic_gpu.search import MOST
from pallas_kernels._triton.quantised import refuse_codes

NEVER = jnp.iinfo(jnp.int32).max
TAKES = f"{arrays.HOPPER}, S up to {MOST}, no codes"


def _body(limits_ref, *refs, heads, slots, dim, shared, gained, owned, first, any_age):
    # limits [2] (budget and recent); a score of all heads [B, 1, S] if shared; gain [B, H, S] if gained; then in place: key,
    # value [B, H, S, D], position [B, H, S], score [B, H, S] if owned, cursor [B].
    others, (key_ref, value_ref, position_ref, *score_ref, cursor_ref) = refs[: shared + gained], refs[shared + gained :]
    b, line = lax.axis_index("x"), lax.axis_index("x") * heads + lax.axis_index("y")
    found = arrays.scalar(cursor_ref, b)
    behind = arrays.scalar(position_ref, line * slots + jnp.clip(found, 0, slots - 1))
    cursor = found + ((found < slots) & (behind >= 0)).astype(jnp.int32)  # as it was before any program
    full, last = cursor > arrays.scalar(limits_ref, b * 0), jnp.clip(cursor - 1, 0, slots - 1)
    slot = arrays.counted(arrays.size_of(slots))
    inside = slot < slots
    bases = [b * slots] * shared + [line * slots] * (gained + owned)
    scores = [(ref, base) for ref, base in zip((*others, *score_ref), bases, strict=True)]
    position = arrays.load(position_ref, jnp.where(inside, line * slots + slot, -1), -1)
    score = [arrays.load(ref, jnp.where(inside, base + slot, -1)) for ref, base in scores]
    carried = arrays.scalar(position_ref, line * slots + last)
    at_last = sum(arrays.scalar(ref, base + last) for ref, base in scores)
    channel = arrays.counted(arrays.size_of(dim))

    def at(row):
        return jnp.where(channel < dim, channel, -1), (arrays.spread(line * slots + row, channel.shape[0]), dim)

    place, rows = at(last)
    tokens = [arrays.load(ref, place, rows=rows) for ref in (key_ref, value_ref)]
    arrays.meet()  # all is read that may be written
    may_go = position >= max(first, 0)
    if not any_age:
        may_go &= position <= jnp.max(position) - arrays.scalar(limits_ref, b * 0 + 1)
    if score:
        # The lowest score; of equal scores the newest position; of equal positions, which do not occur, the last slot.
        score = sum(score)
        bound = jnp.where(may_go, score, jnp.inf)
        lowest = may_go & (bound == -jnp.max(-bound))
        tie = jnp.where(lowest, position, -1)
        worst = jnp.max(jnp.where(lowest & (tie == jnp.max(tie)), slot, 0))
        if owned:  # the newest token takes its score with it, and its old slot gets 0
            moved = jnp.where(slot == worst, at_last, jnp.where(slot == last, 0.0, score))
            changed = inside if gained else inside & full & ((slot == worst) | (slot == last))
            moved = jnp.where(full, moved, score)
            arrays.store(score_ref[0], jnp.where(changed, line * slots + slot, -1), moved)
    else:
        age = jnp.where(may_go, position, NEVER)
        worst = jnp.max(jnp.where(may_go & (age == jnp.min(age)), slot, 0))

    @pl.when(full)
    def _():
        place, rows = at(worst)
        for ref, token in zip((key_ref, value_ref), tokens, strict=True):
            arrays.store(ref, place, token, rows)
        entry = arrays.counted(128)
        where = jnp.where(entry < 1, arrays.spread(line * slots + last, 128), -1)
        where = jnp.where(entry == 1, arrays.spread(line * slots + worst, 128), where)
        # Where the newest token goes itself, its slot is empty.
        where = jnp.where((entry == 1) & (worst == last), -1, where)
        arrays.store(position_ref, where, jnp.where(entry == 1, arrays.spread(carried, 128), -1))
        arrays.put(cursor_ref, b, cursor - 1)  # the same from all heads


def evict_token(key, value, position, cursor, score, *, budget, gain=None, first=0, recent=0):
    """Evict the token of each head with the lowest score."""
    batch, heads, slots, dim = key.shape
    owned = score is not None and score.shape[1] == heads  # the score of all heads does not move
    others = [x for x in (None if owned else score, gain) if x is not None]
    body = functools.partial(
        _body, heads=heads, slots=slots, dim=dim, shared=score is not None and not owned, gained=gain is not None,
        owned=owned, first=first, any_age=isinstance(recent, int) and recent <= 0,
    )  # fmt: skip
    states = [key, value, position, *([score] if owned else []), cursor]
    limits = jnp.stack([jnp.asarray(budget, jnp.int32), jnp.asarray(recent, jnp.int32)])
    key, value, position, *moved, cursor = arrays.in_place(body, states, grid=(batch, heads))(limits, *others)
    return key, value, position, cursor, moved[0] if moved else None


def check(key, value, position, cursor, score, *, budget, gain=None, first=0, recent=0):
    """Raise ``NotImplementedError`` for other GPUs, codes, dtypes, and heads with more slots than one program holds."""
    arrays.check_hopper()
    refuse_codes(key, value)
    arrays.check_floats(key, value)
    slots = key.shape[2]
    if not 1 <= slots <= MOST or position.size >= 2**31:
        raise NotImplementedError(f"got {slots} slots, expected 1 to {MOST}")
