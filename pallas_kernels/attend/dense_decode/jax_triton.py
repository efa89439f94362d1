"""The kernel of `pallas_triton` through jax-triton."""

from pallas_kernels._triton.jax_triton_call import package
from pallas_kernels._triton.quantised import refuse_codes
from pallas_kernels.attend.dense_decode import pallas_triton
from pallas_kernels.attend.merge_splits.jax_triton_partials import attend


def dense_decode(query, key, value, *, position, limit, scale, config=None):
    """Attend with one query per head to all tokens below a limit, by jax-triton."""
    from pallas_kernels.attend.dense_decode import jax_triton_body

    rows, heads, _, dim = query.shape
    slots = key.shape[2]
    if config is None:
        config = pallas_triton.fitted(pallas_triton.default_config(rows * heads, slots), query, dim)
    sizes = {"SLOTS": slots, "BLOCK": min(config.block, 1 << (slots.bit_length() - 1))}
    return attend(jax_triton_body._partial, config, query, (key, value, position, limit), scale, **sizes)


def check(query, key, value, *, position, limit, scale):
    """Raise ``NotImplementedError`` where "pallas_triton" does, for codes, and where the package is missing."""
    pallas_triton.check(query, key, value, position=position, limit=limit, scale=scale)
    refuse_codes(key, value)
    package()
