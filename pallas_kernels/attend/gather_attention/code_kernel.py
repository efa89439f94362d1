"""The kernel of `pallas_triton` for bfloat16 queries and a cache in 8 or 4 bits: the same work, divided in the same way.

A list is short, so a program has one block or a few, and waits for memory more than it computes. So all that it reads is
asked for at once: scales, of 16 bits, are read as words of 32 bits, the least that Triton's pipeline copies ahead. Codes of
keys become bfloat16 as codes of values do (`pallas_kernels._triton.code_products`). The kernel for all slots saves that by
two digits of a query, which need the largest number of the query before anything is multiplied.

If codes are mixed, the kernel mixes the query and its part of the output itself: XLA would take two launches for each.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton import code_products as codes
from pallas_kernels._triton import online_softmax
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.attend.gather_attention import entries
from pallas_kernels.formats.mixing import signs
from pallas_kernels.formats.quantised import Quantised
from pallas_kernels.numerics import LOG2_E, finite_or_zero


def takes(query: jax.Array, key: Any, value: Any, place: Any, rows: Any) -> bool:
    """Tell whether this kernel runs for operands that the check of "pallas_triton" accepts."""
    return (
        isinstance(key, Quantised)
        and isinstance(value, Quantised)
        and not key.grouped
        and (value.packed or not value.grouped)
        and query.dtype == jnp.bfloat16
        and place is None
        and rows is None
        and all(x.shape[3] >= codes.LEAST_WIDTH * (2 if x.packed else 1) for x in (key, value))
        and key.scale.size % 2 == 0
        and key.scale.size < 1 << 31  # a scale is found by one index over all rows and heads
    )


def operands(query: jax.Array, key: Quantised, value: Quantised) -> dict[str, jax.Array]:
    """Prepare the operands that `kernel` takes for a query, keys and values: their bytes, seen in other units."""
    found = {"query": codes.words(query)}
    for name, x in (("key", key), ("value", value)):
        found |= {name: codes.pairs(x.codes), f"{name}_scale": codes.words(x.scale if x.grouped else x.scale.reshape(-1))}
        if x.mixed:  # a constant, which takes fewer instructions to load than to compute
            found[f"{name}_signs"] = signs(codes.channels(x.kind, x.shape[3])[0].shape[0]).astype(jnp.bfloat16)
    return found


def _mixed(pieces: Sequence[jax.Array], matrix: jax.Array) -> list[jax.Array]:
    """Rotate rows [R, P], of which 2 or 4 ``pieces`` have all channels, as `pallas_kernels.formats.mixing.mix`: float32.

    ``matrix`` has the signs of P channels. Pieces whose channels differ in one bit are added and subtracted, whichever it is.
    """
    mixed = [plt.dot(x.astype(jnp.bfloat16), matrix) for x in pieces]
    apart = 1
    while apart < len(mixed):
        pairs = [(mixed[i & ~apart], mixed[i | apart], i & apart) for i in range(len(mixed))]
        mixed = [low - high if minus else low + high for low, high, minus in pairs]
        apart *= 2
    return [x * (1 / math.sqrt(matrix.shape[0] * len(mixed))) for x in mixed]


def _queries(ref: Any, at: tuple, head: jax.Array, kind: str, matrix: Any) -> list[jax.Array]:
    """Load the queries of ``head`` int32 [R], channels as in `codes.channels`; rows are filled up to 16 with zeros.

    With a ``matrix`` they are mixed.
    """
    size, rows = ref.shape[-1] // (2 if kind == "int4" else 1), head.shape[0]
    row = jnp.arange(max(2 * codes.ROWS, rows), dtype=jnp.int32)
    of = codes.folded(head, row.shape[0] // rows)
    pieces = [codes.both_of(ref[*at, of, pl.ds(first, size)]) for first in range(0, ref.shape[-1], size)]
    held = (row < rows)[:, None]
    found = [jnp.where(held, x, 0) for which in (0, 1) for x in (piece[which] for piece in pieces)]
    return [x.astype(jnp.bfloat16) for x in (found if matrix is None else _mixed(found, matrix))]


def kernel(*refs, names, structure, scale, block, splits, page_size, kinds, interpret):
    """Do what `pallas_triton`'s kernel does, on `operands`, whose codes have these ``kinds``."""
    refs, (out_ref, lse_ref, *logits_ref) = refs[: structure.num_leaves], refs[structure.num_leaves :]
    ref = dict(zip(names, jax.tree.unflatten(structure, refs), strict=True))
    b, h, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    heads, group = ref["query"].shape[1:3]
    dim, slots = out_ref.shape[3], ref["key"].shape[2]
    key_kind, value_kind = kinds
    rows = max(codes.ROWS, pl.next_power_of_2(group))
    fold = 2 if rows == codes.ROWS else 1
    head = jnp.minimum(jnp.arange(rows, dtype=jnp.int32), group - 1)  # the last head is repeated
    pieces = codes.channels(value_kind, dim)
    key_signs, value_signs = (ref[name][:, :] if name in ref else None for name in ("key_signs", "value_signs"))
    queries = _queries(ref["query"], (b, h), head, key_kind, key_signs)

    def scales(name, row, asked):
        if len(ref[name].shape) > 1:  # each slot has a scale for each group
            return codes.scales_of([plt.load(ref[name].at[b, h, row, i], mask=asked, other=0) for i in (0, 1)])
        at = (b * heads + h) * slots + row
        even, odd = codes.both_of(plt.load(ref[name].at[at >> 1], mask=asked, other=0))
        return [jnp.where((at & 1) == 0, even, odd)]

    def read(name, row, asked):
        channel = jnp.arange(ref[name].shape[3], dtype=jnp.int32)
        return entries.load_rows(ref[name], (b, h), row, asked, channel)

    def add(step, sums):
        # All of the block is loaded together, before anything waits for it.
        entry = (step * splits + split) * block + jnp.arange(block, dtype=jnp.int32)
        row, item, asked, listed = entries.listed_rows(ref, b, h, entry, page_size)
        keys, values = read("key", row, asked), read("value", row, asked)
        (key_scale,), value_scales = scales("key_scale", row, asked), scales("value_scale", row, asked)
        keys = codes.values(keys, key_kind, interpret)
        product = functools.reduce(jnp.add, (plt.dot(q, k, trans_b=True) for q, k in zip(queries, keys, strict=True)))
        product = product if fold == 1 else jnp.sum(product.reshape(2, rows, block), axis=0)
        logits = product * (key_scale * (scale / codes.UNIT[key_kind]))[None, :]
        if "bias" in ref:
            logits = logits + entries.bias_of(ref["bias"], b, h, head, item)
        # This removes the NaN of a hidden scale. A hidden value has finite codes, and its scale becomes 0.
        logits = jnp.where(listed[None, :], logits, -jnp.inf)
        online_softmax.store_logits(logits_ref, (b, h), head, entry, logits, entry < ref["slots"].shape[2])
        total, maximum, outs = sums
        risen = jnp.maximum(maximum, jnp.max(logits, axis=1))
        shift = finite_or_zero(risen)
        decay = codes.exp2((maximum - shift) * LOG2_E, interpret)
        weight = codes.exp2((logits - shift[:, None]) * LOG2_E, interpret)
        shares = [(weight * jnp.where(listed, x, 0)[None, :]).astype(jnp.bfloat16) for x in value_scales]
        shares, kept = [codes.folded(x, fold) for x in shares], codes.folded(decay, fold)[:, None]
        values = codes.values(values, value_kind, interpret)
        shares = shares * (len(values) // len(shares))  # one scale is that of all channels
        outs = tuple(out * kept + plt.dot(share, x) for out, share, x in zip(outs, shares, values, strict=True))
        return total * decay[:, None] + weight, risen, outs

    total = jnp.zeros((rows, block), jnp.float32)  # a sum for each place in a block
    outs = tuple(jnp.zeros((fold * rows, piece.shape[0]), jnp.float32) for piece in pieces)
    steps = entries.steps(ref, b, h, split, block, splits, page_size, every=bool(logits_ref))
    total, maximum, outs = lax.fori_loop(0, steps, add, (total, jnp.full((rows,), -jnp.inf, jnp.float32), outs))
    total = jnp.sum(total, axis=1)
    divisor = codes.folded(jnp.where(total > 0, total, 1) * codes.UNIT[value_kind], fold)[:, None]
    outs = [out / divisor for out in outs]
    # Each part of the output is mixed, so that no launch before or after this kernel is needed for it.
    outs = outs if value_signs is None else _mixed(outs, value_signs)
    # A folded output has each row twice. They are equal; on a GPU they and rows of a repeated head are not written.
    row = jnp.arange(fold * rows, dtype=jnp.int32)
    for out, piece in zip(outs, pieces, strict=True):
        at, channel = (jnp.broadcast_to(x, out.shape) for x in (codes.folded(head, fold)[:, None], piece[None, :]))
        held = jnp.broadcast_to(((row < group) | interpret)[:, None], out.shape)
        plt.store(out_ref.at[b * heads + h, split, at, channel], out.astype(out_ref.dtype), mask=held)
    lse_ref[b * heads + h, split, head] = finite_or_zero(maximum) + jnp.log(total)
