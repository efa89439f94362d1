"""A row's list of tokens as one Pallas Triton kernel: a program per row and block of entries."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.dispatch import accept

BLOCK = 128  # entries per program
check = accept  # it has no limits


def _kernel(fresh_ref, length_ref, awake_ref, budget_ref, *refs, num_sink, num_local):
    # fresh [B, K]; length, awake [B]; budget [1]; then, if tokens were chosen before: miss [B] and chosen [B, K], and chosen
    # again as a result, in the same memory. Results token, used [B, E].
    *old, token_ref, used_ref = refs
    row, capacity, width = pl.program_id(0), fresh_ref.shape[1], token_ref.shape[1]
    place = pl.program_id(1) * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    item = jnp.clip(place - num_sink, 0, capacity - 1)  # which chosen token stands at this place, if one does
    picked = fresh_ref[row, item]
    if old:
        miss_ref, chosen_ref, chosen_out = old
        # In place without a race: only the program that owns an entry uses its value, and only this program writes it. Other
        # threads store to an index behind the list, where the mask stops them.
        picked = jnp.where(miss_ref[row], picked, chosen_ref[row, item])
        here = item == place - num_sink
        plt.store(chosen_out.at[row, jnp.where(here, item, capacity + place)], picked, mask=here)
    # Sinks, then chosen tokens, then newest tokens, counted from the row's end. A row that fits lists all its tokens.
    length, budget = length_ref[row], budget_ref[0]
    limit = num_sink + budget + num_local
    token = jnp.where(place < num_sink + budget, picked, length - limit + place)
    token = jnp.where((place < num_sink) | (length <= limit), place, token)
    used = (place < jnp.minimum(length, limit)) & (awake_ref[row] >= 0)
    inside = place < width
    plt.store(token_ref.at[row, place], jnp.where(used, token, 0), mask=inside)
    plt.store(used_ref.at[row, place], used, mask=inside)


def token_list(fresh, length, awake, budget, *old, num_sink, num_local, extra, interpret=False):
    """List the sinks, the chosen tokens and the newest tokens of each row; ``interpret=True`` runs anywhere, slowly."""
    batch, capacity = fresh.shape
    width = num_sink + capacity + num_local + extra
    lists = jax.ShapeDtypeStruct((batch, width), jnp.int32), jax.ShapeDtypeStruct((batch, width), jnp.bool_)
    result = triton_call(
        functools.partial(_kernel, num_sink=num_sink, num_local=num_local),
        grid=(batch, pl.cdiv(width, BLOCK)),
        out_shape=(jax.ShapeDtypeStruct(fresh.shape, jnp.int32), *lists) if old else lists,
        input_output_aliases={5: 0} if old else {},
        name="token_list",
        interpret=interpret,
    )(fresh, length, awake, budget.reshape(1), *old)
    return tuple(result) if old else (fresh, *result)
