"""TOVA: keep the tokens that the newest query attends to most; every new token evicts the token with the least attention.

Stored per KV head: ``budget`` tokens, the same tokens in all heads of a layer. Nothing else is stored, because the score is
computed anew in every step.

Score of token i in a layer, where t is the newest token and p its softmax over all stored tokens::

    s[i] = mean over all query heads of the layer of p_t[i]

At the prompt's end the ``budget`` best tokens by the score of the prompt's last query stay. Once the cache is full, every
decoded token evicts the token with the lowest score, which may be itself. Prompt attention is dense and exact.

**Source**: Oren et al., "Transformers are Multi-State RNNs" (arXiv:2401.06104, section 3.2); schwartz-lab-NLP/TOVA 275cf5f
for the mean over heads and the newest token, which is not protected.

**Departures**: none known. NVIDIA/kvpress runs another variant: it evicts once, at the prompt's end, and protects the last
token.
"""

from typing import ClassVar

from jax import Array

from kvjax.cache import LayerCache
from kvjax.protocol.families import StepEviction
from kvjax.protocol.method import Prompt, Step
from kvjax.protocol.observation import window_votes
from kvjax.protocol.typing import not_none, pytree
from pallas_kernels import axes


@pytree
class TOVA(StepEviction):
    """Evict the token that the newest query attends to least; see the module docstring."""

    PAPER: ClassVar[str] = "arXiv:2401.06104"

    obs_window = 1

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, None]:
        votes = window_votes(cache, prompt).sum(axis=2)
        return self.keep_best(cache, _of_layer(votes), room)[0], None

    def update(self, cache: LayerCache, aux: None, step: Step, mass: Array | None) -> tuple[LayerCache, None]:
        return cache.evict(_of_layer(not_none("mass", mass)), budget=self.budget)[0], None


def _of_layer(score: Array) -> Array:
    """Sum ``score`` [B, H, S] over the KV heads of all devices: float32 [B, 1, S]."""
    return axes.total(score.sum(axis=1, keepdims=True))
