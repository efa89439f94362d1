"""Decode attention over index lists through Mosaic GPU (`_mosaic_gpu.decode`): an entry of a block is a slot of the list."""

import jax.numpy as jnp

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.decode import attend, check_machine
from pallas_kernels._mosaic_gpu.sizes import Lists
from pallas_kernels.query.tokenselect.rotated_rows import pallas_mosaic_gpu as rotated_kernel


def gather_attention(
    query, key, value, slots, mask, *, scale, page_size=1, position=None, bias=None, place=None, inv_freq=None, partials=None,
    programs=None, **_,
):  # fmt: skip
    """Attend to the listed slots only; see `check` for what it does not take."""
    if place is not None:  # the listed rows are copied first, keys rotated
        key, value = rotated_kernel.rotated_rows(key, value, slots[:, 0], inv_freq, place[:, 0])
        slots = jnp.broadcast_to(jnp.arange(slots.shape[2], dtype=jnp.int32), slots.shape)
    last, items, shared = key.shape[2], slots.shape[2], slots.shape[1] == 1
    heads = query.shape[1]

    def entries(refs, b, h):
        return items * page_size, ((b if shared else b * heads + h) * items,)

    def divided(entry):
        return t.signed(t.number(t.value(entry), signed=False) // page_size)

    def load(refs, scalars, entry):
        item = scalars[0] + t.least(divided(entry), items - 1)
        kinds = (4, "b32"), (1, "u8"), (4, "b32")  # of slots, mask and bias
        return [t.load_int(t.at(t.address(ref), item, size), kind) for ref, (size, kind) in zip(refs, kinds, strict=False)]

    def row(scalars, entry, loaded):
        slot, listed, *_ = loaded
        slot = (slot < 0).select(t.number(0), t.least(slot, (last - 1) // page_size)) * page_size
        slot = slot + (entry - divided(entry) * page_size)
        return ((entry < items * page_size) & (listed > 0) & (slot < last)).select(slot, t.number(-1))

    operands = (slots, mask) if bias is None else (slots, mask, bias)
    lists = Lists(operands, entries, row, load, len(operands), bias is not None)
    where = {"entries": items * page_size, "scale": scale, "position": position, "beside": partials, "programs": programs}
    return attend(query, key, value, lists, **where)


def check(
    query, key, value, slots, mask, *, position=None, bias=None, place=None, inv_freq=None, rows=None, logits=False, **_
):
    """Raise ``NotImplementedError`` for dtypes and widths, codes of 4 bits, empty lists, and options of `pallas_triton`."""
    check_machine(query, key, value)
    if place is not None:
        rotated_kernel.check(key, value, slots[:, 0], inv_freq)
    if not slots.shape[2]:
        raise NotImplementedError("got an empty list, expected at least one entry")
    if logits or rows is not None or (bias is not None and bias.ndim > 3):
        raise NotImplementedError("got host rows, logits or a bias for each query head, expected none of them")
    if place is not None and (slots.shape[1] > 1 or position is not None):
        raise NotImplementedError("got place with a list for each head, or with position, expected one list and no position")
    if bias is not None and bias.shape != slots.shape:
        raise NotImplementedError(f"got a bias {bias.shape}, expected {slots.shape}")
