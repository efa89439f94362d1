"""SnapKV: at the prompt's end keep the tokens that its last queries attend to, and those last tokens.

Stored after the prompt: ``budget`` slots, chosen for each KV head separately, and every later token.

The last W = ``obs_window`` tokens of the prompt are the window, and the tokens before them the prefix. Score of prefix token
i for KV head h, where p is the causal softmax over all prompt keys::

    s[h, i] = mean over the group's query heads of pool( sum over the last W queries of p[i] )

The window is always kept, and with it the ``budget - W`` best tokens of the prefix.

**Source**: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv:2404.14469, section 4);
FasterDecoding/SnapKV e216ddc for window, kernel and pooling defaults.

**Departures**: each KV head keeps one set (mean over the group, as in NVIDIA/kvpress 8bb29b9). The released code repeats the
cache for every query head and keeps a set for each, which multiplies a GQA cache by the group size.
"""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache
from kvjax.families import Eviction
from kvjax.method import Prompt
from kvjax.observation import window_votes
from kvjax.selection import smooth
from kvjax.slots import check_budget
from kvjax.typing import pytree, static


@pytree
class SnapKV(Eviction):
    """Keep the tokens that the end of the prompt attends to; see the module docstring."""

    obs_window: int = static(default=32, least=1)  # last prompt tokens, which vote and are always kept
    kernel: int = static(default=5, least=1, odd=True)  # pooling window over neighbouring tokens
    pooling: str = static(default="avg", choices=("avg", "max"))  # over neighbouring tokens

    PAPER: ClassVar[str] = "arXiv:2404.14469"

    def check(self) -> None:
        check_budget(self, self.obs_window + 1, f"obs_window={self.obs_window} recent tokens and one more")

    def score(self, cache: LayerCache, prompt: Prompt) -> Array:
        votes = window_votes(cache, prompt)
        # The window starts W tokens before the end of each row. It is not pooled with the prefix, and it is always kept.
        start = prompt.query_position.max(axis=1) + 1 - self.obs_window
        recent = cache.position >= start[:, None, None]
        prefix = (cache.valid & ~recent)[:, :, None]
        outside = 0.0 if self.pooling == "avg" else -jnp.inf
        pooled = smooth(jnp.where(prefix, votes, outside), self.kernel, self.pooling).mean(axis=2)
        return jnp.where(recent, jnp.inf, pooled)
