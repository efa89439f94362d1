"""Decode attention over index lists in plain JAX: gather the listed rows, then attend in float32."""

import jax
import jax.numpy as jnp

from pallas_kernels.formats.quantised import mixed_problem, numbers, numbers_at, vectors
from pallas_kernels.host import copy_row, has_copy, take_rows
from pallas_kernels.numerics import finite_or_zero, join_pieces, log_denominator, merge_with, rotate_halves, sum_pieces
from pallas_kernels.soft_cap import capped

BLOCK = 1024  # listed rows of keys, or of values, that are in memory at once, unless they are read from the host


def gather_attention(
    query, key, value, slots, mask, *, scale, bias, page_size, position, place, inv_freq, rows=None, partials=None,
    logits=False,
):  # fmt: skip
    """Attend to the listed slots only, in plain JAX."""
    query, key, value, turned = mixed_problem(query, key, value, place is None)
    partials = None if partials is None else (turned(partials[0]), partials[1])
    lists = (*query.shape[:2], slots.shape[2])
    slots, mask = jnp.broadcast_to(slots, lists), jnp.broadcast_to(mask, lists)
    if page_size > 1 or position is not None:
        slots, mask = listed_tokens(slots, mask, page_size, (key if rows is None else rows.host).shape[2], position)
    index = jnp.where(mask, slots, 0)
    block = BLOCK if rows is None else slots.shape[2]
    keys, values = (None, None) if rows is None else _host_rows(key, value, index, rows)
    place = None if place is None else jnp.broadcast_to(place, lists)
    asked, full = query.astype(jnp.float32), jax.lax.Precision.HIGHEST

    def listed(held, store, index, mask):  # masked rows are set to 0; a weight of 0 would not do, because 0 * NaN is NaN
        return jnp.where(mask[..., None], numbers_at(store, index) if held is None else held, 0)

    def multiplied(index, mask, place):
        part = listed(keys, key, index, mask)
        part = part if place is None else rotate_rows(part, place, inv_freq)
        return jnp.einsum("bhgd,bhkd->bhgk", asked, part.astype(jnp.float32), precision=full)

    def summed(index, mask, weight):
        part = listed(values, value, index, mask).astype(jnp.float32)
        return jnp.einsum("bhgk,bhkd->bhgd", weight, part, precision=full)

    products = capped(scale * join_pieces(multiplied, block, index, mask, place))
    if bias is not None:
        products = products + (bias if bias.ndim == 4 else jnp.broadcast_to(bias, lists)[:, :, None])
    products = jnp.where(mask[:, :, None], products, -jnp.inf)
    shift = finite_or_zero(jax.lax.stop_gradient(jnp.max(products, axis=-1, initial=-jnp.inf)))
    weight = jnp.exp(products - shift[..., None])
    total = jnp.sum(weight, axis=-1)
    out = sum_pieces(summed, block, index, mask, weight)
    out, lse = out / jnp.where(total > 0, total, 1)[..., None], log_denominator(shift, total)
    out, lse = (out, lse) if partials is None else merge_with(out, lse, *partials)
    return (turned(out.astype(query.dtype)), lse, *([products] if logits else []))


def _host_rows(key, value, slots, rows):
    """Gather the keys and values of ``slots`` of an offloaded cache, [B, H, K, D] each."""
    near, widths = value.shape[2], [vectors(x).shape[3] for x in (key, value)]
    row = copy_row(slots, rows.sinks, near)
    copied = has_copy(slots, rows.newest[:, None, None], rows.sinks, near)
    away = take_rows(rows.host, jnp.where(copied, 0, slots))

    def joined(copies, part):
        near = take_rows(vectors(copies), row)
        return numbers(copies, jnp.where(copied[..., None], near, part), slots)

    both = rows.host.shape[3] > widths[1]
    stay = not both and key.shape[2] == rows.host.shape[2]  # all keys are on the device
    key = numbers_at(key, slots) if stay else joined(key, away[..., : widths[0]])
    return key, joined(value, away[..., -widths[1] :])


def rotate_rows(rows: jax.Array, place: jax.Array, inv_freq: jax.Array) -> jax.Array:
    """Rotate pairs (i, i + D/2) of ``rows`` [B, H, K, D] by ``place`` int32 [B, H, K] times ``inv_freq`` float32 [D/2]."""
    angle = place[..., None].astype(jnp.float32) * inv_freq[None, None, None]
    return rotate_halves(rows, angle).astype(rows.dtype)


def listed_tokens(pages, mask, page_size, num_slots, position):
    """List the slots of pages and their mask, [B, H, K * page_size]; empty slots and slots past the end are masked."""
    pages = jnp.where(mask, pages, 0)
    slots = pages[..., None] * page_size + jnp.arange(page_size, dtype=jnp.int32)[None, None, None]
    slots = slots.reshape(*pages.shape[:2], -1)
    mask = jnp.repeat(mask, page_size, axis=2) & (slots < num_slots)
    if position is not None:
        mask &= jnp.take_along_axis(position, slots, axis=2, mode="clip") >= 0
    return slots, mask
