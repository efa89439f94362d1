"""One Pallas Triton kernel for the merge: a program per list, query head and piece of the head dimension.

In jnp the merge takes three to four launches, and each launch costs as much as this kernel. The attention that each slot
receives needs the merged softmax too, so further programs of the same kernel compute it.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.numerics import finite_or_zero

PIECE = 64  # channels per program, so that several multiprocessors read the partials of one list
MOST_PARTS = 1024  # all parts are one block, in registers
SLOTS = 256  # slots per program that computes the attention they receive


def _kernel(*refs, piece):
    # Operands: pairs of out [L, N, G, D] and lse [L, N, G], each pair with an N of its own.
    # Results: merged [L, G, D]; whole [L, G].
    *refs, merged_ref, whole_ref = refs
    row, head, at = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    _merge(refs, merged_ref, whole_ref, row, head, at * piece, piece)


def _mass_kernel(*refs, piece, heads, queries):
    # Operands and results of `_kernel`, but logits [L, M, S], position [L, S], limit [B] follow the pairs, and mass [L, S]
    # follows the results. There are logits of the first of a head's ``queries``, of which all are in G.
    *refs, logits_ref, position_ref, limit_ref, merged_ref, whole_ref, mass_ref = refs
    row, unit = pl.program_id(0), pl.program_id(1)
    group, dim = merged_ref.shape[1:]
    merging = group * (dim // piece)

    @pl.when(unit < merging)
    def _():
        _merge(refs, merged_ref, whole_ref, row, jax.lax.rem(unit, group), jax.lax.div(unit, group) * piece, piece)

    @pl.when(unit >= merging)
    def _():
        slots = position_ref.shape[1]
        slot = (unit - merging) * SLOTS + jnp.arange(SLOTS, dtype=jnp.int32)
        held = (slot < slots) & (slot < limit_ref[jax.lax.div(row, heads)])
        held &= plt.load(position_ref.at[row, slot], mask=held, other=-1) >= 0
        mass = jnp.zeros((SLOTS,), jnp.float32)
        for head in range(group // queries):  # a slot that holds no token is not read
            maximum, total = _softmax([_lse(ref, row, head * queries)[1] for ref in refs[1::2]])
            logits = plt.load(logits_ref.at[row, head, slot], mask=held, other=-jnp.inf)
            mass += jnp.exp(logits - finite_or_zero(maximum + jnp.log(total)))
        plt.store(mass_ref.at[row, slot], mass, mask=slot < slots)


def _lse(ref, row, head):
    """Load the lse of all N parts as a block, and their indices. Its size is a power of two: padding has -inf."""
    parts = ref.shape[1]
    part = jnp.arange(pl.next_power_of_2(parts), dtype=jnp.int32)
    index = jnp.minimum(part, parts - 1)
    return index, jnp.where(part < parts, ref[row, index, head], -jnp.inf)


def _softmax(lses):
    """Reduce all parts to their maximum and the sum of exp(lse - maximum)."""
    maximum = finite_or_zero(functools.reduce(jnp.maximum, [jnp.max(lse) for lse in lses]))
    return maximum, sum(jnp.sum(jnp.exp(lse - maximum)) for lse in lses)


def _merge(refs, merged_ref, whole_ref, row, head, first, piece):
    """Merge channels ``first`` to ``first + piece - 1`` of a query head."""
    columns = pl.ds(first, piece)
    found = [_lse(ref, row, head) for ref in refs[1::2]]
    outs = [ref[row, index, head, columns] for ref, (index, _) in zip(refs[::2], found, strict=True)]
    maximum, total = _softmax([lse for _, lse in found])

    def weighted(out, lse):
        weight = jnp.exp(lse - maximum)
        out = jnp.where((weight > 0)[:, None], out, 0.0)  # an empty part may hold anything
        return jnp.sum(out * weight[:, None], axis=0)

    whole = sum(weighted(out, lse) for out, (_, lse) in zip(outs, found, strict=True))
    merged_ref[row, head, columns] = (whole / jnp.where(total > 0, total, 1.0)).astype(merged_ref.dtype)

    @pl.when(first == 0)  # the first piece writes the log-sum-exp for all pieces
    def _():
        whole_ref[row, head] = maximum + jnp.log(total)


def merge_splits(out, lse, *partials, dtype, received=None, queries=1, interpret=False):
    """Merge the partial softmaxes of each list; ``interpret=True`` runs anywhere, slowly.

    ``partials`` are one more out [L, M, G, D] and lse [L, M, G], whose M parts are merged too.

    ``received`` is logits float32 [B, H, G / queries, S] or with more heads, which are not read, position int32 [B, H, S] and
    limit int32 [B], with L = B * H. It adds a third result: float32 [B, H, S], the probabilities under the merged softmax,
    summed over the first of every ``queries`` entries of G. They are 0 for slots at a negative position or from the limit on,
    whose logits may hold anything.
    """
    lists, _, group, dim = out.shape
    piece = min(PIECE, dim & -dim)  # the largest power of two that divides D
    shapes = jax.ShapeDtypeStruct((lists, group, dim), dtype), jax.ShapeDtypeStruct((lists, group), jnp.float32)
    call = functools.partial(triton_call, name="merge_splits", num_stages=1, interpret=interpret)
    if received is None:
        grid = (lists, group, dim // piece)
        return call(functools.partial(_kernel, piece=piece), grid=grid, out_shape=shapes)(out, lse, *partials)
    logits, position, limit = received
    rows, heads, slots = position.shape
    *merged, mass = call(
        functools.partial(_mass_kernel, piece=piece, heads=heads, queries=queries),
        grid=(lists, group * (dim // piece) + pl.cdiv(slots, SLOTS)),
        out_shape=(*shapes, jax.ShapeDtypeStruct((lists, slots), jnp.float32)),
    )(out, lse, *partials, logits.reshape(lists, -1, slots), position.reshape(lists, slots), limit)
    return *merged, mass.reshape(rows, heads, slots)


def check(out, lse, *, dtype):
    """Raise ``NotImplementedError`` for more parts than one program holds."""
    if out.shape[1] > MOST_PARTS:
        raise NotImplementedError(f"got {out.shape[1]} parts, expected at most {MOST_PARTS}")
