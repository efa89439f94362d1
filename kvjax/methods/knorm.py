"""Knorm: at the prompt's end keep the tokens with the shortest keys; no query and no attention map is needed.

Stored after the prompt: ``budget`` slots, chosen for each KV head separately, and every later token.

Score of token i, where k is its key::

    s_i = - |k_i|

The paper finds that keys of small norm receive much attention. RoPE does not change a norm. Where a model normalises
its keys (Qwen3), their norms differ by the weights of the normalisation alone, and the score says little.

**Source**: Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (arXiv:2406.11430);
NVIDIA/kvpress 8bb29b9, which evicts once, at the prompt's end.

**Departures**: the page of the released code (alessiodevoto/l2compress f93d6ca) leaves the first two layers whole;
kvpress and this method do not (``PerLayer(layers={0: Full(), 1: Full()}, default=Knorm())`` does). No recent token is
protected, as in both.
"""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache
from kvjax.protocol.families import Eviction
from kvjax.protocol.method import Prompt
from kvjax.protocol.typing import pytree


@pytree
class Knorm(Eviction):
    """Keep the tokens with the shortest keys; see the module docstring."""

    PAPER: ClassVar[str] = "arXiv:2406.11430"

    def score(self, cache: LayerCache, prompt: Prompt) -> Array:
        # The square orders the keys as the norm does.
        return -jnp.sum(jnp.square(cache.key.astype(jnp.float32)), axis=3)
