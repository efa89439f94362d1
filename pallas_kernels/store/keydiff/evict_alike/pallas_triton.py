"""Online eviction of the key most alike to the mean direction, as one Pallas Triton kernel.

Cosines are the work of many programs, since one alone would read slowly. Each program finds the worst slot of its part. The
row's last program to finish, which an atomic counter tells, chooses among the parts and moves the tokens of all heads. By
then all programs have read what it writes. So it updates the cursor, the sum of the directions and the counter in place, too,
and sets the counter to zero again.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.quantised import check_codes, rows_and_scale
from pallas_kernels.score.keydiff.dissimilarity.reference import LEAST
from pallas_kernels.store.keydiff.evict_alike.reference import number, unit, words

PART = 64  # keys per program
MOST_SLOTS = 2**14  # as in `evict_token`
TOGETHER = 2**11  # numbers of the heads whose tokens are moved at once, held in registers


def _kernel(*refs, structure, dtype, interpret):
    # Operands: budget [1], newest [B], then the arrays in place: a tree of key, value, position, cursor, total, done.
    # Results: the arrays in place, and for each part [B, H, parts] its least score and that token's position and slot.
    budget_ref, newest_ref, *refs = refs
    count = structure.num_leaves
    given, written = (jax.tree.unflatten(structure, x) for x in (refs[:count], refs[count : 2 * count]))
    key_ref, _, position_ref, cursor_ref, total_ref, _ = given
    _, _, position_of, cursor_of, total_of, done_ref = written
    least_refs = refs[2 * count :]
    heads, slots, parts = *position_ref.shape[1:], least_refs[0].shape[2]
    widest = max(pl.next_power_of_2(parts), total_ref.shape[3])
    together = min(pl.next_power_of_2(heads), max(TOGETHER // widest, 1))
    b, h, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)

    def keys(*at):  # float32 [..., D]
        x, scale = rows_and_scale(key_ref, (b, *at, slice(None)), jnp.float32)
        return (x if scale is None else (x * scale.astype(jnp.float32)[..., None]).astype(dtype)).astype(jnp.float32)

    slot = part * PART + jnp.arange(PART, dtype=jnp.int32)
    position = plt.load(position_ref.at[b, h, slot], mask=slot < slots, other=-1)
    held = position >= 0
    key = keys(h, jnp.minimum(slot, slots - 1))  # threads behind the last slot read the last key again
    cursor, stored = cursor_ref[b], newest_ref[b] >= 0
    full, last = cursor > budget_ref[0], jnp.clip(cursor - 1, 0, slots - 1)
    total = number(total_ref[b, h, 0, :], total_ref[b, h, 1, :], slots) + unit(jnp.where(stored, keys(h, last), 0.0))
    # One division for a key, not for each of its channels. An empty slot may hold NaN.
    score = -jnp.sum(key * total[None, :], axis=1) / jnp.maximum(jnp.sqrt(jnp.sum(key * key, axis=1)), LEAST)
    for ref, x in zip(least_refs, _worst(jnp.where(held, score, jnp.inf), position, slot, axis=0), strict=True):
        ref[b, h, part] = x
    _wait(interpret)  # until all threads have read, and written the worst slot
    before = plt.atomic_add(done_ref, (b,), jnp.ones((), jnp.int32))

    def move(head):  # the newest tokens of some heads, and the sums of their directions
        # What does not wait for the worst slot is read first: a compiler moves no read across a barrier.
        each = jnp.minimum(jnp.arange(pl.next_power_of_2(parts), dtype=jnp.int32), parts - 1)
        found = [ref[b, head[:, None], each[None, :]] for ref in least_refs]  # the last part again changes nothing
        end, totals = jnp.broadcast_to(last, head.shape), [total_ref[b, head, i, :] for i in range(2)]
        carried, came = position_ref[b, head, end], jnp.where(stored, keys(head, end), 0.0)
        rests = [(slice(None),) * (len(ref.shape) - 3) for ref in jax.tree.leaves(given[:2])]
        moved = [ref[(b, head, end, *rest)] for ref, rest in zip(jax.tree.leaves(given[:2]), rests, strict=True)]
        position, worst = _worst(*found, axis=1)[1:]
        gone = jnp.where((full & (position >= 0))[:, None], keys(head, worst), 0.0)
        changes = zip(words(unit(came), slots), words(unit(gone), slots), strict=True)
        totals = [x + new - old for x, (new, old) in zip(totals, changes, strict=True)]
        _wait(interpret)  # until all threads have read
        for i, x in enumerate(totals):
            total_of[b, head, i, :] = x

        @pl.when(full)
        def _():
            for ref, rest, x in zip(jax.tree.leaves(written[:2]), rests, moved, strict=True):
                ref[(b, head, worst, *rest)] = x
            # If the newest token goes itself, its slot is written twice, with the same value.
            position_of[b, head, worst] = jnp.where(worst == last, -1, carried)
            position_of[b, head, end] = jnp.full(head.shape, -1, jnp.int32)

    @pl.when(before == heads * parts - 1)
    def _():
        for first in range(0, heads, together):
            # The size of a block is a power of two: the last head is repeated, and its rows are written again.
            move(jnp.minimum(first + jnp.arange(together, dtype=jnp.int32), heads - 1))
        done_ref[b] = jnp.int32(0)
        cursor_of[b] = cursor - full.astype(jnp.int32)


def _worst(score, position, slot, axis):
    """Find the least score along an axis, the newest position that has it, and its last slot; 0 if no token is held.

    ``score`` is infinite where no token is held, and ``position`` negative.
    """

    def along(x):
        return x if axis == 0 else x[:, None]

    least = jnp.min(score, axis=axis)
    lowest = (position >= 0) & (score == along(least))
    newest = jnp.max(jnp.where(lowest, position, -1), axis=axis)
    return least, newest, jnp.max(jnp.where(lowest & (position == along(newest)), slot, 0), axis=axis)


def _wait(interpret):
    if not interpret:
        plt.debug_barrier()


def evict_alike(key, value, position, cursor, total, done, *, newest, budget, interpret=False):
    """Evict the key of each head that is most alike to the mean direction; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, slots = position.shape
    parts = pl.cdiv(slots, PART)
    arrays, structure = jax.tree.flatten((key, value, position, cursor, total, done))
    small = [jnp.asarray(budget, jnp.int32).reshape(1), newest]
    shapes = [(x.shape, x.dtype) for x in arrays]
    shapes += [((batch, heads, parts), dtype) for dtype in (jnp.float32, jnp.int32, jnp.int32)]
    out = triton_call(
        functools.partial(_kernel, structure=structure, dtype=key.dtype, interpret=interpret),
        grid=(batch, heads, parts),
        out_shape=[jax.ShapeDtypeStruct(*x) for x in shapes],
        input_output_aliases={len(small) + i: i for i in range(len(arrays))},
        num_warps=8 if key.shape[3] > 128 else 4,
        num_stages=1,
        interpret=interpret,
        name="evict_alike",
    )(*small, *arrays)
    return jax.tree.unflatten(structure, out[: len(arrays)])


def check(key, value, position, cursor, total, done, *, newest, budget):
    """Raise ``NotImplementedError`` for sizes that are no block of the kernel, and for more slots than it holds."""
    slots, dim = key.shape[2:]
    if dim & (dim - 1) or dim < 16:
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two of at least 16")
    if not 1 <= slots <= MOST_SLOTS:
        raise NotImplementedError(f"got {slots} slots, expected 1 to {MOST_SLOTS}")
    check_codes(key, value)
