"""Families: write one or two functions and have a whole method.

* `Eviction` asks for a score of every prompt slot and keeps the best slots, once, at the prompt's end.
* `StepEviction` does so too, and then gives up one token per decoded token.
* `Retrieval` keeps every slot. It asks for a summary of a page and for the score of summaries against a query; each step
  attends to the best pages.
"""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.attention import Selection
from kvjax.cache import LayerCache, LayerStorage
from kvjax.method import Prompt, Step
from kvjax.offload import Near
from kvjax.selection import page_slots, top_slots
from kvjax.slots import SlotMethod, count_all
from kvjax.slots import check_budget as check_budget
from kvjax.typing import pytree, static
from pallas_kernels.kth_select import kth_select_mask


@pytree
class AppendOnly(SlotMethod):
    """Attend to every stored slot; tokens after the prompt are appended and never evicted."""

    def select(self, cache: LayerStorage, aux: None, step: Step) -> None:
        return None

    def update(
        self, cache: LayerStorage, aux: None, step: Step, mass: Array | None
    ) -> tuple[LayerStorage, None]:
        return cache, None

    def count(self, cache: LayerStorage, aux: None, shared: Any) -> tuple[Array, Array]:
        return count_all(cache)


@pytree
class Eviction(AppendOnly):
    """Keep the ``budget`` best prompt slots of each KV head; tokens that follow are appended and never evicted."""

    budget: int | Array = 1024  # prompt slots kept per KV head, traced, at most `capacity`
    capacity: int | None = static(None)  # allocated for them; None = budget

    keeps = "`budget` tokens per KV head"
    evicts = True

    @abc.abstractmethod
    def score(self, cache: LayerCache, prompt: Prompt) -> Array:
        """Value of each slot: float32 [B, H, S], higher is kept, ``inf`` is kept for certain."""

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, None]:
        slots, keep = top_slots(self.score(cache, prompt), cache.valid, self.budget, self.capacity)
        return cache.compact(slots, keep, room), None


@pytree
class StepEviction(SlotMethod):
    """Keep ``budget`` tokens of each KV head: the best of the prompt, and then every decoded token evicts one.

    The prompt is read densely, so all of it is stored until its end. Write ``compress`` (with `keep_best`) and ``update``
    (with `LayerCache.evict`).
    """

    budget: int | Array = 1024  # tokens kept per KV head, traced, at most `capacity`
    capacity: int | None = static(None)  # allocated for them; None = budget

    keeps = "`budget` tokens per KV head"
    evicts = True
    moves_slots = True
    observes_steps = True

    def keep_best(
        self, cache: LayerCache, score: Array, room: int, carry: Array | None = None
    ) -> tuple[LayerCache, Array | None]:
        """The cache with the ``budget`` best slots of each head.

        Args:
            cache: the whole prompt.
            score: float32 [B, H, S], higher is kept, ``inf`` is kept for certain.
            room: tokens that may follow, as `compress` is given it.
            carry: float32 [B, H, S], a number of each slot that moves with it; None if there is none.

        Returns:
            The cache with N slots, and ``carry`` as float32 [B, H, N], 0 in slots that hold nothing.
        """
        slots, keep = top_slots(score, cache.valid, self.budget, self.capacity)
        # A prompt shorter than the budget leaves more than one slot free.
        spare = min(self.bounded_slots(), cache.num_slots + room) - slots.shape[2]
        if carry is not None:
            carry = jnp.where(keep, jnp.take_along_axis(carry, slots, axis=2), 0)
            carry = jnp.pad(carry, ((0, 0), (0, 0), (0, spare)))
        return cache.compact(slots, keep, spare), carry

    def select(self, cache: LayerStorage, aux: Any, step: Step) -> None:
        return None

    def count(self, cache: LayerStorage, aux: Any, shared: Any) -> tuple[Array, Array]:
        """All stored slots; metadata is whatever array per slot `compress` carries along."""
        stored, _ = count_all(cache)
        per_slot = sum(x.dtype.itemsize for x in jax.tree.leaves(aux))
        return stored, stored.astype(jnp.float32) * per_slot

    def bounded_slots(self) -> int:
        return self.capacity + 1  # the new token is attended to before one is evicted

    def max_tokens(self, in_prompt: bool) -> int | None:
        return None if in_prompt else 1


@pytree
class Retrieval(SlotMethod):
    """Keep every slot; attend, per KV head, to the best pages and always to the newest page."""

    budget: int | Array = 1024  # tokens attended per KV head, traced, at most `capacity`; rounded down to pages
    capacity: int | None = static(None)  # allocated selection, in tokens; None = budget
    page_size: int = static(16)  # slots per page
    implementation: str | None = static(None)  # None, a gather_attention name, or "mask": dense attention with a mask
    offload: bool | float = static(False)  # keys and values (of layers that select) in host memory; a number: share of layers

    @property
    def near(self) -> Near:
        return Near(first=0, newest=max(self.page_size, 64))

    @abc.abstractmethod
    def summarize(self, key: Array, valid: Array) -> Any:
        """Summary of pages: key [B, H, P, C, D] and valid bool [B, H, P, C] to a pytree of [B, H, P, ...].

        A page that holds nothing has a summary of its own, by which `score` knows it.
        """

    @abc.abstractmethod
    def join(self, summary: Any, cache: LayerStorage) -> Any:
        """The summary once slot ``cursor - 1`` of each row has joined its page; a slot may join twice.

        The result must equal `summarize` of the page. Without this hook every token would cost a page of keys. A method that
        is ``offloadable`` reads the key by ``cache.keys_at``.
        """

    @abc.abstractmethod
    def score(self, summary: Any, query: Array, cursor: Array) -> Array:
        """Relevance of each page to the rotated query [B, H, G, D]: float32 [B, H, P].

        Slots below ``cursor`` int32 [B] are in use. The newest page scores inf: it always belongs to the selection, and
        the step's own token is not in its summary yet. Pages behind it and pages that hold nothing score -inf.
        """

    def index(self, cache: LayerCache) -> Any:
        """The summary of all pages from scratch."""
        pad = (0, 0), (0, 0), (0, -cache.num_slots % self.page_size)
        key, valid = jnp.pad(cache.key, (*pad, (0, 0))), jnp.pad(cache.valid, pad)
        shape = (*valid.shape[:2], -1, self.page_size)
        return self.summarize(key.reshape(*shape, key.shape[3]), valid.reshape(shape))

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Any]:
        return cache, self.index(cache)

    def select(self, cache: LayerStorage, aux: Any, step: Step) -> Selection | None:
        if self.capacity >= cache.num_slots:
            return None
        score = self.score(aux, step.query[..., 0, :], cache.cursor)
        most = min(self.capacity // self.page_size, score.shape[-1])
        pages, listed = kth_select_mask(score, self.budget // self.page_size, most)
        return Selection(slots=pages, mask=listed, page_size=self.page_size)

    def update(
        self, cache: LayerStorage, aux: Any, step: Step, mass: Array | None
    ) -> tuple[LayerStorage, Any]:
        batch, tokens = step.position.shape
        if tokens == 1:
            return cache, self.join(aux, cache)
        touched = (tokens + self.page_size - 2) // self.page_size + 1  # pages that T new slots can lie in
        first = jnp.maximum(cache.cursor - tokens, 0) // self.page_size
        pages = first[:, None] + jnp.arange(touched, dtype=jnp.int32)[None]
        fresh = self._summarize(cache, pages)
        row = jnp.arange(batch)[:, None]

        def put(old: Array, new: Array) -> Array:  # pages past the end are dropped
            return old.at[row, :, pages].set(new.swapaxes(1, 2), mode="drop")

        return cache, jax.tree.map(put, aux, fresh)

    def count(self, cache: LayerStorage, aux: Any, shared: Any) -> tuple[Array, Array]:
        """Exact when pages are full but for the newest; an upper bound where an eviction left holes."""
        stored = jnp.sum(cache.valid, axis=2, dtype=jnp.int32)
        if self.capacity >= cache.num_slots:
            return stored, jnp.zeros(stored.shape, jnp.float32)
        newest = (jnp.maximum(cache.cursor, 1) - 1) % self.page_size + 1
        chosen = (self.budget // self.page_size - 1) * self.page_size + newest[:, None]
        pages = jnp.sum(self._occupancy(cache) > 0, axis=2).astype(jnp.float32)
        per_page = sum(x.dtype.itemsize * x[0, 0, 0].size for x in jax.tree.leaves(aux))
        return jnp.minimum(stored, chosen.astype(jnp.int32)), pages * per_page

    def _occupancy(self, cache: LayerStorage) -> Array:
        """Stored tokens of each page, int32 [B, H, P]."""
        pad = -cache.num_slots % self.page_size
        valid = jnp.pad(cache.valid, ((0, 0), (0, 0), (0, pad)))
        return jnp.sum(valid.reshape(*valid.shape[:2], -1, self.page_size), axis=3, dtype=jnp.int32)

    def _summarize(self, cache: LayerStorage, pages: Array) -> Any:
        """Summaries of ``pages`` int32 [B, N]; slots past the end count as empty."""
        slots = page_slots(pages, self.page_size)
        inside = slots < cache.num_slots
        index = jnp.where(inside, slots, 0)
        key = jnp.take_along_axis(cache.key, index[:, None, :, None], axis=2)
        valid = jnp.take_along_axis(cache.valid, index[:, None], axis=2) & inside[:, None]
        shape = (*key.shape[:2], pages.shape[1], self.page_size)
        return self.summarize(key.reshape(*shape, -1), valid.reshape(shape))
