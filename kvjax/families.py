"""Families: write one or two functions and have a whole method.

`Eviction` asks for a score of every prompt slot and keeps the best, once, at the prompt's end. `Retrieval` keeps every
slot and asks for a summary of a page and the score of summaries against a query; each step attends to the best pages.
"""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.attention import Selection
from kvjax.cache import LayerCache
from kvjax.method import LayerMethod, Prompt, SlotMethod, Step
from kvjax.selection import page_slots, top_slots
from kvjax.typing import is_concrete, pytree, static
from pallas_kernels.kth_select import kth_select_mask


@pytree
class AppendOnly(SlotMethod):
    """Attend to every stored slot; tokens after the prompt are appended and never evicted."""

    def select(self, cache: LayerCache, aux: None, step: Step) -> None:
        return None

    def update(self, cache: LayerCache, aux: None, step: Step, mass: Array | None) -> tuple[LayerCache, None]:
        return cache, None

    def count(self, cache: LayerCache, aux: None, shared: Any) -> tuple[Array, Array]:
        return count_all(cache)

    def counters(self, aux: None, shared: Any) -> dict[str, Array]:
        return {}

    def bounded_slots(self) -> None:
        return None

    def max_tokens(self, in_prompt: bool) -> None:
        return None

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        return self


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
class Retrieval(SlotMethod):
    """Keep every slot; attend, per KV head, to the best pages and always to the newest page."""

    budget: int | Array = 1024  # tokens attended per KV head, traced, at most `capacity`; rounded down to pages
    capacity: int | None = static(None)  # allocated selection, in tokens; None = budget
    page_size: int = static(16)  # slots per page
    implementation: str | None = static(None)  # None, a gather_attention name, or "mask": dense attention with a mask
    offload: bool | float = static(False)  # keys and values (of layers that select) in host memory; a number: share of layers

    joins_near = False  # True: `join` reads the newest key where an offloaded cache has it (`LayerCache.near_keys`)

    @property
    def near(self) -> tuple[int, int]:
        return 0, max(self.page_size, 64)

    @abc.abstractmethod
    def summarize(self, key: Array, valid: Array) -> Any:
        """Summary of pages: key [B, H, P, C, D] and valid bool [B, H, P, C] to a pytree of [B, H, P, ...].

        A page that holds nothing has a summary of its own, by which `score` knows it.
        """

    @abc.abstractmethod
    def join(self, summary: Any, cache: LayerCache) -> Any:
        """The summary once slot ``cursor - 1`` of each row has joined its page; it may have before.

        A method that offloads (``joins_near``) reads keys of that page by ``cache.near_keys``.

        Must equal `summarize` of the page; without it every token would cost a page of keys.
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
        if self.offload and not self.joins_near:
            name = type(self).__name__
            raise ValueError(
                f"{name}: offload=True needs a `join` that reads keys with `LayerCache.near_keys`, since an offloaded cache "
                f"has only the newest on the device; {name} says so by joins_near = True"
            )
        return cache, self.index(cache)

    def select(self, cache: LayerCache, aux: Any, step: Step) -> Selection | None:
        if self.capacity >= cache.num_slots:
            return None
        score = self.score(aux, step.query[..., 0, :], cache.cursor)
        most = min(self.capacity // self.page_size, score.shape[-1])
        pages, listed = kth_select_mask(score, self.budget // self.page_size, most)
        return Selection(slots=pages, mask=listed, page_size=self.page_size)

    def update(self, cache: LayerCache, aux: Any, step: Step, mass: Array | None) -> tuple[LayerCache, Any]:
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

    def count(self, cache: LayerCache, aux: Any, shared: Any) -> tuple[Array, Array]:
        """Exact when pages are full but for the newest; an upper bound where an eviction left holes."""
        stored = jnp.sum(cache.valid, axis=2, dtype=jnp.int32)
        if self.capacity >= cache.num_slots:
            return stored, jnp.zeros(stored.shape, jnp.float32)
        newest = (jnp.maximum(cache.cursor, 1) - 1) % self.page_size + 1
        chosen = (self.budget // self.page_size - 1) * self.page_size + newest[:, None]
        pages = jnp.sum(self._occupancy(cache) > 0, axis=2).astype(jnp.float32)
        per_page = sum(x.dtype.itemsize * x[0, 0, 0].size for x in jax.tree.leaves(aux))
        return jnp.minimum(stored, chosen.astype(jnp.int32)), pages * per_page

    def counters(self, aux: Any, shared: Any) -> dict[str, Array]:
        return {}

    def bounded_slots(self) -> None:
        return None

    def max_tokens(self, in_prompt: bool) -> None:
        return None

    def _occupancy(self, cache: LayerCache) -> Array:
        """Stored tokens of each page, int32 [B, H, P]."""
        pad = -cache.num_slots % self.page_size
        valid = jnp.pad(cache.valid, ((0, 0), (0, 0), (0, pad)))
        return jnp.sum(valid.reshape(*valid.shape[:2], -1, self.page_size), axis=3, dtype=jnp.int32)

    def _summarize(self, cache: LayerCache, pages: Array) -> Any:
        """Summaries of ``pages`` int32 [B, N]; slots past the end count as empty."""
        slots = page_slots(pages, self.page_size)
        inside = slots < cache.num_slots
        index = jnp.where(inside, slots, 0)
        key = jnp.take_along_axis(cache.key, index[:, None, :, None], axis=2)
        valid = jnp.take_along_axis(cache.valid, index[:, None], axis=2) & inside[:, None]
        shape = (*key.shape[:2], pages.shape[1], self.page_size)
        return self.summarize(key.reshape(*shape, -1), valid.reshape(shape))


def count_all(cache: LayerCache) -> tuple[Array, Array]:
    """`SlotMethod.count` of a method that attends to every stored slot and reads no metadata."""
    stored = jnp.sum(cache.valid, axis=2, dtype=jnp.int32)
    return stored, jnp.zeros(stored.shape, jnp.float32)


def check_budget(method: Any, least: int, needs: str) -> None:
    """Fill ``capacity`` from a concrete budget and refuse a budget below ``least`` slots (``needs`` says why)."""
    budget, capacity = method.budget, method.capacity
    name = type(method).__name__
    if is_concrete(budget):
        if budget != int(budget) or budget < least:
            raise ValueError(
                f"{name}: budget must be a whole number of at least {least} tokens ({needs}), got {budget}"
            )
        if capacity is None:
            object.__setattr__(method, "capacity", int(budget))
        elif budget > capacity:
            raise ValueError(f"{name}: budget must be at most capacity={capacity}, got {budget}")
    elif capacity is None:
        raise ValueError(f"{name}: capacity (static) must be given when budget is an array or traced")
