"""Newest: keep the newest tokens of a prompt. A method outside of kvjax, as a user would write it."""

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache
from kvjax.protocol.families import Eviction
from kvjax.protocol.method import Prompt
from kvjax.protocol.slots import check_budget
from kvjax.protocol.typing import pytree


@pytree
class Newest(Eviction):
    """Keep the ``budget`` newest tokens of a prompt."""

    def check(self) -> None:
        check_budget(self, 1, "at least one token")

    def score(self, cache: LayerCache, prompt: Prompt) -> Array:
        return cache.position.astype(jnp.float32)
