"""TOVAOnce: at the prompt's end keep the tokens that its last query attends to most, the same in all heads of a layer.

Stored after the prompt: ``budget`` slots for each KV head, the same tokens in all heads of a layer, and every later token.

Score of token i in a layer, where t is the last token of the prompt and p its softmax over the whole prompt::

    s[i] = mean over all query heads of the layer of p_t[i]

The last token is always kept. `TOVA` goes on from there: it evicts a token in every step.

**Source**: Oren et al., "Transformers are Multi-State RNNs" (arXiv:2401.06104), for the score; NVIDIA/kvpress 8bb29b9,
TOVAPress, which applies it once and protects the last token.

**Departures**: none known.
"""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache
from kvjax.protocol.families import Eviction
from kvjax.protocol.method import Prompt
from kvjax.protocol.observation import newest_queries, window_votes
from kvjax.protocol.typing import pytree
from pallas_kernels import axes


@pytree
class TOVAOnce(Eviction):
    """TOVA's score, applied once; see the module docstring."""

    PAPER: ClassVar[str] = "arXiv:2401.06104"
    TITLE: ClassVar[str] = "TOVA, prompt only"

    obs_window = 1

    def score(self, cache: LayerCache, prompt: Prompt) -> Array:
        last = newest_queries(prompt, 1)
        votes = axes.total(window_votes(cache, last).sum(axis=(1, 2))[:, None])
        return jnp.where(cache.position == last.query_position[:, None], jnp.inf, votes)
