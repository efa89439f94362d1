"""Decode attention over index lists through Mosaic GPU (`_mosaic_gpu.decode`): an entry of a block is a slot of the list."""

import functools
import operator

import jax.numpy as jnp

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu import warps as w
from pallas_kernels._mosaic_gpu.decode import attend, check_machine, many_lists
from pallas_kernels._mosaic_gpu.pallas import plgpu
from pallas_kernels._mosaic_gpu.sizes import Lists
from pallas_kernels.formats.quantised import Quantised

MOST_SEEN = 1024  # loads of a warp, in which it finds the last entry before its loop


def gather_attention(
    query, key, value, slots, mask, *, scale, page_size=1, position=None, bias=None, place=None, inv_freq=None, partials=None,
    rows=None, programs=None, **_,
):  # fmt: skip
    """Attend to the listed slots only; see `check` for what it does not take."""
    hosted = () if rows is None else (rows.newest,)
    last, items, shared = (rows.host if hosted else key).shape[2], slots.shape[2], slots.shape[1] == 1
    heads = query.shape[1]

    def entries(refs, b, h):
        return items * page_size, ((b if shared else b * heads + h) * items, *(refs[-1][b] for _ in hosted))

    def divided(entry):
        return t.signed(t.number(t.value(entry), signed=False) // page_size)

    def load(refs, scalars, entry):
        item = scalars[0] + t.least(divided(entry), items - 1)
        kinds = ((4, "b32"), (1, "u8"), (4, "b32"))[:loads]  # of slots, mask, and bias or place
        return [t.load_int(t.at(t.address(ref), item, size), kind) for ref, (size, kind) in zip(refs, kinds, strict=False)]

    def row(scalars, entry, loaded):
        slot, listed, *_ = loaded
        slot = (slot < 0).select(t.number(0), t.least(slot, (last - 1) // page_size)) * page_size
        slot = slot + (entry - divided(entry) * page_size)
        return ((entry < items * page_size) & (listed > 0) & (slot < last)).select(slot, t.number(-1))

    def copy(scalars, slot):
        ring, later = value.shape[2] - rows.sinks, t.number(t.value(slot - rows.sinks), signed=False)
        at = (slot < rows.sinks).select(slot, t.signed(later % ring) + rows.sinks)
        return ((slot < rows.sinks) | (slot >= scalars[1] - ring)).select(at, t.number(-1))

    pack = next(x for x in (16, 8, 4, 1) if items % x == 0)  # entries of the mask that a lane loads together
    number = items // pack

    def live(refs, b, h):
        """Find the last entry that is not masked, rounded up to whole packs."""

        @plgpu.inline_mgpu(
            arg_types=(t.ref(), t.splat()), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=t.splat())
        )
        def find(ctx, mask, line):
            base, lane, last = t.at(t.address(mask), t.number(t.value(line)), items), t.signed(w.lane()), t.number(0)
            places = [t.least(lane + i, number - 1) for i in range(0, number, w.LANES)]
            found = [t.at(base, x, pack) for x in places]
            found = [[t.load_int(x, "u8")] if pack == 1 else t.load_words(x, 0, pack // 4) for x in found]
            for place, words in zip(places, found, strict=True):
                last = (functools.reduce(operator.or_, words) != 0).select(place + 1, last)
            return w.redux(last, "max") * (pack * page_size)

        return find(refs[1], b if shared else b * heads + h)

    operands = slots, mask, *(x for x in (bias, place) if x is not None)
    loads = len(operands)
    seen = live if 1 < number <= MOST_SEEN else None
    away = {"host": rows.host, "copy": copy} if hosted else {}
    lists = Lists((*operands, *hosted), entries, row, load, loads, bias is not None, place is not None, live=seen, **away)
    where = {"entries": items * page_size, "scale": scale, "position": position, "beside": partials, "programs": programs}
    return attend(query, key, value, lists, **where, inv_freq=inv_freq)


def check(query, key, value, slots, mask, *, bias=None, place=None, rows=None, logits=False, **_):
    """Raise ``NotImplementedError`` for dtypes and widths, codes of 4 bits, empty lists, and options of `pallas_triton`."""
    check_machine(query, key, value, rows)
    if not slots.shape[2]:
        raise NotImplementedError("got an empty list, expected at least one entry")
    if logits or (bias is not None and bias.ndim > 3):
        raise NotImplementedError("got logits or a bias for each query head, expected none of them")
    if place is not None and (bias is not None or isinstance(key, Quantised)):
        raise NotImplementedError("got place with a bias or codes, expected neither")
    if bias is not None and bias.shape != slots.shape:
        raise NotImplementedError(f"got a bias {bias.shape}, expected {slots.shape}")


def first(query, *_, rows=None, **__):
    """Tell whether this is faster than Triton's kernel and its merge; of rows in host memory it is slower."""
    return rows is None and many_lists(query)
