"""A draft for `kvjax.Verified` that needs no index: `FromJudge` attends to the tokens that Full's last pass attended to."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.attention.over_cache import Selection
from kvjax.cache import LayerCache, LayerStorage
from kvjax.protocol.method import Prompt, Step
from kvjax.protocol.observation import newest_queries, window_votes
from kvjax.protocol.slots import SlotMethod, check_budget, count_all
from kvjax.protocol.typing import pytree, static, traced
from kvjax.selection import top_slots


@pytree
class Listed:
    """The tokens with the most attention, K for each KV head."""

    slots: Array  # int32 [B, H, K]
    used: Array  # bool [B, H, K], False = ignore the entry


@pytree
class FromJudge(SlotMethod):
    """Attend to the tokens to which Full has attended most: ``Verified(draft=FromJudge(budget=1024))``.

    A pass of `kvjax.Verified` computes Full's attention over all tokens anyway. For each KV head it gives the attention
    probability that each token received from the pass's first token, summed over the query heads of the group. The
    ``budget - num_recent`` tokens with the largest sums are listed, and the draft attends to them and to the ``num_recent``
    newest tokens until the next pass renews the list. Before the first pass the sums are over the last ``obs_window`` queries
    of the prompt. A draft step reads the list, and no key that it does not attend to.

    The list stays as it is where Full decodes one token alone, and without `kvjax.Verified` as the prompt, or the last
    `kvjax.extend`, has made it.

    **Source**: "SpecAttn" (arXiv:2602.07223), which selects the draft's tokens by the attention of the verification.

    **Departures**: each KV head has one list, by the sum over its group, and by the first token of a pass, which is always
    kept; the newest tokens are always attended. Over slots that are divided over devices, and in a pass over more than 8
    tokens, all of its tokens ask, rejected ones too.
    """

    budget: int | Array = traced("tokens attended per KV head, all included", default=1024, least=1, within="capacity")
    capacity: int = static("tokens allocated for them; None = budget", default=None, least=1)
    num_recent: int = static("newest tokens, always attended; more than twice the depth", default=64, least=2)

    PAPER: ClassVar[str] = "arXiv:2602.07223"
    obs_window = 32  # last prompt tokens, whose attention makes the first list

    observes = 2

    def check(self) -> None:
        check_budget(self, self.num_recent + 1, f"num_recent={self.num_recent} newest tokens and one more")

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Listed]:
        votes = window_votes(cache, newest_queries(prompt, self.obs_window))
        return cache, self._best(cache, votes.sum(axis=2))

    def select(self, cache: LayerStorage, aux: Listed, step: Step) -> Selection:
        first = cache.cursor[:, None] - self.num_recent
        recent = first + jnp.arange(self.num_recent, dtype=jnp.int32)[None]
        recent = jnp.broadcast_to(recent[:, None], (*aux.slots.shape[:2], self.num_recent))
        slots = jnp.concatenate([aux.slots, recent], axis=2)
        used = jnp.concatenate([aux.used & (aux.slots < first[:, None]), recent >= 0], axis=2)
        return Selection(slots=jnp.where(used, slots, 0), mask=used)

    def update(self, cache: LayerStorage, aux: Listed, step: Step, mass: Array | None) -> tuple[LayerStorage, Listed]:
        if mass is None:
            return cache, aux
        new, fresh = self._best(cache, mass), (step.position >= 0).any(axis=1)[:, None, None]
        return cache, Listed(slots=jnp.where(fresh, new.slots, aux.slots), used=jnp.where(fresh, new.used, aux.used))

    def count(self, cache: LayerStorage, aux: Listed, shared: Any) -> tuple[Array, Array]:
        stored, _ = count_all(cache)
        listed = jnp.sum(aux.used, axis=2, dtype=jnp.int32) + self.num_recent
        return jnp.minimum(stored, listed), jnp.full(stored.shape, 4.0 * aux.slots.shape[2], jnp.float32)

    def _best(self, cache: LayerStorage, mass: Array) -> Listed:
        """List the slots with the largest ``mass`` float32 [B, H, S] among the slots that will not be recent ones soon."""
        slot = jnp.arange(cache.num_slots, dtype=jnp.int32)[None, None]
        old = cache.valid & (slot < cache.cursor[:, None, None] - self.num_recent // 2)
        most = self.capacity - self.num_recent
        slots, used = top_slots(mass, old, self.budget - self.num_recent, min(most, cache.num_slots))
        return Listed(slots=slots, used=used)
