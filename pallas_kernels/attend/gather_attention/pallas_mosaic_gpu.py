"""Decode attention over index lists through Mosaic GPU (`_mosaic_gpu.decode`): an entry of a block is a slot of the list."""

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.decode import attend, check_machine
from pallas_kernels._mosaic_gpu.sizes import Lists
from pallas_kernels.formats.quantised import Quantised


def gather_attention(
    query, key, value, slots, mask, *, scale, page_size=1, position=None, bias=None, place=None, inv_freq=None, partials=None,
    programs=None, **_,
):  # fmt: skip
    """Attend to the listed slots only; see `check` for what it does not take."""
    last, items, shared = key.shape[2], slots.shape[2], slots.shape[1] == 1
    heads = query.shape[1]

    def entries(refs, b, h):
        return items * page_size, ((b if shared else b * heads + h) * items,)

    def divided(entry):
        return t.signed(t.number(t.value(entry), signed=False) // page_size)

    def load(refs, scalars, entry):
        item = scalars[0] + t.least(divided(entry), items - 1)
        kinds = (4, "b32"), (1, "u8"), (4, "b32")  # of slots, mask, and bias or place
        return [t.load_int(t.at(t.address(ref), item, size), kind) for ref, (size, kind) in zip(refs, kinds, strict=False)]

    def row(scalars, entry, loaded):
        slot, listed, *_ = loaded
        slot = (slot < 0).select(t.number(0), t.least(slot, (last - 1) // page_size)) * page_size
        slot = slot + (entry - divided(entry) * page_size)
        return ((entry < items * page_size) & (listed > 0) & (slot < last)).select(slot, t.number(-1))

    operands = slots, mask, *(x for x in (bias, place) if x is not None)
    lists = Lists(operands, entries, row, load, len(operands), bias is not None, place is not None)
    where = {"entries": items * page_size, "scale": scale, "position": position, "beside": partials, "programs": programs}
    return attend(query, key, value, lists, **where, inv_freq=inv_freq)


def check(query, key, value, slots, mask, *, bias=None, place=None, rows=None, logits=False, **_):
    """Raise ``NotImplementedError`` for dtypes and widths, codes of 4 bits, empty lists, and options of `pallas_triton`."""
    check_machine(query, key, value)
    if not slots.shape[2]:
        raise NotImplementedError("got an empty list, expected at least one entry")
    if logits or rows is not None or (bias is not None and bias.ndim > 3):
        raise NotImplementedError("got host rows, logits or a bias for each query head, expected none of them")
    if place is not None and (bias is not None or isinstance(key, Quantised)):
        raise NotImplementedError("got place with a bias or codes, expected neither")
    if bias is not None and bias.shape != slots.shape:
        raise NotImplementedError(f"got a bias {bias.shape}, expected {slots.shape}")
