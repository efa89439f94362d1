"""A search's first step for keys that one program holds: counted in bins of shared memory, all pivots at once.

Pallas' Triton back end has no shared memory to index; inline assembly has (see `pallas_kernels.collision.lookup`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.kth_select.search import INFINITE


def narrowed(key: jax.Array, low: Any, high: Any, held: Any, wanted: Any, threads: int, interpret: bool) -> tuple:
    """The bin that holds the wanted key, of as many bins as there are keys: `search.find` begins there.

    Args:
        key: int32 [N], a power of two and at least ``threads``; keys below ``low`` are not counted.
        low, high, held: of the keys, see `search.bounds_of`; at least ``wanted`` are held.
        wanted: int32, at least 1.
        threads: of the program.
        interpret: without assembly.

    Returns:
        int32 scalars: the bin's least key and more than its greatest, how many keys reach it, and how many exceed it. Where
        enough keys are infinite, only the last means anything: how many those are.
    """
    bins = key.shape[0]
    # Bits of the greatest difference, which need not fit in int32: those of half of it, rounded, and one more.
    half = lax.shift_right_logical(high - 1 - low, jnp.int32(1)).astype(jnp.float32)
    bits = (lax.bitcast_convert_type(half, jnp.int32) >> 23) - 127 + 2
    shift = jnp.maximum(bits - (bins.bit_length() - 1), 0)
    at = lax.shift_right_logical(key - low, jnp.broadcast_to(shift, key.shape))
    counts = histogram(jnp.where((key >= low) & (key < INFINITE), at, -1), threads, interpret)
    reach = held - lax.cumsum(counts, axis=0) + counts
    enough = reach >= wanted
    chosen = jnp.sum(enough.astype(jnp.int32), dtype=jnp.int32) - 1
    # Fewest that are enough; among bins that as many reach, the one that is not empty. Two numbers in one word.
    both = jnp.min(jnp.where(enough, (reach << 16) + reach - counts, 2**31 - 1))
    start = low + (chosen << shift)
    # The end of a bin that holds greatest keys may not fit in int32, and what is left above its start may not either.
    last = lax.shift_right_logical(high - start, jnp.int32(1)) < (1 << shift) >> 1
    return start, jnp.where(last, high, start + (1 << shift)), both >> 16, both & 0xFFFF


def histogram(index: jax.Array, threads: int, interpret: bool) -> jax.Array:
    """How often each number from 0 to N - 1 is in ``index`` int32 [N]; negative ones are not counted."""
    size = index.shape[0]
    if interpret:
        return jnp.zeros((size,), jnp.int32).at[jnp.where(index < 0, size, index)].add(1, mode="drop")
    pack = size // threads  # all that a thread has: the program meets the barriers once
    out, number, own = ([f"${first + i}" for i in range(pack)] for first in range(0, 3 * pack, pack))
    lines = [f".shared .align 4 .b8 bins[{4 * size}]; .reg .b32 base, at; .reg .pred counted; mov.b32 base, bins;"]
    lines += [f"shl.b32 at, {x}, 2; add.s32 at, at, base; st.shared.b32 [at], 0;" for x in own]
    lines.append("bar.sync 0;")
    for x in number:
        lines.append(f"setp.ge.s32 counted, {x}, 0; shl.b32 at, {x}, 2; add.s32 at, at, base;")
        lines.append("@counted red.shared.add.u32 [at], 1;")
    lines.append("bar.sync 0;")
    lines += [f"shl.b32 at, {y}, 2; add.s32 at, at, base; ld.shared.b32 {x}, [at];" for x, y in zip(out, own, strict=True)]
    (counts,) = plt.elementwise_inline_asm(
        "{" + " ".join(lines) + "}",
        args=[index, jnp.arange(size, dtype=jnp.int32)],
        constraints=",".join(["=&r"] * pack + ["r"] * 2 * pack),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct((size,), jnp.int32)],
    )
    return counts
