"""The corrections of sampled tokens as one Pallas Triton kernel, grid (B, H, blocks): a program reads the keys of a block."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.block_specs import of_head, whole
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.shared_memory import fitting_block
from pallas_kernels.formats.quantised import Quantised
from pallas_kernels.numerics import product_precision
from pallas_kernels.score.magicpig.sampled_bias.reference import correction, cosine

_BLOCK = 64  # entries per program, or fewer where shared memory is small


def _block(group: int, dim: int, dtype) -> int:
    """Choose the entries per program; raise ``NotImplementedError`` if shared memory is too small for any."""
    filled = max(pl.next_power_of_2(group), 16)
    return fitting_block(_BLOCK, lambda block: dtype.itemsize * dim * (block + filled))


def _kernel(query_ref, key_ref, centre_ref, own_ref, near_ref, *refs, first, num_tables, num_bits, block, interpret):
    # Of one head: query [G, D], key [S, D], centre [D], own [G, K], slots [K] if there is a list. Of all rows: near [B].
    # Result of one head: bias [G, K].
    *slots_ref, bias_ref = refs
    (group, dim), count, near = query_ref.shape, own_ref.shape[1], near_ref[pl.program_id(0)]
    entry = pl.program_id(2) * block + jnp.arange(block, dtype=jnp.int32)
    inside = entry < count
    slot = plt.load(slots_ref[0].at[entry], mask=inside, other=0) if slots_ref else entry
    head = jnp.arange(pl.next_power_of_2(group), dtype=jnp.int32)
    row, column = (jnp.broadcast_to(x, (head.shape[0], block)) for x in (head[:, None], entry[None, :]))
    real = (row < group) & (column < count)
    own = plt.load(own_ref.at[row, column], mask=real, other=False)
    sampled = inside & (slot >= first) & (slot < near) & (jnp.max(own.astype(jnp.int32), axis=0) > 0)
    some = jnp.max(sampled.astype(jnp.int32)) > 0

    @pl.when(some)
    def compare():
        at, channel = (jnp.broadcast_to(x, (block, dim)) for x in (slot[:, None], jnp.arange(dim, dtype=jnp.int32)[None, :]))
        key = plt.load(key_ref.at[at, channel], mask=jnp.broadcast_to(sampled[:, None], at.shape), other=0.0)
        # The group is filled up to the least size of a product by repeating its last head.
        many = jnp.arange(max(head.shape[0], 16), dtype=jnp.int32)
        query, centre = query_ref[jnp.minimum(many, group - 1), :], centre_ref[...]
        product = plt.dot(query, key, trans_b=True, precision=product_precision(query.dtype))
        wide, away = query.astype(jnp.float32), key.astype(jnp.float32) - centre[None, :]
        product = product - jnp.sum(wide * centre[None, :], axis=1)[:, None]
        norms = jnp.sqrt(jnp.sum(wide * wide, axis=1))[:, None] * jnp.sqrt(jnp.sum(away * away, axis=1))[None, :]
        # To correct repeated heads too would take longer than to write the cosines of the real heads and read them.
        place = [jnp.broadcast_to(x, product.shape) for x in (many[:, None], entry[None, :])]
        plt.store(bias_ref.at[*place], cosine(product, norms), mask=(place[0] < group) & (place[1] < count))
        if not interpret:
            plt.debug_barrier()  # other threads of this program wrote them

    bias = plt.load(bias_ref.at[row, column], mask=real & some, other=0.0)
    bias = jnp.where(sampled[None, :], correction(bias, num_tables, num_bits), 0.0)
    plt.store(bias_ref.at[row, column], jnp.where(own, bias, -jnp.inf), mask=real)


def sampled_bias(query, key, centre, slots, own, near, *, first, num_tables, num_bits, interpret=False):
    """Compute the corrections of the listed slots' logits; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, group, entries = own.shape
    block = _block(group, query.shape[3], query.dtype)
    lists = [] if slots is None else [slots]
    return triton_call(
        functools.partial(_kernel, first=first, num_tables=num_tables, num_bits=num_bits, block=block, interpret=interpret),
        grid=(batch, heads, pl.cdiv(entries, block)),
        in_specs=[*map(of_head, (query, key, centre, own)), whole(near), *map(of_head, lists)],
        out_specs=of_head(own),
        out_shape=jax.ShapeDtypeStruct(own.shape, jnp.float32),
        name="sampled_bias",
        interpret=interpret,
    )(query, key, centre, own, near, *lists)


def check(query, key, centre, slots, own, near, *, first, num_tables, num_bits):
    """Raise ``NotImplementedError`` for dtypes and sizes that the kernel does not take."""
    kinds = sorted({str(x.dtype) for x in (query, key)})
    if isinstance(key, Quantised) or kinds not in (["bfloat16"], ["float16"], ["float32"]):
        raise NotImplementedError(f"got dtypes {kinds}, expected one of bfloat16, float16, float32, and no codes")
    group, dim = query.shape[2:]
    if dim < 16 or dim > 256 or dim & (dim - 1) or group > 64:
        raise NotImplementedError(f"got {group} query heads of {dim}, expected up to 64, and a power of two from 16 to 256")
    _block(group, dim, query.dtype)
