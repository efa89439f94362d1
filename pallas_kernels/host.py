"""Arrays in pinned host memory, from inside ``jit``: find out where an array is, move it, read and write its rows there.

An array's memory is part of its type (``jax.typeof(x).memory_space``), and operations do not mix memories. A Pallas kernel
takes an array of host memory like any other and reads its rows over the bus without a copy. The functions of this file serve
everything else.

A cache whose rows are in host memory is offloaded (`Rows`). It keeps copies of some rows on the device: the rows of its first
``sinks`` slots, and behind them a ring of the newest rows (`copy_row`, `has_copy`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.experimental.compute_on import compute_on

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
_TILE = 16  # slots of a tile of 16-bit numbers on a TPU; one of 8-bit numbers has 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of an offloaded cache, as operations take them.

    The arrays ``key`` and ``value`` that an operation takes as well are then the copies on the device, [B, H, R, D]. Slot s
    has the row ``copy_row(s, sinks, R)`` there, if it has a copy. An array that holds all S slots has R = S rows in order.

    If keys and values are codes (`pallas_kernels.formats.quantised`), the copies and the rows of ``host`` have codes. The
    scales of all slots, [B, H, S] or [B, H, S, 4], are on the device, beside the codes of the copies. So a row has at most
    2 * D bytes and no scale to look up.

    Attributes:
        host: the rows of all slots, in pinned host memory: [B, H, S, 2 * D] with key and value side by side, so that a page
            of memory is looked up once for both; or [B, H, S, D], the values alone (then ``key`` has all slots) or keys that
            are the values too. Plain or codes.
        newest: int32 [B], the slot behind the newest token of each row.
        sinks: the number of first slots, which always have copies; below R.
    """

    host: Array
    newest: Array
    sinks: int = dataclasses.field(metadata={"static": True})


def sinks_of(rows: Rows | None) -> int | None:
    """Return ``rows.sinks``, or None for a cache with all its rows on the device; kernels are compiled for this number."""
    return None if rows is None else rows.sinks


def on_host(x: Array | jax.ShapeDtypeStruct) -> bool:
    """Tell whether an array, or a tracer of one, is in host memory."""
    return jax.typeof(x).memory_space == _HOST


def to_host(x: Array) -> Array:
    """Move the array to pinned host memory, which a CPU has too."""
    return x if on_host(x) else jax.device_put(x, _HOST)


def to_device(x: Array) -> Array:
    """Move the array to device memory; from host memory it crosses the bus as a whole."""
    return jax.device_put(x, _DEVICE) if on_host(x) else x


@custom_vmap
def _not_mapped(*arrays: Array | int) -> tuple[Array | int, ...]:
    """Return the arrays unchanged, or raise a ``ValueError`` if ``jax.vmap`` maps one of them.

    JAX would turn slices of host memory at mapped indices into gathers, which it refuses with an error about gathers. What
    is mapped is known only when ``vmap`` reaches the slice, inside of jitted programs too.
    """
    return arrays


@_not_mapped.def_vmap
def _refuse(size: int, batched: Any, *arrays: Array) -> Any:
    raise ValueError(
        f"caches in host memory do not run under jax.vmap, got a mapped axis of {size}; put what is mapped into the rows of "
        "a batch, or make the method with offload=False"
    )


def take_rows(x: Array, slots: Array) -> Array:
    """Take rows ``slots`` int32 [B, H or 1, K] of x [B, H, S, D] in either memory: [B, H, K, D] on the device.

    Slots are clipped. On the device, the heads may share ``x`` too: [B, 1, S, D]. From host memory only these rows cross the
    bus. But the host's processor gathers them, so a kernel is much faster.
    """
    if not on_host(x):
        return _rows(x, slots)
    shape = (*x.shape[:2], slots.shape[2])
    slots = jnp.clip(jnp.broadcast_to(slots, shape), 0, x.shape[2] - 1)
    return compute_on(_rows, compute_type="device_host", out_memory_spaces=_DEVICE)(x, to_host(slots))


def _rows(x: Array, slots: Array) -> Array:
    def row(x: Array, slots: Array) -> Array:
        return x.at[slots].get(mode="clip", wrap_negative_indices=False)

    heads = max(x.shape[1], slots.shape[1])
    each = tuple(0 if given.shape[1] == heads else None for given in (x, slots))  # None: the same for all heads
    given = (y if axis == 0 else y[:, 0] for y, axis in zip((x, slots), each, strict=True))
    return jax.vmap(jax.vmap(row, each))(*given)


def put_chunk(x: Array, new: Array, start: Array | int) -> Array:
    """Write ``new`` [B, H, T, D] into a host array [B, H, S, D] from slot ``start`` on; in place if the array is donated."""
    x, new, start = _not_mapped(x, new, start)
    return lax.dynamic_update_slice(x, to_host(new), (0, 0, start, 0), allow_negative_indices=False)


def take_window(x: Array, start: Array, size: int) -> Array:
    """Take ``size`` slots from ``start[b]`` on of row b of x [B, H, S, D] in either memory: [B, H, size, D] on the device.

    ``start`` int32 [B] is at least 0, ``size`` at most S. The result is arbitrary behind slot S - 1.
    """
    x, start = _not_mapped(x, start)
    windows = []
    for row in range(x.shape[0]):
        # A slice must lie within the array: it starts early, and its rows are moved to where they belong. They are moved by a
        # slice again: before a gather, XLA would bring all of x on a TPU into another order.
        first = jnp.minimum(start[row], x.shape[2] - size)
        shape = (1, x.shape[1], size, x.shape[3])
        window = to_device(lax.dynamic_slice(x, (row, 0, first, 0), shape, allow_negative_indices=False))
        early = jnp.minimum(start[row] - first, size)
        windows.append(lax.dynamic_slice_in_dim(jnp.concatenate([window, window], axis=2), early, size, 2))
    return jnp.concatenate(windows, axis=0)


def take_between(x: Array, slots: Array) -> Array:
    """Take the consecutive ``slots`` int32 [B, K] of x [B, H, S, D] on the device: [B, H, K, D].

    Slots behind S - 1 get any rows. A batch of one row is read by a slice: for a gather, XLA on a TPU would first bring all
    of x into another order.
    """
    if x.shape[0] == 1 and slots.shape[1] <= x.shape[2]:
        return take_window(x, slots[:, 0], slots.shape[1])
    return take_rows(x, slots[:, None])


def put_rows(x: Array, new: Array, start: Array, count: Array) -> Array:
    """Write the first ``count[b]`` rows of ``new`` to row b of a host array, from slot ``start[b]`` on.

    Rows that do not fit are dropped. A window of slots is read, changed and written back as a whole: host memory is only
    written in slices, and slices of one slot do not compile for a TPU.

    Args:
        x: [B, H, S, D] in host memory; written in place if it is donated.
        new: [B, H, T, D] on the device.
        start: int32 [B], at least 0.
        count: int32 [B].

    Returns:
        [B, H, S, D] in host memory.
    """
    x, new, start, count = _not_mapped(x, new, start, count)
    tokens, tile = new.shape[2], max(2 * _TILE // x.dtype.itemsize, _TILE)
    # The window consists of whole tiles, enough for T tokens that begin anywhere within a tile.
    size = min(-(-(tokens + tile - 1) // tile) * tile, x.shape[2])
    first = jnp.minimum(start // tile * tile, x.shape[2] - size)
    # The row of `new` that each slot of the window gets; the other slots keep their rows.
    source = jnp.arange(size, dtype=jnp.int32)[None] - (start - first)[:, None]
    written = (source >= 0) & (source < jnp.minimum(count, tokens)[:, None])
    moved = jnp.take_along_axis(new, jnp.clip(source, 0, tokens - 1)[:, None, :, None], axis=2)
    window = jnp.where(written[:, None, :, None], moved, take_window(x, first, size))
    for row in range(x.shape[0]):
        at = (row, 0, first[row], 0)
        x = lax.dynamic_update_slice(x, to_host(window[row : row + 1]), at, allow_negative_indices=False)
    return x


def copy_row(slot: Array, sinks: int, rows: int) -> Array:
    """Return the row of the copy of ``slot`` int32 (0 or more) among R = ``rows`` rows, int32; R is more than ``sinks``.

    The first ``sinks`` slots have the first rows. All later slots share the other rows as a ring, in which a new slot
    replaces the slot R - sinks before it. A slot whose copy was replaced still gets its row number: ask `has_copy`.
    """
    return jnp.where(slot < sinks, slot, sinks + lax.rem(jnp.maximum(slot - sinks, 0), rows - sinks))


def copied_slots(newest: Array, sinks: int, rows: int) -> Array:
    """List the slot that each of R = ``rows`` rows is a copy of, int32 [B, R]; ``newest`` int32 [B] is as in `Rows`.

    A row of the ring that has no copy yet gets its own number.
    """
    row = jnp.arange(rows, dtype=jnp.int32)[None]
    laps = jnp.maximum(newest[:, None] - 1 - row, 0) // max(rows - sinks, 1)
    return jnp.where(row < sinks, row, row + laps * (rows - sinks))


def has_copy(slot: Array, newest: Array, sinks: int, rows: int) -> Array:
    """Tell whether ``slot`` int32 has a copy, bool of its shape; ``newest`` int32 is the slot behind the newest token."""
    return (slot < sinks) | (slot >= newest - (rows - sinks))
