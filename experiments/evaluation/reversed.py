"""Reversed: an outside method that keeps what SnapKV drops, and so tells whether a task needs the right tokens.

``--methods experiments.evaluation.reversed:Reversed`` evaluates it beside the methods of kvjax. It is a check of the tasks,
not a way to save memory. A task on which it scores well does not need the tokens that a method selects.
"""

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache
from kvjax.protocol.families import Eviction
from kvjax.protocol.method import Prompt
from kvjax.protocol.observation import prefix_votes
from kvjax.protocol.slots import check_budget
from kvjax.protocol.typing import pytree, static


@pytree
class Reversed(Eviction):
    """Keep the last tokens of the prompt as SnapKV does, and of the earlier tokens those with the fewest votes."""

    obs_window: int = static("last prompt tokens, which vote and are always kept", default=32, least=1)
    kernel: int = static("pooling window over neighbouring tokens", default=5, least=1, odd=True)

    def check(self) -> None:
        check_budget(self, self.obs_window, f"the obs_window={self.obs_window} recent tokens")

    def score(self, cache: LayerCache, prompt: Prompt) -> Array:
        votes = prefix_votes(cache, prompt, self.obs_window, self.kernel)
        return jnp.where(jnp.isinf(votes), votes, -votes)  # the window has infinite votes
