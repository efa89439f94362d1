"""Lists of sinks, best slots and near slots, written by programs that each read a block of slots (PQCache, MagicPIG)."""

import jax.numpy as jnp

from pallas_kernels._triton.pallas import pl, plt


def put(ref, at, x, keep, interpret):
    """Store ``x`` at ``at`` where ``keep``. The interpreter would write masked entries back, maybe over new values."""
    plt.store(ref.at[jnp.where(keep, at, ref.shape[-1]) if interpret else at], x, mask=keep)


def fill(slots_ref, mask_ref, programs, first, capacity, chosen, stop, length, interpret):
    """Write this program's share of the list without the best slots: sinks, near slots, 0 for unused entries, the mask.

    Args:
        slots_ref: int32 [E], E = ``first`` + ``capacity`` + room.
        mask_ref: bool [E].
        programs: the number of programs; the third axis of the grid numbers them.
        first: the number of sinks.
        capacity: the most best slots that the list has room for.
        chosen: the number of best slots.
        stop: the first near slot.
        length: the slot behind the last token.
        interpret: run as plain JAX operations.

    Returns:
        The entries int32 [N] of this share; bool [N], whether each is used; bool [N], whether it was written here. Entries of
        best slots were not.
    """
    entries = slots_ref.shape[0]
    share = max(pl.next_power_of_2(pl.cdiv(entries, programs)), 16)
    entry = pl.program_id(2) * share + jnp.arange(share, dtype=jnp.int32)
    best = entry - first
    among = (best >= 0) & (best < capacity)
    slot = jnp.where(best < 0, entry, stop + (best - capacity))
    used = jnp.where(among, best < chosen, slot < length)
    inside = entry < entries
    own = inside & ~(among & used)
    put(slots_ref, entry, jnp.where(used, slot, 0), own, interpret)
    plt.store(mask_ref.at[entry], used, mask=inside)
    return entry, used, own
