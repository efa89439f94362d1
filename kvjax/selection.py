"""How slots are chosen by score, with one rule for ties. Budgets are traced values under static sizes.

In a tie the lower index wins, as in `jax.lax.top_k`. So selections are deterministic.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.protocol.typing import EMPTY
from pallas_kernels import axes
from pallas_kernels.choose import kth_select
from pallas_kernels.choose.compact import compact as compact_mask
from pallas_kernels.numerics import ceil_share, finite_or_zero

_MOVED = 1024  # rows that `moved_rows` holds at once


def top_slots(score: Array, valid: Array, budget: Array | int, capacity: int) -> tuple[Array, Array]:
    """List the ``budget`` best valid slots of each head, in slot order.

    Args:
        score: float32 [B, H, S], higher is better; ``inf`` keeps a slot for certain.
        valid: bool [B, H, S].
        budget: slots to keep per head, traced; at most ``capacity``.
        capacity: static length K of the result.

    Returns:
        slots int32 [B, H, K] and keep bool [B, H, K]; kept slots come first, ascending.
    """
    # A valid slot must come before every invalid slot, even if its own score is -inf.
    order = jnp.where(valid, jnp.maximum(score, jnp.finfo(jnp.float32).min), -jnp.inf)
    return kth_select.kth_select_mask(order, budget, min(capacity, score.shape[-1]))


def check_score(method: Any, score: Array, shape: tuple[int, ...], letters: str) -> Array:
    """Return what a method's ``score`` returned, which must have this shape; ``letters`` are its axes.

    Raises:
        ValueError: it is no array of this shape, or holds no floating-point numbers.
    """
    if not isinstance(score, Array) or score.shape != shape or not jnp.issubdtype(score.dtype, jnp.floating):
        got = f"{score.dtype} {list(score.shape)}" if isinstance(score, Array) else type(score).__name__
        raise ValueError(f"{type(method).__name__}.score must return float32 {letters}, here {list(shape)}, got {got}")
    return score


def check_alike(method: Any, hook: str, before: Any, after: Any) -> Any:
    """Return ``after``, the metadata that a method's ``hook`` returned in a step: arrays as in ``before``.

    Raises:
        ValueError: the arrays differ in their number, shapes or dtypes, so that no loop could carry them.
    """
    old, new = ([f"{jnp.result_type(x)} {list(jnp.shape(x))}" for x in jax.tree.leaves(tree)] for tree in (before, after))
    if old != new or jax.tree.structure(before) != jax.tree.structure(after):
        told = [", ".join(texts) or "no array" for texts in (old, new)]
        raise ValueError(
            f"{type(method).__name__}.{hook} must return the metadata with the shapes and dtypes that they had, {told[0]}, "
            f"got {told[1]}"
        )
    return after


def among_best(score: Array, count: Array | int, capacity: int) -> Array:
    """Mask the ``count`` best entries of each row, at most ``capacity``: float32 [B, R, N] to bool [B, R, N].

    An entry of -inf is never among the best; in a tie the lower index wins.
    """
    best, listed = kth_select.kth_select_mask(score, count, min(capacity, score.shape[2]))
    return mask_of(best, listed, score.shape[2])


def top_mass(logits: Array, mass: float | Array) -> Array:
    """Mark the entries of the smallest set whose softmax adds up to ``mass``, and entries that equal one of the set.

    Args:
        logits: float32 [..., K]; -inf for entries that are no candidates.
        mass: above 0 and at most 1; 1 takes all entries.

    Returns:
        bool [..., K], anything for an entry of -inf.
    """
    weight = jnp.exp(logits - finite_or_zero(logits.max(axis=-1, keepdims=True)))
    ascending = jnp.sort(weight, axis=-1)
    below = jnp.cumsum(ascending, axis=-1)
    # From the smallest up: the small weights are added before a large sum would swallow them.
    left_out = (below <= (1 - mass) * below[..., -1:]) & (jnp.asarray(mass) < 1)
    least = jnp.where(left_out, ascending[..., -1:], ascending).min(axis=-1, keepdims=True)
    return weight >= least


def pick(values: Array, slots: Array) -> Array:
    """Gather ``values`` [B, H, S, ...] at ``slots`` int32 [B, H, K], which must be in range: [B, H, K, ...].

    `jnp.take_along_axis` gives the same, but guards against slots out of range, which takes many more operations.
    """
    return jax.vmap(jax.vmap(_pick))(values, slots)


def _pick(values: Array, slots: Array) -> Array:
    return values.at[slots].get(mode="promise_in_bounds", wrap_negative_indices=False)


def pick_each(values: Array, slots: Array) -> Array:
    """Gather the ``values`` [B, H, G, S] of each query head at ``slots`` int32 [B, H, K]: [B, H, G, K]; see `pick`."""
    return jax.vmap(jax.vmap(jax.vmap(_pick, (0, None))))(values, slots)


def mask_of(slots: Array, listed: Array, size: int) -> Array:
    """Mask the listed slots among ``size`` slots: slots int32 [B, H, K], in range, and bool ``listed`` to bool [B, H, S]."""

    def one(slots: Array, listed: Array) -> Array:
        none = jnp.zeros((size,), bool)
        return none.at[slots].max(listed, mode="promise_in_bounds", wrap_negative_indices=False)

    return jax.vmap(jax.vmap(one))(slots, listed)


def best_of_heads(score: Array, budget: Array, capacity: int, *, layerwise: bool = True) -> Array:
    """Mask the candidates that stay where heads share a budget: the best candidates of all heads together.

    Args:
        score: float32 [B, L, H, K], of the K candidates of each head of some layers; -inf never stays. On a mesh these are
            the heads of one device, and they share their budget with the heads of all devices.
        budget: int32, the mean over the heads that share it.
        capacity: the largest budget.
        layerwise: True: the heads of each layer share a budget. False: the heads of all layers share one.

    Returns:
        bool [B, L, H, K].
    """
    everyone, own = axes.joined(score, 2), score.shape[2]
    batch, layers, heads, entries = everyone.shape
    rows = layers if layerwise else 1
    share = layers * heads // rows
    flat = everyone.reshape(batch, rows, share * entries)
    chosen = among_best(flat, budget * share, share * min(capacity, entries)).reshape(everyone.shape)
    return lax.dynamic_slice_in_dim(chosen, axes.index(axes.MODEL) * own, own, 2)


def smooth(score: Array, kernel: int, pooling: str) -> Array:
    """Pool along the last axis with stride 1, which keeps the length: float32 [..., S].

    Args:
        score: float32 [..., S].
        kernel: window in slots; an even window reaches one slot further to the right.
        pooling: ``"avg"`` or ``"max"``. Past the edges an average sees zeros and still divides by ``kernel``, as torch's
            ``avg_pool1d`` does; a maximum sees nothing.
    """
    window = (1,) * (score.ndim - 1) + (kernel,)
    padding = ((0, 0),) * (score.ndim - 1) + (((kernel - 1) // 2, kernel // 2),)
    if pooling == "avg":
        return lax.reduce_window(score, 0.0, lax.add, window, (1,) * score.ndim, padding) / kernel
    return lax.reduce_window(score, -jnp.inf, lax.max, window, (1,) * score.ndim, padding)


def page_slots(pages: Array, page_size: int) -> Array:
    """List the slots of pages: page ids int32 [..., N] to slots int32 [..., N * page_size]."""
    slots = pages[..., None] * page_size + jnp.arange(page_size, dtype=pages.dtype).reshape((1,) * pages.ndim + (-1,))
    return slots.reshape(*pages.shape[:-1], -1)


def compact(mask: Array, capacity: int) -> tuple[Array, Array]:
    """List the first ``capacity`` true entries of a mask.

    Args:
        mask: bool [..., S].
        capacity: static length K of the result.

    Returns:
        slots int32 [..., K] and keep bool [..., K]; listed slots come first, ascending, and all other entries are slot 0.
    """
    return compact_mask(mask, capacity)


def kept_positions(position: Array, slots: Array, keep: Array, room: int) -> tuple[Array, Array]:
    """Compute the positions int32 [B, H, K + room] and the cursor int32 [B] of a cache that `LayerCache.compact` makes."""
    kept = jnp.where(keep, pick(position, slots), EMPTY)
    cursor = axes.most(jnp.sum(kept >= 0, axis=2, dtype=jnp.int32).max(axis=1))
    return jnp.pad(kept, ((0, 0), (0, 0), (0, room)), constant_values=EMPTY), cursor


def kept_rows(store: Array, slots: Array, room: int) -> Array:
    """Gather ``slots`` int32 [B, H, K] of ``store`` [B, H, S, ...] and append ``room`` zeros: [B, H, K + room, ...]."""
    return jnp.pad(pick(store, slots), ((0, 0), (0, 0), (0, room), *((0, 0),) * (store.ndim - 3)))


def moved_rows(store: Array, slots: Array, due: Array | None) -> Array:
    """Move ``slots`` int32 [B, H, K], ascending, of ``store`` [B, H, S, ...] to the first K slots, in place.

    Entries that are not ascending get rows of any slot. Blocks of rows move from the front on, so no row is overwritten
    before it has moved, and one block is in memory besides the store.

    Args:
        due: bool [B], the rows of the batch to change; None changes all.
    """

    def move(store: Array, first: Array | int, size: int) -> Array:
        rows = pick(store, lax.dynamic_slice_in_dim(slots, first, size, 2))
        if due is not None:
            stay = lax.dynamic_slice_in_dim(store, first, size, 2)
            rows = jnp.where(due.reshape(-1, *(1,) * (store.ndim - 1)), rows, stay)
        rows, store = lax.optimization_barrier((rows, store))  # read before it is written: else XLA writes into a copy
        return lax.dynamic_update_slice_in_dim(store, rows, first, 2)

    blocks, rest = divmod(slots.shape[2], _MOVED)
    if blocks:
        store = lax.fori_loop(0, blocks, lambda number, store: move(store, number * _MOVED, _MOVED), store)
    return move(store, blocks * _MOVED, rest) if rest else store


def share(fraction: float | Array, count: int | Array) -> Any:
    """Compute ``ceil(fraction * count)``, at least 1 if ``count`` is: an int for Python numbers, int32 for arrays.

    The product is lowered by a factor of 1 - 1e-6 first, so that 0.1 * 10 gives 1 in float32 too.
    """
    if isinstance(fraction, (int, float)) and isinstance(count, int):
        return min(count, max(1, math.ceil(fraction * count * (1 - 1e-6))))
    return ceil_share(jnp.asarray(fraction, jnp.float32), jnp.asarray(count))


def floor_share(factor: float | Array, count: int | Array) -> Any:
    """Compute ``floor(factor * count)``: an int for Python numbers, int32 for arrays.

    The product is raised by a factor of 1 + 1e-6 first, so that 0.2 * 10 gives 2 in float32 too.
    """
    if isinstance(factor, (int, float)) and isinstance(count, int):
        return math.floor(factor * count * (1 + 1e-6))
    product = jnp.asarray(factor, jnp.float32) * jnp.asarray(count).astype(jnp.float32)
    return jnp.floor(product * (1 + 1e-6)).astype(jnp.int32)
