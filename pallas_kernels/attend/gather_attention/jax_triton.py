"""The kernel of `pallas_triton` through jax-triton, without bias, rotation and host rows; it reads every list to its end."""

from pallas_kernels._triton.jax_triton_call import package
from pallas_kernels._triton.pallas import pl
from pallas_kernels._triton.quantised import refuse_codes
from pallas_kernels.attend.gather_attention import pallas_triton
from pallas_kernels.attend.merge_splits.jax_triton_partials import attend


def gather_attention(query, key, value, slots, mask, *, scale, page_size, position, config=None, **_):
    """Attend to the listed slots only, by jax-triton; see `check` for what it does not take."""
    from pallas_kernels.attend.gather_attention import jax_triton_body

    rows, heads = query.shape[:2]
    listed = slots.shape[2] * page_size
    if config is None:
        config = pallas_triton.fitted(pallas_triton.default_config(rows * heads, listed), query)
    sizes = {"SLOTS": key.shape[2], "LISTS": slots.shape[1], "ITEMS": slots.shape[2], "PAGE": page_size}
    sizes |= {"HAS_POSITION": position is not None, "BLOCK": config.block}
    sizes |= {"STEPS": pl.cdiv(listed, config.block * config.splits)}
    operands = key, value, slots, mask, slots if position is None else position
    return attend(jax_triton_body._partial, config, query, operands, scale, **sizes)


def check(query, key, value, slots, mask, *, bias=None, place=None, rows=None, partials=None, logits=False, **_):
    """Raise ``NotImplementedError`` where "pallas_triton" does, without the package, and for arguments it does not take."""
    pallas_triton.check(query, key, value, slots, mask, place=place)
    refuse_codes(key, value)
    if logits or any(x is not None for x in (bias, place, rows, partials)):
        raise NotImplementedError("got bias, place, host rows, partials or logits, expected none of them")
    if not slots.shape[2]:
        raise NotImplementedError("got an empty list, expected at least one entry")
    package()
