"""Sink logits: one learned logit of each query head that enters every softmax of a layer, and has no value.

A softmax with a sink is the softmax without it, times the share of the denominator that is not the sink's. So attention runs
without sinks, in any kernel and in any number of parts, and the correction comes once, after the parts are merged.

Source: gpt-oss (OpenAI, 2025); Xiao et al., arXiv:2309.17453 (section 3.2, a softmax with one more logit).
"""

import jax
import jax.numpy as jnp
from jax import Array


def with_sinks(out: Array, lse: Array, sinks: Array | None) -> tuple[Array, Array]:
    """Add the sinks of a layer to a finished softmax.

    Args:
        out: [B, H, G, ..., D], over all tokens that the query attends to.
        lse: float32 [B, H, G, ...], the log of the softmax denominator without the sinks; -inf where there is no token.
        sinks: float32 [H, G], or None for a layer without sinks, which changes nothing.

    Returns:
        The output in its dtype, and the log of the denominator with the sinks.
    """
    if sinks is None:
        return out, lse
    sink = sinks.reshape(1, *sinks.shape, *(1,) * (lse.ndim - 3))
    share = jax.nn.sigmoid(lse - sink)
    return (out.astype(jnp.float32) * share[..., None]).astype(out.dtype), jnp.logaddexp(lse, sink)
