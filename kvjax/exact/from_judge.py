"""A draft for `kvjax.Verified` that needs no index: `FromJudge` attends to the tokens that Full's last pass attended to."""

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
from pallas_kernels import axes
from pallas_kernels.numerics import ceil_share


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

    **Source**: "Vegas" (arXiv:2602.07223, ICML 2026; first called SpecAttn), which selects the draft's tokens by the
    attention of the verification; platformxlab/vegas 7bf9d1e. As it is published, with a depth of 6:
    ``FromJudge(budget=4096, share=0.07, one_list=True, last_too=True, obs_window=1, num_recent=16)``.

    **Departures**: by default each KV head has a list of its own and the pass's first token asks, which is always kept. Vegas
    has one list for the layer (``one_list``), by the mean over all query heads and over the pass's first and last token
    (``last_too``), of a share of all tokens and at least 256 (``share``); after a prompt its last token asks. The newest
    ``num_recent`` tokens are always attended, where Vegas attends to those behind the pass's first token;
    half of them cannot be listed. Vegas ranks in bfloat16, and renews its list after every token that Full decodes alone.
    Without ``last_too`` all of a pass's tokens ask, rejected ones too, over slots that are divided over devices, and in a
    pass over more than 8 tokens.
    """

    budget: int | Array = traced("tokens attended per KV head, all included", default=1024, least=1, within="capacity")
    capacity: int = static("tokens allocated for them; None = budget", default=None, least=1)
    num_recent: int = static("newest tokens, always attended; more than twice the depth", default=64, least=2)

    obs_window: int = static("last prompt tokens, whose attention makes the first list", default=32, least=1)  # pyright: ignore[reportGeneralTypeIssues]
    share: float | None = static(
        "tokens listed, as a share of all, within the capacity; None: as the budget says", default=None, above=0, most=1
    )
    one_list: bool = static("whether all KV heads of a layer attend to one list", default=False)
    last_too: bool = static("whether the last token of a pass asks beside the first", default=False)

    PAPER: ClassVar[str] = "arXiv:2602.07223"

    least_listed = 256  # by a share

    observes = 2

    @property
    def asks_ends(self) -> bool:
        return self.last_too

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
        if self.one_list:
            mass = jnp.broadcast_to(axes.total(mass.sum(axis=1, keepdims=True)), mass.shape)
        listed = self.budget - self.num_recent
        if self.share is not None:
            listed = jnp.clip(ceil_share(jnp.float32(self.share), cache.cursor), self.least_listed, most)[:, None]
        slots, used = top_slots(mass, old, listed, min(most, cache.num_slots))
        return Listed(slots=slots, used=used)
