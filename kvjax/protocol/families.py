"""Families of methods: with one or two functions of your own, a family makes a whole method.

* `Eviction` asks for a score of every prompt slot, and keeps the best slots once, at the prompt's end.
* `WindowEviction` is an `Eviction` by the votes of the prompt's last queries; it has all functions.
* `StepEviction` keeps the best slots of the prompt too. After the prompt, every decoded token evicts one token.
* `Retrieval` keeps every slot. It asks for a summary of a page, and for the score of summaries against a query. Each step
  attends to the best pages.
"""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.over_cache import Selection
from kvjax.cache import LayerCache, LayerStorage
from kvjax.cache.divided import best_slots, total, whole
from kvjax.cache.offload import Near
from kvjax.protocol.method import Prompt, Step
from kvjax.protocol.observation import prefix_votes
from kvjax.protocol.slots import SlotMethod, check_budget, count_all
from kvjax.protocol.typing import pytree, static, traced
from kvjax.selection import check_alike, check_score, page_slots, top_slots
from pallas_kernels import axes


@pytree
class AppendOnly(SlotMethod):
    """Attend to all stored slots. Tokens after the prompt are appended and never evicted."""

    def update(self, cache: LayerStorage, aux: None, step: Step, mass: Array | None) -> tuple[LayerStorage, None]:
        return cache, None

    def count(self, cache: LayerStorage, aux: None, shared: Any) -> tuple[Array, Array]:
        return count_all(cache)


@pytree
class Eviction(AppendOnly):
    """Keep the ``budget`` best prompt slots of each KV head. Tokens after the prompt are appended and never evicted.

    A budget of int32 [H] has an entry for each KV head of the layer; on a mesh, for the KV heads of all devices.
    `kvjax.wrappers.Periodic` applies the score again while decoding, if the score needs neither attention mass nor token ids.
    """

    budget: int | Array = traced("prompt slots kept per KV head", default=1024, least=1, within="capacity")
    capacity: int = static("slots allocated for them; None = budget", default=None, least=1)

    keeps = "`budget` tokens per KV head"
    evicts = True

    @abc.abstractmethod
    def score(self, cache: LayerCache, prompt: Prompt) -> Array:
        """Score each slot: float32 [B, H, S]. Slots of high score are kept, and a slot with ``inf`` is kept for certain.

        A method with a `slot_block` can be given one part of the slots (`kvjax.cache.divided`). It scores the slots of all
        parts.
        """

    def kept(self, cache: LayerCache, prompt: Prompt) -> tuple[Array, Array]:
        """List the slots that stay: int32 [B, H, K], ascending, and bool [B, H, K], True for the entries that count."""
        valid, budget = whole(cache.valid, cache), of_own_heads(self.budget, cache.key.shape[1])
        score = check_score(self, self.score(cache, prompt), valid.shape, "[B, H, S]")
        return top_slots(score, valid, budget, self.capacity)

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, None]:
        return cache.compact(*self.kept(cache, prompt), room), None

    def slots_again(self) -> int | None:
        own = type(self).compress is not Eviction.compress  # `Periodic` asks for `kept` alone
        return None if own or self.reads.mass or self.reads.tokens else self.capacity


def of_own_heads(value: Any, heads: int) -> Any:
    """Return a scalar unchanged; slice an array [H] over the KV heads of all devices to this device's ``heads``."""
    return lax.dynamic_slice_in_dim(value, axes.index(axes.MODEL) * heads, heads) if jnp.ndim(value) else value


@pytree
class WindowEviction(Eviction):
    """Keep the last W = ``obs_window`` tokens of the prompt, and the earlier tokens that their queries attend to."""

    obs_window: int = static("last prompt tokens, which vote and are always kept", default=32, least=1)

    kernel = 5  # pooling window over neighbouring tokens

    def check(self) -> None:
        check_budget(self, self.obs_window, f"the obs_window={self.obs_window} recent tokens")

    def score(self, cache: LayerCache, prompt: Prompt) -> Array:
        return prefix_votes(cache, prompt, self.obs_window, self.kernel)


@pytree
class StepEviction(SlotMethod):
    """Keep ``budget`` tokens of each KV head: the best of the prompt at first; later every decoded token evicts one token.

    Prefill is dense, so all tokens of the prompt are stored until its end. Write ``compress`` (with `keep_best`) and
    ``update`` (with `LayerCache.evict`).
    """

    budget: int | Array = traced("tokens kept per KV head", default=1024, least=1, within="capacity")
    capacity: int = static("slots allocated for them; None = budget", default=None, least=1)

    keeps = "`budget` tokens per KV head"
    evicts = True
    moves_slots = True
    observes = 1

    def keep_best(
        self, cache: LayerCache, score: Array, room: int, carry: Array | None = None
    ) -> tuple[LayerCache, Array | None]:
        """Compact the cache to the ``budget`` best slots of each head.

        Args:
            cache: the whole prompt, or this device's part of it.
            score: float32 [B, H, S], of the slots of all devices; slots of high score are kept, ``inf`` for certain. Or
                [B, 1, S], one score for all heads.
            room: tokens that may follow, as in `compress`.
            carry: float32 [B, H, S], a value for each slot that moves with the slot; None if there is none.

        Returns:
            The cache with N slots; and ``carry`` as float32 [B, H, N], which is 0 in empty slots, or None.
        """
        valid = whole(cache.valid, cache)
        score = jnp.broadcast_to(score, valid.shape)
        slots, keep = top_slots(score, valid, self.budget, self.capacity)
        # A prompt shorter than the budget leaves more than one slot free.
        spare = min(self.bounded_slots(), cache.row_slots + room) - slots.shape[2]
        if carry is not None:
            carry = jnp.where(keep, jnp.take_along_axis(carry, slots, axis=2), 0)
            carry = jnp.pad(carry, ((0, 0), (0, 0), (0, spare)))
        return cache.compact(slots, keep, spare), carry

    def count(self, cache: LayerStorage, aux: Any, shared: Any) -> tuple[Array, Array]:
        """Count all stored slots; metadata are the arrays with a value per slot, see `keep_best`."""
        stored, _ = count_all(cache)
        per_slot = sum(x.dtype.itemsize for x in jax.tree.leaves(aux))
        return stored, stored.astype(jnp.float32) * per_slot

    def bounded_slots(self) -> int:
        return self.capacity + 1  # the new token is stored before another is evicted

    def max_tokens(self, in_prompt: bool) -> int | None:
        return None if in_prompt else 1


@pytree
class Retrieval(SlotMethod):
    """Keep every slot. Each KV head attends to its best pages, and always to the newest page."""

    budget: int | Array = traced("tokens attended per KV head, in whole pages", default=1024, least=1, within="capacity")
    capacity: int = static("allocated selection, in tokens; None = budget", default=None, least=1)
    page_size: int = static("slots per page", default=16, least=1)

    def check(self) -> None:
        check_budget(self, self.page_size, f"one page of page_size={self.page_size}")

    def near(self, slots: int, room: int) -> Near:
        return Near(first=0, newest=max(self.page_size, 64))

    @abc.abstractmethod
    def summarize(self, key: Array, valid: Array) -> Any:
        """Make a summary of each page from key [B, H, P, C, D] and valid bool [B, H, P, C]: a pytree of [B, H, P, ...].

        Empty pages need a special summary, so that `score` can recognise them.
        """

    @abc.abstractmethod
    def join(self, summary: Any, cache: LayerStorage) -> Any:
        """Join slot ``cache.here - 1`` of each row to the summary of its page. A slot can join twice.

        On a device that has only a part of the slots, this may be no slot, or a slot of another part; then nothing joins.

        The result must equal `summarize` of the page. Without this hook every new token would cost reading a page of keys.
        A method with a field ``offload`` reads the key with ``cache.keys_at``.
        """

    @abc.abstractmethod
    def score(self, summary: Any, query: Array, cursor: Array) -> Array:
        """Score the relevance of each page to the rotated query [B, H, G, D]: float32 [B, H, P].

        Slots below ``cursor`` int32 [B] are in use; ``cursor`` may exceed this device's slots if other devices have more. The
        newest page scores inf: it is always selected, because the step's own token is not in its summary yet. Later pages and
        empty pages score -inf.
        """

    def index(self, cache: LayerCache) -> Any:
        """Compute the summaries of all pages from the stored keys."""
        pad = (0, 0), (0, 0), (0, -cache.num_slots % self.page_size)
        key, valid = jnp.pad(cache.key, (*pad, (0, 0))), jnp.pad(cache.valid, pad)
        shape = (*valid.shape[:2], -1, self.page_size)
        return self.summarize(key.reshape(*shape, key.shape[3]), valid.reshape(shape))

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Any]:
        return cache, self.index(cache)

    def select(self, cache: LayerStorage, aux: Any, step: Step) -> Selection:
        # No more entries than the row has pages. The budget may still be below a capacity that holds all pages.
        most = min(self.capacity // self.page_size, -(-cache.row_slots // self.page_size))
        used = cache.here if cache.parts == 1 else jnp.maximum(cache.here, 0)
        shape = *cache.key.shape[:2], -(-cache.num_slots // self.page_size)
        score = check_score(self, self.score(aux, step.query[..., 0, :], used), shape, "[B, H, P]")
        pages, listed = best_slots(score, self.budget // self.page_size, most, cache)
        return Selection(slots=pages, mask=listed, page_size=self.page_size)

    def update(self, cache: LayerStorage, aux: Any, step: Step, mass: Array | None) -> tuple[LayerStorage, Any]:
        batch, tokens = step.position.shape
        if tokens == 1:
            return cache, check_alike(self, "join", aux, self.join(aux, cache))
        touched = (tokens + self.page_size - 2) // self.page_size + 1  # the most pages for T consecutive slots
        new = jnp.sum(step.position >= 0, axis=1, dtype=jnp.int32)
        first = jnp.maximum(cache.cursor - new, 0) // self.page_size
        pages = first[:, None] + jnp.arange(touched, dtype=jnp.int32)[None]
        if cache.parts > 1:  # pages of other devices are dropped, like pages past the end
            pages = pages - cache.first // self.page_size
            pages = jnp.where(pages < 0, cache.num_slots, pages)
        slots = page_slots(pages, self.page_size)
        inside = slots < cache.num_slots  # slots past the end count as empty
        index, shape = jnp.where(inside, slots, 0), (*cache.key.shape[:2], touched, self.page_size)
        key = jnp.take_along_axis(cache.key, index[:, None, :, None], axis=2)
        valid = jnp.take_along_axis(cache.valid, index[:, None], axis=2) & inside[:, None]
        fresh = self.summarize(key.reshape(*shape, -1), valid.reshape(shape))
        row = jnp.arange(batch)[:, None]

        def put(old: Array, new: Array) -> Array:  # pages past the end are dropped
            return old.at[row, :, pages].set(new.swapaxes(1, 2), mode="drop")

        return cache, jax.tree.map(put, aux, fresh)

    def drafted(self, before: Any, after: Any) -> Any:
        return after  # `update` summarizes anew all pages that the pass and its drafts have touched

    def count(self, cache: LayerStorage, aux: Any, shared: Any) -> tuple[Array, Array]:
        """Count exactly if all pages but the newest are full; give an upper bound if an eviction left holes."""
        stored, _ = count_all(cache)
        newest = (jnp.maximum(cache.cursor, 1) - 1) % self.page_size + 1
        chosen = (self.budget // self.page_size - 1) * self.page_size + newest[:, None]
        valid = jnp.pad(cache.valid, ((0, 0), (0, 0), (0, -cache.num_slots % self.page_size)))
        tokens = jnp.sum(valid.reshape(*valid.shape[:2], -1, self.page_size), axis=3, dtype=jnp.int32)
        pages = total(jnp.sum(tokens > 0, axis=2), cache).astype(jnp.float32)
        per_page = sum(x.dtype.itemsize * x[0, 0, 0].size for x in jax.tree.leaves(aux))
        return jnp.minimum(stored, chosen.astype(jnp.int32)), pages * per_page
