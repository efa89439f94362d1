"""Log-probabilities of generated tokens: under the distribution that was drawn from, and under the model's own one."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.protocol.typing import EMPTY, pytree, traced


@pytree
class LogProbs:
    """Log-probabilities of generated tokens, in nats; 0 after a row's end, so that sums over N are those of whole answers.

    The model's distribution is the softmax of its logits over what the cache's method attends to, in float32: without
    penalties, temperature and filters. The ratio of the two is ``exp(model - sampled)``.
    """

    model: Array = traced("float32 [B, N], of each token under the model's distribution")
    sampled: Array = traced(
        "float32 [B, N], under the distribution that the token was drawn from: behind penalties, temperature and filters; "
        "0 where decoding is greedy, which draws from a single token"
    )
    top_tokens: Array | None = traced(
        "int32 [B, N, K], the likeliest tokens under the model's distribution, the likeliest first; -1 after a row's end; "
        "None without ``top_logprobs``",
        default=None,
    )
    top: Array | None = traced("float32 [B, N, K], their log-probabilities under the model's distribution", default=None)

    @classmethod
    def empty(cls, batch: int, steps: int, top: int) -> LogProbs:
        """Return a place for ``steps`` tokens of ``batch`` rows, with the ``top`` likeliest tokens of each."""
        model, sampled = (jnp.zeros((batch, steps), jnp.float32) for _ in range(2))
        if not top:
            return cls(model=model, sampled=sampled)
        shape = batch, steps, top
        return cls(
            model=model, sampled=sampled, top_tokens=jnp.full(shape, EMPTY, jnp.int32), top=jnp.zeros(shape, jnp.float32)
        )

    def written(self, new: LogProbs, step: Array) -> LogProbs:
        """Write those of one token of each row, ``new`` [B, 1], at the place ``step`` int32 [] of the result."""
        return jax.tree.map(lambda kept, one: lax.dynamic_update_slice_in_dim(kept, one, step, 1), self, new)

    def scattered(self, new: LogProbs, place: Array) -> LogProbs:
        """Write ``new`` [B, T] at the places int32 [B, T] of the result; places behind its end are dropped."""
        row = jnp.arange(len(place))[:, None]
        return jax.tree.map(lambda kept, some: kept.at[row, place].set(some, mode="drop"), self, new)


class Seen(NamedTuple):
    """What tokens were drawn from."""

    logits: Array  # float32 [B, T, V], of the model
    filtered: Array  # float32 [B, T, V], behind penalties, temperature and filters


def log_probs(like: LogProbs, seen: Seen, tokens: Array, active: Array, temperature: float | Array | None) -> LogProbs:
    """Compute the log-probabilities of ``tokens`` int32 [B, T], with as many likeliest tokens as ``like`` has.

    ``active`` bool [B, T] is False where there is no token. Without a temperature, and where it is 0, tokens are certain.
    """
    logits = seen.logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1)
    model = jnp.where(active, _picked(logits, tokens) - total, 0.0)
    sampled = jnp.zeros_like(model)
    if temperature is not None:
        drawn = active & (jnp.asarray(temperature) > 0)
        sampled = jnp.where(drawn, _picked(seen.filtered, tokens) - jax.nn.logsumexp(seen.filtered, axis=-1), 0.0)
    new = LogProbs(model=model, sampled=sampled)
    if like.top is None:
        return new
    top, top_tokens = lax.top_k(logits, like.top.shape[-1])
    real = active[..., None]
    return dataclasses.replace(
        new, top=jnp.where(real, top - total[..., None], 0.0), top_tokens=jnp.where(real, top_tokens.astype(jnp.int32), EMPTY)
    )


def _picked(logits: Array, tokens: Array) -> Array:
    """Return the logits of the tokens: float32 [B, T]."""
    return jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
