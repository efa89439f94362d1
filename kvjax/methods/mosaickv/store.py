"""MosaicKV's storage besides its buffer: packed tokens, block means and segments, and how tokens get into it.

Every token is packed when it arrives, at the slot of its position, and the mean of a block with its last token; they become
visible when the buffer is full. So the work of packing a full buffer is spread over steps, without a branch: `jax.vmap` would
compute both sides of a branch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from kvjax.cache import LayerCache, LayerStorage, PlainCache
from kvjax.methods.mosaickv.strategy import Layout, Packed, Segment, basis, fit, moments, pick, prune, put, stack
from kvjax.protocol.typing import EMPTY, not_none, pytree
from kvjax.selection import page_slots
from pallas_kernels import axes
from pallas_kernels.formats.packed_vectors import words_of
from pallas_kernels.host import on_host, put_rows, to_device
from pallas_kernels.numerics import filled
from pallas_kernels.store.mosaickv.pack_token import pack_token

_SORTED = 8192  # tokens of a prompt whose channels are sorted at once, which takes several times their bytes
_FITS = 10  # output segments that there is room to fit; more if many tokens follow, one per 256


@pytree
class Output:
    """The tokens behind the packed prompt as the dynamic strategy needs them, to fit segments of them."""

    key: Array  # [B, H, R, D], exact keys from slot `Store.prompt` on; in host memory if offloaded
    value: Array  # [B, H, R, D], their values
    begin: Array  # int32 [B], first slot of the open segment
    starts: Array  # int32 [B, E], first slot of each fitted output segment; past every slot if it is not fitted yet
    fitted: Array  # int32 [B], output segments fitted so far
    open_loss: Array  # float32 [B], loss summed over the open segment's tokens, mean over heads
    total_loss: Array  # float32 [B], loss summed over all tokens, when each was first packed
    prompt_loss: Array  # float32 [B], mean loss of the packed prompt


@pytree
class Store:
    """Packed storage. Slot i holds the token at position i, and block p begins at slot p * granule."""

    key: Packed  # [B, H, N, ...]
    value: Packed  # [B, H, N, ...]
    block: Packed  # [B, H, N / granule, ...]
    segments: Segment  # [B, H, M, ...], the segments of the prompt, then E that are fitted on output
    packed: Array  # int32 [B], visible slots; the tokens behind them are still in the buffer
    prompt: Array  # int32 [B], slots of these that the prompt filled
    last: Array  # int32 [B], the prompt's last segment that has tokens
    output: Output | None  # under the dynamic strategy only

    def with_exact(self, key: Array | None, value: Array | None) -> Store:
        """Replace the exact copy of the output."""
        output = dataclasses.replace(not_none("output", self.output), key=key, value=value)
        return dataclasses.replace(self, output=output)

    @property
    def num_segments(self) -> int:
        """The number of segments with room for bases."""
        return self.segments.basis_key.shape[2]

    @property
    def prompt_segments(self) -> int:
        """The number of the prompt's segments, which come first."""
        return self.num_segments - (0 if self.output is None else self.output.starts.shape[1])


def build(
    layout: Layout, raw: LayerCache, max_new_tokens: int, max_loss: float | Array, max_variance: float | Array
) -> tuple[LayerCache, Store]:
    """Pack a prompt.

    Args:
        layout: static sizes.
        max_loss, max_variance: see `kvjax.methods.mosaickv.strategy.fit`.

    Returns:
        The buffer, of ``2 * layout.buffer`` slots, with the tokens that do not fill a buffer; and the store of all earlier
        tokens.
    """
    size = layout.buffer
    packed = raw.cursor // size * size
    # One row at a time: packing works on float32 copies of a segment. The decompositions of all rows take as long as one.
    bases = basis(_by_row(functools.partial(_moments, layout), raw.key, raw.value, packed))
    store = _by_row(
        functools.partial(_pack_prompt, layout, max_new_tokens=max_new_tokens, max_loss=max_loss, max_variance=max_variance),
        raw.key, raw.value, packed, bases,
    )  # fmt: skip
    slot = packed[:, None] + jnp.arange(2 * size, dtype=jnp.int32)[None]
    shape, keep = (*raw.key.shape[:2], 2 * size), slot < raw.cursor[:, None]
    source = jnp.broadcast_to(jnp.minimum(slot, raw.num_slots - 1)[:, None], shape)
    cache = raw.compact(source, jnp.broadcast_to(keep[:, None], shape), 0)
    waiting = jnp.where(keep, slot, EMPTY)[:, :size]
    return cache, write(layout, cache, store, cache.key[:, :, :size], cache.value[:, :, :size], waiting)


def _segment(layout: Layout, key: Array, value: Array, packed: Array, first: int) -> tuple[Array, Array, Array]:
    """Cut the segment from slot ``first`` on out of key and value: whole buffers, zero from ``packed`` on; and its mask."""
    given = key.shape[2]
    stop = min(first + layout.segment, _ceil(given, layout.buffer))
    valid = jnp.arange(first, stop)[None] < packed[:, None]
    behind = ((0, 0), (0, 0), (0, max(stop - given, 0)), (0, 0))
    k, v = (jnp.where(valid[:, None, :, None], jnp.pad(x[:, :, first:stop], behind), 0) for x in (key, value))
    return k, v, valid


def _moments(layout: Layout, key: Array, value: Array, packed: Array) -> Array:
    """Compute the `moments` of each segment of prompts: float32 [B, N, 2, H, D, D]."""
    found = []
    for first in layout.segments(key.shape[2]):
        k, v = (x.astype(jnp.float32) for x in _segment(layout, key, value, packed, first)[:2])  # one segment's at a time
        key, value, both = lax.optimization_barrier((key, value, moments(k, v)))
        found.append(both)
    return jnp.stack(found, axis=1)


def _pack_prompt(
    layout: Layout,
    key: Array,
    value: Array,
    packed: Array,
    bases: Array,
    max_new_tokens: int,
    max_loss: float | Array,
    max_variance: float | Array,
) -> Store:
    """Pack the first ``packed`` int32 [B] tokens of prompts with raw key and value [B, H, S, D] into a store.

    Its ``bases`` float32 [B, N, 2, H, D, D] are those of the segments.
    """
    size, dtype, given = layout.buffer, key.dtype, key.shape[2]
    prompt, room = _ceil(given, size), _ceil(max_new_tokens, size)
    segments, rows, loss = [], [], jnp.zeros(packed.shape, jnp.float32)
    for at, first in enumerate(layout.segments(given)):
        k, v, valid = _segment(layout, key, value, packed, first)
        wide = k.astype(jnp.float32), v.astype(jnp.float32)
        segment = fit(layout, bases[:, at], *wide, valid, max_loss, max_variance)
        pruned, lost = _pruned(layout, segment, k, v)
        segments.append(segment)
        rows.append(pruned)
        loss = loss + axes.mean(lost.mean(axis=1).sum(axis=1))
        key, value, loss = lax.optimization_barrier((key, value, loss))  # float32 copies of one segment at a time
    slots = prompt + room
    stored = [
        _joined(parts, end)
        for parts, end in zip(zip(*rows, strict=True), (slots, slots, slots // layout.granule), strict=True)
    ]
    output, fits = None, 0
    if layout.dynamic:
        fits = min(-(-max_new_tokens // size), max(_FITS, -(-max_new_tokens // 256)))
        copy = jnp.zeros((*key.shape[:2], room + size, layout.dim), dtype)
        output = Output(
            key=copy,
            value=copy,
            begin=packed,
            starts=jnp.full((packed.shape[0], fits), jnp.iinfo(jnp.int32).max, jnp.int32),
            fitted=jnp.zeros_like(packed),
            open_loss=jnp.zeros_like(loss),
            total_loss=loss,
            prompt_loss=loss / jnp.maximum(packed, 1).astype(jnp.float32),
        )
    return Store(
        key=stored[0],
        value=stored[1],
        block=stored[2],
        segments=stack(segments, fits),
        packed=packed,
        prompt=packed,
        last=jnp.maximum(packed - 1, 0) // layout.segment,
        output=output,
    )


def _pruned(layout: Layout, segment: Segment, key: Array, value: Array) -> tuple[tuple[Packed, ...], Array]:
    """Run `prune` on some whole buffers of a segment at a time; return what is stored, and each token's loss [B, H, T]."""
    buffers = key.shape[2] // layout.buffer
    most = max(_SORTED // layout.buffer, 1)
    pieces = next(n for n in range(1, buffers + 1) if buffers % n == 0 and buffers // n <= most)
    count = key.shape[2] // pieces

    def some(at: Array | int) -> tuple[tuple[Packed, ...], Array]:
        k, v = (lax.dynamic_slice_in_dim(x, at * count, count, 2).astype(jnp.float32) for x in (key, value))
        *pruned, lost = prune(layout, segment, k, v, k)
        return tuple(_stored(x, key.dtype) for x in pruned), lost

    if pieces == 1:
        return some(0)
    parts = filled(some, pieces, (key, value))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, *x.shape[4:]), parts)


def write(layout: Layout, cache: LayerStorage, store: Store, key: Array, value: Array, position: Array) -> Store:
    """Pack tokens of the buffer, and the means of their blocks. They do not become visible yet.

    Args:
        layout: static sizes.
        key: [B, H, T, D], rotated by position.
        value: [B, H, T, D].
        position: int32 [B, T], consecutive; EMPTY for tokens not to pack.
    """
    if position.shape[1] == 1 and not layout.dynamic:
        return _write_one(layout, cache, store, position[:, 0])
    slots, means = store.key.values.shape[2], store.block.values.shape[2]
    active = position >= 0
    here = active[:, None, :, None]
    segment = pick(store.segments, _current(store))
    new_key, new_value = (jnp.where(here, x, 0).astype(jnp.float32) for x in (key, value))
    slot = jnp.where(active, position, slots)

    count = position.shape[1]
    ahead = position - store.packed[:, None]  # the token's slot in the buffer
    first = jnp.min(jnp.where(active, ahead, 2 * layout.buffer), axis=1)
    end = jnp.max(jnp.where(active, ahead + 1, 0), axis=1)
    touched = (count + layout.window - 2) // layout.window + 1  # the most windows for T consecutive tokens
    window = first[:, None] // layout.window + jnp.arange(touched, dtype=jnp.int32)[None]
    inside = window * layout.window < end[:, None]
    source = jnp.minimum(page_slots(window, layout.window), cache.num_slots - 1)
    held = jnp.take_along_axis(cache.valid, source[:, None], axis=2)[..., None]
    keys = jnp.where(held, jnp.take_along_axis(cache.key, source[:, None, :, None], axis=2), 0)
    packed_key, packed_value, mean, loss = prune(layout, segment, new_key, new_value, keys.astype(jnp.float32))
    per_window = layout.window // layout.granule
    block = page_slots(window, per_window) + store.packed[:, None] // layout.granule
    block = jnp.where(jnp.repeat(inside, per_window, axis=1), block, means)

    output = store.output
    if output is not None:
        size = output.key.shape[2]
        at = jnp.where(active, position - store.prompt[:, None], size)
        lost = axes.mean(jnp.where(active, loss.mean(axis=1), 0).sum(axis=1))
        output = dataclasses.replace(
            output,
            key=_put_exact(output.key, key, at),
            value=_put_exact(output.value, value, at),
            open_loss=output.open_loss + lost,
            total_loss=output.total_loss + lost,
        )
    return dataclasses.replace(
        store,
        key=_put_packed(store.key, packed_key, slot),
        value=_put_packed(store.value, packed_value, slot),
        block=_put_packed(store.block, mean, block),
        output=output,
    )


def _write_one(layout: Layout, cache: LayerStorage, store: Store, position: Array) -> Store:
    """Write one token per row under the static strategy, as `write`, with one kernel if there is one."""
    packed = [store.key, store.value, store.block]
    written = pack_token(
        cache.key,
        cache.value,
        cache.position,
        position,
        store.packed,
        store.last,
        store.segments.basis_key,
        store.segments.basis_value,
        tuple(x for pair in packed for x in (pair.values, pair.bitmap)),
        granule=layout.granule,
    )
    key, value, block = (Packed(values=written[i], bitmap=written[i + 1]) for i in (0, 2, 4))
    return dataclasses.replace(store, key=key, value=value, block=block)


def flush(layout: Layout, cache: LayerStorage, store: Store, tokens: int) -> tuple[LayerCache, Store, Array]:
    """Make the packed tokens of a full buffer visible and remove them from the buffer; other rows stay.

    Args:
        layout: static sizes.
        tokens: the most tokens that a row has just got; a single token cannot make the buffer more than full.

    Returns:
        The buffer, the store, and whether each row's buffer was full, bool [B].
    """
    size = layout.buffer
    full = cache.cursor >= size
    gone = jnp.where(full, size, 0).astype(jnp.int32)
    when = full[:, None, None]
    key, value, position = cache.key, cache.value, jnp.full_like(cache.position, EMPTY)
    if tokens > 1:  # the tokens that are left move to the front
        key, value = (jnp.where(when[..., None], jnp.roll(x, -size, axis=2), x) for x in (key, value))
        position = position.at[:, :, :size].set(cache.position[:, :, size:])
    cache = PlainCache(key=key, value=value, position=jnp.where(when, position, cache.position), cursor=cache.cursor - gone)
    return cache, dataclasses.replace(store, packed=store.packed + gone), full


def outlived(layout: Layout, store: Store, lifetime: Array) -> Array:
    """Mark rows whose open output segment is full, or has lost as much as ``lifetime`` tokens of the prompt: bool [B]."""
    output = not_none("output", store.output)
    long = store.packed - output.begin >= layout.segment
    spare = output.fitted < output.starts.shape[1]
    return spare & (long | (output.open_loss > lifetime * output.prompt_loss))


def refit(layout: Layout, store: Store, when: Array, max_loss: float | Array, max_variance: float | Array) -> Store:
    """End the open output segment in rows ``when`` bool [B]: fit a pruning on its exact copy, and pack it again."""
    output, slots, means = not_none("output", store.output), store.key.values.shape[2], store.block.values.shape[2]
    size, fits = output.key.shape[2], output.starts.shape[1]
    slot = store.prompt[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    valid = (slot >= output.begin[:, None]) & (slot < store.packed[:, None])
    exact = to_device(output.key), to_device(output.value)
    key, value = (jnp.where(valid[:, None, :, None], x, 0).astype(jnp.float32) for x in exact)
    segment = fit(layout, basis(moments(key, value)), key, value, valid, max_loss, max_variance)
    packed_key, packed_value, mean, _ = prune(layout, segment, key, value, key)
    write_slot = jnp.where(valid & when[:, None], slot, slots)
    first = write_slot[:, :: layout.granule]
    block = jnp.where(first < slots, first // layout.granule, means)
    added = when.astype(jnp.int32)
    index = store.prompt_segments + output.fitted
    opened = when[:, None] & (jnp.arange(fits)[None] == output.fitted[:, None])
    return dataclasses.replace(
        store,
        key=_put_packed(store.key, packed_key, write_slot),
        value=_put_packed(store.value, packed_value, write_slot),
        block=_put_packed(store.block, mean, block),
        segments=put(store.segments, jnp.where(when, index, store.num_segments), segment),
        output=dataclasses.replace(
            output,
            begin=jnp.where(when, store.packed, output.begin),
            starts=jnp.where(opened, output.begin[:, None], output.starts),
            fitted=output.fitted + added,
            open_loss=jnp.where(when, 0, output.open_loss),
        ),
    )


def owner(layout: Layout, store: Store, slot: Array) -> Array:
    """Find the segment whose pruning each slot int32 [B, H, K] has: int32 [B, H, K]. Tokens behind a segment share it."""
    segment = jnp.minimum(slot // layout.segment, store.last[:, None, None])
    if store.output is None:
        return segment
    # The fitted output segments that begin at or before the slot.
    fitted = jnp.sum(store.output.starts[:, None, None] <= slot[..., None], axis=-1, dtype=jnp.int32)
    return jnp.where(fitted > 0, store.prompt_segments + fitted - 1, segment)


def _current(store: Store) -> Array:
    """Return the newest fitted segment, int32 [B]."""
    if store.output is None:
        return store.last
    return jnp.where(store.output.fitted > 0, store.prompt_segments + store.output.fitted - 1, store.last)


def _ceil(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _by_row(run: Callable[..., Any], *arrays: Array) -> Any:
    """Run ``run`` on one row at a time, and join the results."""
    if arrays[0].shape[0] == 1:
        return run(*arrays)
    out = lax.map(lambda row: run(*(x[None] for x in row)), arrays)
    return jax.tree.map(lambda x: x[:, 0], out)


def _stored(packed: Packed, dtype: DTypeLike) -> Packed:
    """Convert ``packed`` to the store's form: values in ``dtype``, bitmaps in words."""
    return Packed(values=packed.values.astype(dtype), bitmap=words_of(packed.bitmap))


def _joined(parts: Sequence[Packed], slots: int) -> Packed:
    """Join the parts, with free slots behind them up to ``slots``."""

    def join(*arrays: Array) -> Array:
        x = jnp.concatenate(arrays, axis=2)
        return jnp.pad(x, ((0, 0), (0, 0), (0, slots - x.shape[2]), (0, 0)))

    return jax.tree.map(join, *parts)


def _put(store: Array, new: Array, slot: Array) -> Array:
    """Write new [B, H, T, ...] at ``slot`` int32 [B, T]. A token whose slot is past the end is dropped."""
    row = jnp.arange(slot.shape[0])[:, None]
    return store.at[row, :, slot].set(new.swapaxes(1, 2).astype(store.dtype), mode="drop")


def _put_exact(store: Array, new: Array, slot: Array) -> Array:
    """Write as `_put` into a store that may be in host memory. The slots of a row inside the store are consecutive."""
    if not on_host(store):
        return _put(store, new, slot)
    inside = slot < store.shape[2]
    # They can begin at any token, but `put_rows` wants them at the front.
    first = jnp.argmax(inside, axis=1)[:, None]
    order = jnp.minimum(first + jnp.arange(slot.shape[1])[None], slot.shape[1] - 1)
    new = jnp.take_along_axis(new, order[:, None, :, None], axis=2).astype(store.dtype)
    start = jnp.take_along_axis(slot, first, axis=1)[:, 0]
    return put_rows(store, new, start, jnp.sum(inside, axis=1, dtype=jnp.int32))


def _put_packed(store: Packed, new: Packed, slot: Array) -> Packed:
    return jax.tree.map(lambda old, x: _put(old, x, slot), store, _stored(new, store.values.dtype))
