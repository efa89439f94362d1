"""ObservedAttention: at the prompt's end keep the tokens that received the most attention per query that saw them.

Stored after the prompt: ``budget`` slots, chosen for each KV head separately, and every later token.

Score of token i for KV head h in a prompt of n tokens, where p_t is the softmax of query t, and G the group's query
heads::

    s[h, i] = ( sum over t >= i, g of p_t,g[i] ) / ( G * (n - i) )

The sum is the score of H2O. The division by the n - i queries that see token i takes away what early tokens gain there
by being seen more often.

**Source**: NVIDIA/kvpress 8bb29b9, ObservedAttentionPress; the sum comes from Zhang et al., "H2O:
Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (arXiv:2306.14048).

**Departures**: none known. kvpress needs attention that stores the map of all probabilities; here a second pass over
the keys adds up its columns. No recent token is protected, as in kvpress.
"""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache
from kvjax.cache.divided import whole
from kvjax.protocol.families import Eviction
from kvjax.protocol.method import Prompt
from kvjax.protocol.slots import Reads
from kvjax.protocol.typing import pytree


@pytree
class ObservedAttention(Eviction):
    """Keep the tokens with the most attention per query; see the module docstring."""

    PAPER: ClassVar[str] = "arXiv:2306.14048"
    TITLE: ClassVar[str] = "Observed Attention"

    reads = Reads(mass=True)
    slot_block = 1

    def score(self, cache: LayerCache, prompt: Prompt) -> Array:
        position = whole(cache.position, cache)
        length = position.max(axis=(1, 2))[:, None, None] + 1
        queries = jnp.maximum(length - position, 1)  # that see the token; results of empty slots are not used
        # A division by G as well would not change the order.
        return whole(prompt.mass, cache) / queries.astype(jnp.float32)
