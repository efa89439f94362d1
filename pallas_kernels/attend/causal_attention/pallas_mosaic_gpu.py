"""Causal attention of whole sequences through Mosaic GPU; under a derivative it is cuDNN's."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._mosaic_gpu import prompt
from pallas_kernels.attend.causal_attention import cudnn

DERIVATIVE = True


def causal_attention(query, key, value, *, scale, window):
    """Attend to each query's own and earlier tokens, by Mosaic GPU; see `check` for what it does not take."""
    batch, _, _, tokens, _ = query.shape
    differentiable = functools.partial(cudnn.causal_attention, scale=scale, window=window)

    @jax.custom_vjp
    def run(query, key, value):
        filled = (jnp.pad(x, [(0, 0), (0, 0), (0, -tokens % prompt.ALIGNED), (0, 0)]) for x in (key, value))
        bounds = jnp.broadcast_to(jnp.asarray([1, tokens, tokens], jnp.int32), (batch, 3))
        return prompt.attend(query, *filled, bounds=bounds, scale=scale)[0]

    run.defvjp(functools.partial(jax.vjp, differentiable), lambda pull, out: pull(out))
    return run(query, key, value)


def check(query, key, value, *, window, **options):
    """Raise ``NotImplementedError`` for a window, and for what `prompt.attend` does not take."""
    if window is not None:
        raise NotImplementedError(f"got a window of {window}, expected none")
    if not query.shape[3]:
        raise NotImplementedError("got no tokens, expected some")
    prompt.check_kind(query, key, value, **options)
