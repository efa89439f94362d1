"""Score given tokens under a cache's method: `score`."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.api.generate import check_finite, tokens_after
from kvjax.api.prefill import Integers, Tokens
from kvjax.api.programs import score_program
from kvjax.cache.whole_model import Cache
from kvjax.decoding.bits import in_32_bits
from kvjax.decoding.checks import as_jax
from kvjax.mesh.sharding import place_rows, readable
from kvjax.protocol.describe import is_known, tracing


@in_32_bits
def score(params: Any, cache: Cache, tokens: Tokens, *, lengths: Integers | None = None) -> Array:
    """Compute the log-probabilities of given tokens after those of a cache: float32 [B, N], in nats.

    The tokens are fed one by one, in decode steps of the cache's method, as if `generate` had drawn them. So the result is
    what a rollout under this method would have seen; under `kvjax.methods.Full` and `kvjax.Verified` it is the model's own.
    Probabilities are the softmax of the logits in float32: without penalties, temperature and filters, as `LogProbs.model`.
    Inside ``jax.grad`` it has a derivative, in plain JAX (``kvjax.default_implementation("xla")``).

    Args:
        params: model parameters.
        cache: is not consumed. The steps run on a copy, which needs memory, so one cache can score several continuations.
        tokens: a list of a token list for each row, or int [B, N] padded on the right with ``lengths``.
        lengths: int [B]. Rows may have different numbers of tokens, zero included; zeros stand behind a row's end.

    Raises:
        ValueError: tokens of another number of rows, no room, a cache of another model, or a cache that was consumed.
        FloatingPointError: the logits were not finite.
    """
    padded, length = tokens_after(params, cache, tokens, lengths)
    if not padded.shape[1]:
        return jnp.zeros(padded.shape, jnp.float32)
    args = place_rows(cache.plan, padded, length, as_jax(np.zeros(cache.batch, bool)))
    in_trace = tracing() or not is_known(params, cache, args)
    made, bad = readable(cache.plan, score_program(params, cache, *args, stop_early=not in_trace))
    check_finite(bad)
    return made
