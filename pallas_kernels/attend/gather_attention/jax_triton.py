"""The kernel of `pallas_triton` through jax-triton, without bias, rotation and host rows; it reads every list to its end."""

import jax.numpy as jnp

from pallas_kernels._triton.jax_triton_call import launch, package
from pallas_kernels._triton.pallas import pl
from pallas_kernels._triton.quantised import refuse_codes
from pallas_kernels.attend.gather_attention import pallas_triton
from pallas_kernels.attend.merge_splits.jax_triton_partials import merged, partial_shapes


def gather_attention(query, key, value, slots, mask, *, scale, page_size, position, config=None, **_):
    """Attend to the listed slots only, by jax-triton; see `check` for what it does not take."""
    from pallas_kernels.attend.gather_attention import jax_triton_body

    rows, heads, group, dim = query.shape
    listed = slots.shape[2] * page_size
    if config is None:
        config = pallas_triton.fitted(pallas_triton.default_config(rows * heads, listed), query)
    out, lse = launch(
        jax_triton_body._partial,
        (query, key, value, slots, mask, slots if position is None else position),
        partial_shapes(query, config.splits),
        grid=(rows, heads, config.splits),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        SCALE=scale,
        HEADS=heads,
        GROUP=group,
        FILLED=pl.next_power_of_2(group),
        DIM=dim,
        SLOTS=key.shape[2],
        LISTS=slots.shape[1],
        ITEMS=slots.shape[2],
        PAGE=page_size,
        HAS_POSITION=position is not None,
        PRECISION="ieee" if query.dtype == jnp.float32 else "tf32",
        BLOCK=config.block,
        STEPS=pl.cdiv(listed, config.block * config.splits),
    )
    return merged(out, lse, query)


def check(query, key, value, slots, mask, *, bias=None, place=None, rows=None, partials=None, logits=False, **_):
    """Raise ``NotImplementedError`` where "pallas_triton" does, without the package, and for arguments it does not take."""
    pallas_triton.check(query, key, value, slots, mask, place=place)
    refuse_codes(key, value)
    if logits or any(x is not None for x in (bias, place, rows, partials)):
        raise NotImplementedError("got bias, place, host rows, partials or logits, expected none of them")
    if not slots.shape[2]:
        raise NotImplementedError("got an empty list, expected at least one entry")
    package()
