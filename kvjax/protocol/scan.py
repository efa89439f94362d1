"""Retrieval token by token: every token has a code; each step scans the codes and attends to the best tokens.

Slots fall into three regions, which all heads of a row share::

    [ sinks | searched | near ]

A step attends to the sinks, to the near tokens, and to the best searched tokens. Each KV head has its own best tokens; or
each query head has, and its KV head then reads the tokens of the whole group once. `ScanRetrieval` asks for the codes, the
best tokens and the bounds of the regions; `ScoredScan` finds the best tokens by scores of all tokens. With ``offload`` the
codes are on the device, and keys and values in host memory; sinks and near tokens have copies on the device.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.over_cache import Selection
from kvjax.cache import LayerCache, LayerStorage
from kvjax.cache.offload import Near
from kvjax.protocol.method import Prompt, Step
from kvjax.protocol.slots import SlotMethod, count_all
from kvjax.protocol.typing import EMPTY, pytree, static
from kvjax.selection import check_score, compact, mask_of, pick, pick_each
from pallas_kernels.choose.kth_select import kth_select_mask


@dataclasses.dataclass(frozen=True)
class Regions:
    """The slots that a step attends to besides the sinks.

    Attributes:
        near: int32 [B], the first near slot; not below the sinks.
        most_near: the largest number of near slots.
        wanted: the number of tokens to choose from the searched slots, an int or int32 that broadcasts to [B, H].
        most_wanted: the largest ``wanted``.
        found: int32 [B, H], how many searched tokens each KV head read in the last step, below 0 where there was no step.
            None if a KV head always reads ``wanted`` tokens, or all searched tokens if there are fewer.
    """

    near: Array
    most_near: int
    wanted: Array | int
    most_wanted: int
    found: Array | None = None


@pytree
class ScanRetrieval(SlotMethod):
    """Keep every slot and a code of every token.

    Write ``index``, ``join``, ``most_near``, ``regions``, ``find`` and ``scan_bytes``; with `ScoredScan`, ``score`` in place
    of ``find``. A method without codes, which reads all keys, says ``keys_stay = True``.
    """

    num_sink: int = static("first tokens, always attended", least=0)
    offload: bool | float = static("keys and values in host memory, or a share of layers", default=False, least=0, most=1)

    @abc.abstractmethod
    def index(self, cache: LayerCache) -> Any:
        """Compute the codes of the prompt's tokens, and what else `regions` needs.

        The tree structure must not depend on sizes, or a saved cache could not be loaded; shapes may.
        """

    @abc.abstractmethod
    def join(self, aux: Any, cache: LayerStorage, position: Array) -> Any:
        """Add the codes of the tokens at ``position`` int32 [B, T] that were just stored; a negative position is padding.

        Their slots are `kvjax.protocol.slots.new_slots`. Their keys and values are read with ``cache.rows_at``, or are
        `LayerStorage.newest`, because not all rows may be on the device.
        """

    def joined(self, aux: Any, found: Array) -> Any:
        """Record that the query heads of each KV head found ``found`` int32 [B, H] tokens together in this step.

        ``found`` is EMPTY in rows that had no token. It is called only for methods whose query heads choose for themselves.
        """
        return aux

    @abc.abstractmethod
    def most_near(self, slots: int) -> int:
        """Return the largest number of near slots in a cache of ``slots`` slots, at least 1."""

    @abc.abstractmethod
    def regions(self, cache: LayerStorage, aux: Any) -> Regions:
        """Compute the regions of a step whose token is stored in ``cache``."""

    @abc.abstractmethod
    def find(self, cache: LayerStorage, aux: Any, step: Step, regions: Regions) -> Selection:
        """Select what a step attends to: sinks, near tokens, and the best searched tokens."""

    @abc.abstractmethod
    def scan_bytes(self, cache: LayerStorage, aux: Any, searched: Array) -> Array:
        """Count the bytes that a step reads to score ``searched`` float32 [B, H] tokens: float32 [B, H]."""

    def near(self, slots: int, room: int) -> Near:
        return Near(first=self.num_sink, newest=self.most_near(slots))

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Any]:
        return cache, self.index(cache)

    def select(self, cache: LayerStorage, aux: Any, step: Step) -> Selection:
        return self.find(cache, aux, step, self.regions(cache, aux))

    def update(self, cache: LayerStorage, aux: Any, step: Step, mass: Array | None) -> tuple[LayerStorage, Any]:
        aux = self.join(aux, cache, step.position)
        return cache, aux if step.select_aux is None else self.joined(aux, step.select_aux)

    def count(self, cache: LayerStorage, aux: Any, shared: Any) -> tuple[Array, Array]:
        stored, _ = count_all(cache)
        regions = self.regions(cache, aux)
        searched = jnp.sum(self._searched(cache, regions), axis=2, dtype=jnp.int32)
        found = jnp.minimum(searched, regions.wanted)
        if regions.found is not None:
            found = jnp.where(regions.found >= 0, regions.found, found)
        attended = stored - searched + found
        return attended, self.scan_bytes(cache, aux, searched.astype(jnp.float32))

    def _searched(self, cache: LayerStorage, regions: Regions) -> Array:
        """Mark the slots that hold a searched token: bool [B, H, S]."""
        slot = jnp.arange(cache.num_slots, dtype=jnp.int32)[None, None]
        return cache.valid & (slot >= self.num_sink) & (slot < regions.near[:, None, None])


@pytree
class ScoredScan(ScanRetrieval):
    """A scan that gives every searched token a score of its own: write ``score`` in place of ``find``.

    A method whose scores of a KV head are -inf outside of ``searched`` and above -inf inside declares
    ``score_is_masked = True``.
    """

    score_is_masked = False

    @abc.abstractmethod
    def score(self, cache: LayerStorage, aux: Any, query: Array, searched: Array) -> Array:
        """Score each slot against the rotated query [B, H, G, D]: float32 [B, H, S], any value outside of ``searched``.

        ``searched`` is bool [B, H, S], and slots outside of it may hold anything, NaN included. The score may also be float32
        [B, H, G, S], for the best slots of each query head: then it is -inf outside of ``searched``, and -inf is never found.
        """

    def find(self, cache: LayerStorage, aux: Any, step: Step, regions: Regions) -> Selection:
        searched = self._searched(cache, regions)
        score = self.score(cache, aux, step.query[..., 0, :], searched)
        each = jnp.ndim(score) == 4
        shape = *searched.shape[:2], *([step.query.shape[2]] if each else []), searched.shape[2]
        score = check_score(self, score, shape, "[B, H, G, S]" if each else "[B, H, S]")
        most = max(min(regions.most_wanted, cache.num_slots), 1)
        if score.ndim == 3:
            if not self.score_is_masked:  # a searched slot must beat all other slots even when its score is -inf
                score = jnp.where(searched, jnp.maximum(score, jnp.finfo(jnp.float32).min), -jnp.inf)
            best, listed = kth_select_mask(score, regions.wanted, most)
            return region_list(cache, self.num_sink, regions, best, listed)
        heads, group = score.shape[1:3]
        wanted = jnp.broadcast_to(jnp.asarray(regions.wanted, jnp.int32), score.shape[:2])
        cut = _cut(score.reshape(len(score), heads * group, -1), jnp.repeat(wanted, group, axis=1), most)
        worst, last = (x.reshape(*score.shape[:3], 1) for x in cut)

        def own(score: Array, slot: Array) -> Array:
            """Mark the slots [B, H, G, K] of these scores that a query head has found."""
            return (score > worst) | ((score == worst) & (slot <= last))

        every = jnp.arange(cache.num_slots, dtype=jnp.int32)[None, None, None]
        best, listed = compact(own(score, every).any(axis=2), min(group * most, cache.num_slots))
        chosen = region_list(cache, self.num_sink, regions, best, listed)
        always = ~at_slots(searched[:, :, None], chosen.slots)
        attended = own(at_slots(score, chosen.slots), chosen.slots[:, :, None]) | always
        bias = jnp.where(attended, 0, -jnp.inf)
        found = jnp.where(step.position >= 0, jnp.sum(listed, axis=2, dtype=jnp.int32), EMPTY)
        return dataclasses.replace(chosen, bias=bias, select_aux=found)


def region_list(cache: LayerStorage, num_sink: int, regions: Regions, best: Array, found: Array) -> Selection:
    """List sinks, the ``best`` slots and near slots in one list for each KV head.

    Args:
        cache: with the step's token.
        num_sink: number of sinks, the first slots.
        regions: the regions of the step.
        best: int32 [B, H, K], searched slots.
        found: bool [B, H, K], False for an entry to ignore.

    Returns:
        The list. If it has as many entries as there are slots, entry i is slot i.
    """
    shape = best.shape[:2]
    sinks = jnp.arange(num_sink, dtype=jnp.int32)[None, None]
    near = jnp.arange(regions.most_near, dtype=jnp.int32)[None, None] + regions.near[:, None, None]
    parts = [jnp.broadcast_to(x, (*shape, x.shape[2])) for x in (sinks, best, near)]
    slots = jnp.concatenate(parts, axis=2)
    mask = jnp.concatenate([jnp.ones_like(parts[0], bool), found, jnp.ones_like(parts[2], bool)], axis=2)
    mask = mask & (slots < cache.cursor[:, None, None])
    slots = jnp.where(mask, slots, 0)
    return shortest(slots, mask & pick(cache.valid, slots), cache.num_slots)


def shortest(slots: Array, mask: Array, size: int) -> Selection:
    """Select the slots int32 [B, H, K] where bool ``mask`` [B, H, K] is true, among ``size`` slots.

    Where a list of all slots is not longer, the result lists all slots: entry i is slot i.
    """
    if slots.shape[2] >= size:
        mask = mask_of(slots, mask, size)
        slots = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None, None], mask.shape)
    return Selection(slots=slots, mask=mask)


def _cut(score: Array, count: Array, capacity: int) -> tuple[Array, Array]:
    """Find the worst of the ``count`` best scores of each row, and the last slot among the best that has this score.

    A mask of the best entries follows from both by comparisons, which write nothing as large as the scores.

    Args:
        score: float32 [B, R, S]; -inf is never among the best.
        count: int32 [B, R].
        capacity: the largest count.

    Returns:
        float32 [B, R] and int32 [B, R]; inf and -1 where there is none.
    """
    score = lax.stop_gradient(score)  # a choice has no slope
    slots, listed = kth_select_mask(score, count, capacity)

    def worse(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
        own = (one[0] < other[0]) | ((one[0] == other[0]) & (one[1] > other[1]))
        return jnp.where(own, one[0], other[0]), jnp.where(own, one[1], other[1])

    # One reduction of pairs is one kernel. A reduction of scores and another of slots would be two, and read the list twice.
    pairs = jnp.where(listed, pick(score, slots), jnp.inf), jnp.where(listed, slots, -1)
    return lax.reduce(pairs, (jnp.float32(jnp.inf), jnp.int32(-1)), worse, (2,))


def at_slots(values: Array, slots: Array) -> Array:
    """Gather values [B, H, G or 1, S] at ``slots`` int32 [B, H, K]: [B, H, G or 1, K]. A slot past the end means the last."""
    return pick_each(values, jnp.minimum(slots, values.shape[3] - 1))


def by_blocks[Made](make: Callable[[Array], Made], key: Array) -> Made:
    """Apply ``make`` to 1,024 keys at a time, which bounds the memory that it needs.

    Args:
        make: from keys [B, H, N, D] to a pytree of [B, H, N, ...]. A key must give the same result at any index.
        key: [B, H, S, D].

    Returns:
        A pytree of [B, H, S, ...].
    """
    slots, size = key.shape[2], min(1024, key.shape[2])
    kinds = jax.eval_shape(make, jax.ShapeDtypeStruct((*key.shape[:2], size, key.shape[3]), key.dtype))
    empty = jax.tree.map(lambda x: jnp.zeros((*x.shape[:2], slots, *x.shape[3:]), x.dtype), kinds)

    def add(number: Array, made: Made) -> Made:
        start = jnp.minimum(number * size, slots - size)  # the last block overlaps the block before it
        new = make(lax.dynamic_slice_in_dim(key, start, size, 2))
        return jax.tree.map(lambda old, x: lax.dynamic_update_slice_in_dim(old, x, start, 2), made, new)

    return lax.fori_loop(0, -(-slots // size), add, empty)
