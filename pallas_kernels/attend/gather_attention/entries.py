"""Lists of slots and pages inside kernels: which rows a program reads, and how."""

import jax
import jax.numpy as jnp

from pallas_kernels._triton.pallas import pl, plt

MOST_SEEN = 1 << 13  # entries whose mask a program reads at once before its first step


def steps(ref, b, h, split, block, splits, page_size, every):
    """Count the steps of program ``split``: all of its blocks, or those up to the last one with an unmasked entry.

    ``every`` keeps all of them.
    """
    # The bound is traced, so a single step stays a loop, in which keys and values are loaded together.
    blocks = pl.cdiv(ref["slots"].shape[2] * page_size, block)
    count = jax.lax.div(blocks - split + (splits - 1), splits)
    size = pl.next_power_of_2(pl.cdiv(blocks, splits) * block)
    if every or not block < size <= MOST_SEEN:
        return count
    return jnp.minimum(count, _live_steps(ref, b, h, split, size, block, splits, page_size))


def _live_steps(ref, b, h, split, size, block, splits, page_size):
    """Count a program's steps up to the last one with an unmasked entry, over ``size`` entries or more than it has."""
    at = jnp.arange(size, dtype=jnp.int32)
    step = jax.lax.div(at, block)
    entry = (step * splits + split) * block + jax.lax.rem(at, block)
    items = ref["slots"].shape[2]
    item = jnp.minimum(jax.lax.div(entry, page_size), items - 1)
    listed = (entry < items * page_size) & of_list(ref["mask"], b, h, item)
    return jnp.max(jnp.where(listed, step + 1, 0))


def load_rows(x, at, row, asked, channel):
    """Load channels ``channel`` int32 [C] of ``row`` [N] of ``x[at]``: [N, C]; 0 where not ``asked`` [N]."""
    channel = jnp.broadcast_to(channel[None], (row.shape[0], channel.shape[0]))
    row, asked = (jnp.broadcast_to(y[:, None], channel.shape) for y in (row, asked))
    none = 0 if jnp.issubdtype(x.dtype, jnp.integer) else 0.0  # Triton makes no float8 of an integer
    return plt.load(x.at[*at, row, channel], mask=asked, other=none)


def of_list(ref, b, h, item):
    """Read entries ``item`` of the head's own list, or of the list that all heads share."""
    return ref[b, h if ref.shape[1] > 1 else 0, item]


def bias_of(ref, b, h, heads, item):
    """Read the bias of entries ``item`` [block] for query ``heads`` [G]: [G, block], or [1, block] if all share it."""
    if len(ref.shape) == 3:
        return of_list(ref, b, h, item)[None, :]
    shape = heads.shape[0], item.shape[0]
    return ref[b, h, jnp.broadcast_to(heads[:, None], shape), jnp.broadcast_to(item[None, :], shape)]


def listed_rows(ref, b, h, entry, page_size):
    """Find each entry's row in the cache, its item of the list, whether to read the row, and whether it enters."""
    slots, items = ref["host" if "host" in ref else "key"].shape[2], ref["slots"].shape[2]
    item = jnp.minimum(entry if page_size == 1 else jax.lax.div(entry, page_size), items - 1)
    listed = (entry < items * page_size) & of_list(ref["mask"], b, h, item)
    # Clip: an index out of range would read out of bounds.
    row = jnp.clip(of_list(ref["slots"], b, h, item), 0, (slots - 1) // page_size)
    if page_size > 1:
        row = row * page_size + jax.lax.rem(entry, page_size)
        listed &= row < slots
    row, asked = jnp.where(listed, row, 0), listed
    if "position" in ref:  # loaded beside the keys and the values, which do not wait for it
        listed &= ref["position"][b, h, row] >= 0
    return row, item, asked, listed
