"""The first step of a search over keys that one program holds: a histogram in shared memory tries many pivots at once.

It is inline assembly (see `assembly`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.assembly import assembly
from pallas_kernels._triton.kth_search import INFINITE

MOST_BINS = 1 << 13  # 32 KiB of shared memory; a kernel may declare 48


def narrowed(key: jax.Array, low: Any, high: Any, held: Any, wanted: Any, threads: int, interpret: bool) -> tuple:
    """Find the bin that holds the wanted key, among as many bins as keys; `kth_search.find` then starts from this interval.

    Args:
        key: int32 [N]; N is a power of two and at least ``threads``. Keys below ``low`` are not counted.
        low: int32, see `kth_search.bounds_of`.
        high: int32, see `kth_search.bounds_of`.
        held: int32, see `kth_search.bounds_of`; at least ``wanted``.
        wanted: int32, at least 1.
        threads: number of threads of the program.
        interpret: compute without assembly.

    Returns:
        int32 scalars: where the bin begins, where it ends (above its greatest key), how many keys are at least its begin,
        and how many are at least its end. Where ``wanted`` keys are infinite, only the last number has a meaning: it is
        the number of infinite keys.
    """
    bins = key.shape[0]
    # How many bits the greatest difference of two keys has. It may not fit in int32, so take the bits of half of it, rounded,
    # and add one. The exponent of a float32 is its number of bits.
    half = lax.shift_right_logical(high - 1 - low, jnp.int32(1)).astype(jnp.float32)
    bits = (lax.bitcast_convert_type(half, jnp.int32) >> 23) - 127 + 2
    # A bin is 2**shift keys wide, so that all bins together cover the interval.
    shift = jnp.maximum(bits - (bins.bit_length() - 1), 0)
    at = lax.shift_right_logical(key - low, jnp.broadcast_to(shift, key.shape))
    counts = histogram(jnp.where((key >= low) & (key < INFINITE), at, -1), threads, interpret)
    reach = held - lax.cumsum(counts, axis=0) + counts  # per bin: keys in it or above
    enough = reach >= wanted
    chosen = jnp.sum(enough.astype(jnp.int32), dtype=jnp.int32) - 1
    # The fewest keys that are enough, and how many of them lie above the bin. Empty bins below share the first number, but
    # the minimum takes the bin with the fewest keys above. One reduction finds both numbers in one word.
    both = jnp.min(jnp.where(enough, (reach << 16) + reach - counts, 2**31 - 1))
    start = low + (chosen << shift)
    # The end of the topmost bin may not fit in int32, nor may the distance from its start to `high`: compare halves.
    last = lax.shift_right_logical(high - start, jnp.int32(1)) < (1 << shift) >> 1
    return start, jnp.where(last, high, start + (1 << shift)), both >> 16, both & 0xFFFF


def histogram(index: jax.Array, threads: int, interpret: bool) -> jax.Array:
    """Count how often each number from 0 to N - 1 occurs in ``index`` int32 [N]; negative numbers are not counted."""
    size = index.shape[0]
    if interpret:
        return jnp.zeros((size,), jnp.int32).at[jnp.where(index < 0, size, index)].add(1, mode="drop")
    # The assembly takes all numbers of a thread at once, so that the program meets each barrier only once.
    pack = size // threads
    out, number, own = ([f"${first + i}" for i in range(pack)] for first in range(0, 3 * pack, pack))
    lines = [f".shared .align 4 .b8 bins[{4 * size}]; .reg .b32 base, at; .reg .pred counted; mov.b32 base, bins;"]
    # Clear the thread's own bins; wait; add 1 to the bin of each of its numbers; wait; read its own bins.
    lines += [f"shl.b32 at, {x}, 2; add.s32 at, at, base; st.shared.b32 [at], 0;" for x in own]
    lines.append("bar.sync 0;")
    for x in number:
        lines.append(f"setp.ge.s32 counted, {x}, 0; shl.b32 at, {x}, 2; add.s32 at, at, base;")
        lines.append("@counted red.shared.add.u32 [at], 1;")
    lines.append("bar.sync 0;")
    lines += [f"shl.b32 at, {y}, 2; add.s32 at, at, base; ld.shared.b32 {x}, [at];" for x, y in zip(out, own, strict=True)]
    return assembly("{" + " ".join(lines) + "}", [index, jnp.arange(size, dtype=jnp.int32)], pack)
