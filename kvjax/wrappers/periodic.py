"""Eviction that goes on while decoding: `Periodic` evicts again from the kept tokens, every ``interval`` tokens."""

import bisect
import contextlib
import dataclasses
import math
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.moments import Moments, add_queries
from kvjax.cache import LayerCache, LayerStorage
from kvjax.protocol.families import Eviction
from kvjax.protocol.fields import number
from kvjax.protocol.method import LayerMethod, Prompt, Step, num_bytes
from kvjax.protocol.slots import SlotMethod, SlotState, count_all
from kvjax.protocol.typing import EMPTY, not_none, pytree, static, traced
from kvjax.rope import rotate
from kvjax.wrappers.compose import answers, inner_of_layer, slot_method


@pytree
class Recent:
    """The state that `Periodic` keeps in addition to the cache: the record of a prompt, for the newest tokens."""

    since: Array  # int32 [B], tokens that came after the row's last eviction, or after its prompt
    # [B, H, G, N, D], the newest rotated queries; the one at position p is entry p mod N; None if the eviction reads none.
    query: Array | None
    # Of the queries before RoPE up to the row's last eviction, or its prompt's end; None unless the eviction has
    # `Reads.moments_from`. Later ones are in `query` until the next eviction, so that a step does no more than store its own.
    moments: Moments | None


@answers("evict")
@pytree
class Periodic(SlotMethod):
    """Evict again every ``interval`` tokens after the prompt: ``Periodic(evict=SnapKV(budget=2048), interval=128)``.

    Stored: the prompt tokens that ``evict`` keeps, and later tokens as they come, at most ``2 * interval - 1`` beyond the
    budget. Memory is bounded however many tokens follow. After every ``interval`` tokens of a row, ``evict`` scores all
    tokens of this row, from the prompt and later alike, and keeps the ``budget`` best in the same arrays. Its window is then
    the newest tokens, whose queries are kept for it, [B, H, G, W, D] for W = ``obs_window`` of ``evict``. Where ``evict``
    needs the mean or the covariance of queries, the queries of later tokens count too. They are kept until the next eviction
    adds all of them at once: [B, H, G, N, D] for N = ``2 * interval - 1``, or W if that is more.

    Each row counts its own tokens. After all layers of a step, one condition for the whole model asks whether any row is due;
    if so, the eviction computes all rows of all layers and changes the due rows in place. `kvjax.extend` processes at most
    ``interval`` tokens at once, and each such block counts as its tokens.

    With ``ratio`` the cache grows with the text: ``Periodic(evict=SnapKV(), ratio=1/4)`` keeps a quarter of the tokens that a
    row has seen so far, rounded, of its prompt and after every ``interval`` tokens. The budget of ``evict`` then says no more
    than how layers differ. The arrays have room for the ratio of the padded prompt and ``max_new_tokens``; a row that grows
    beyond keeps no more than this.

    ``evict`` is a method that keeps the best tokens of a prompt by a score of the stored tokens and of the newest queries:
    `SnapKV` (then this is SnapKV-D), `PyramidKV`, `AdaKV`, `Knorm`, `ExpectedAttention`, `RKV` with ``interval=None``, and
    an `Eviction` of your own. Three kinds of methods are refused when the wrapper is made (ValueError): methods that keep
    every token, methods that evict while decoding themselves (`H2O`), and methods whose score needs data that is no longer
    there (`ObservedAttention`). Where a score is pooled, a token's neighbours are the tokens in the slots beside it.

    **Source**: Liu et al., "Hold Onto That Thought: Assessing KV Cache Compression On Reasoning" (arXiv:2512.12008), for
    SnapKV-D; NVIDIA/kvpress 0dc3358, DecodingPress, whose ``compression_interval`` and ``target_size`` are ``interval`` and
    ``budget``. A ratio while decoding is asked for in NVIDIA/kvpress#230, as the share that is removed.

    **Departures**: kvpress leaves the prompt whole until the first interval ends, and here ``evict`` compresses it at its
    end. kvpress scores by the queries of the last 256 tokens that came after the last eviction; here ``evict`` scores by as
    many queries as it reads of a prompt, also of tokens before that eviction. kvpress rotates all queries at the newest
    token's position, and here each is rotated at its own. So the two agree under scores of keys alone (`Knorm`), if the
    budget of ``evict`` covers the prompt and leaves it whole, as in kvpress. In kvpress all rows of a batch count together,
    and a question of ``target_size`` tokens or more is followed by an eviction at once; here a question is processed in
    blocks of ``interval`` tokens.
    """

    PAPER: ClassVar[str] = "arXiv:2512.12008"

    evict: SlotMethod = traced("scores the prompt, and later all stored tokens")
    budget: int | Array | None = traced("kept while decoding; None = as `evict`", default=None, least=1, within="capacity")
    capacity: int | None = static("slots allocated for them; None = budget", default=None, least=1)
    interval: int = static("tokens of a row between two evictions", default=128, least=1)
    ratio: float | None = static("share of all tokens seen that is kept, in place of budgets", default=None, above=0, most=1)

    keeps = "the budget of `evict`, and up to `interval` newer tokens"
    evicts = True
    moves_slots = True
    selects = SlotMethod.selects  # it attends to all that `evict` has left
    slot_block = None  # each device would need the slots of all to score them again

    def check(self) -> None:
        name, evict = type(self.evict).__name__, slot_method("Periodic: evict", self.evict)
        if evict.moves_slots:
            raise ValueError(f"Periodic: evict must evict once, at the prompt's end, but {name} evicts while decoding itself")
        if not evict.evicts:
            raise ValueError(f"Periodic: evict must discard tokens, but {name} keeps every token")
        if evict.slots_again() is None:
            raise ValueError(
                f"Periodic: {name} cannot be applied again to what it has kept; evict must score by keys, values and the "
                "newest queries alone"
            )
        if self.capacity is not None and self.budget is None:
            raise ValueError(f"Periodic: budget must be given with capacity, got budget=None, capacity={self.capacity}")
        if self.ratio is not None and self.budget is not None:
            raise ValueError(f"Periodic: ratio must be given without budget, got ratio={self.ratio}, budget={self.budget}")
        _slots(self._later)  # which refuses a budget that `evict` cannot have

    @property
    def _later(self) -> SlotMethod:
        """``evict`` as it is applied while decoding."""
        if self.budget is None:
            return self.evict
        return dataclasses.replace(self.evict, budget=self.budget, capacity=self.capacity)

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        evict, later = (inner_of_layer(method, layer, num_layers) for method in (self.evict, self._later))
        if evict.slots_again() is None:  # a layer that the method leaves as it is
            return evict
        if self.budget is None:
            return Periodic(evict=evict, interval=self.interval, ratio=self._ratio_of(layer, num_layers))
        kept = vars(later)
        return Periodic(evict=evict, budget=kept["budget"], capacity=kept["capacity"], interval=self.interval)

    def _ratio_of(self, layer: int, num_layers: int) -> float | None:
        """Return the ratio of a layer, in proportion to its budget: sizes of arrays follow, so its value must be known."""
        if self.ratio is None:
            return None
        mean = vars(self.evict)["capacity"]
        own = vars(inner_of_layer(_resized(self.evict, mean), layer, num_layers))["budget"]
        if number(own) is None:
            raise ValueError(
                f"Periodic: ratio needs one budget for the heads of a layer, {type(self.evict).__name__} has several"
            )
        return min(1.0, self.ratio * number(own) / mean)

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Recent]:
        if self.ratio is None:
            kept = min(_slots(self.evict), cache.num_slots)
            compressed, _ = self.evict.compress(cache, prompt, min(self.bounded_slots() - kept, room))
        else:
            # What is always kept may be more than the ratio of a short prompt.
            capacity = max(math.ceil(self.ratio * (cache.row_slots + room)), _least_capacity(self.evict))
            slots = _slots(_resized(self.evict, capacity)) + self._most_since
            listed, keep = self._of_ratio(cache, prompt, slots)
            compressed = cache.compact(listed, keep, slots - listed.shape[2])
        batch, heads, group, _, dim = prompt.query.shape
        # With moments there is room for all queries between two evictions.
        entries = self.obs_window if self.reads.moments_from is None else max(self.obs_window, self._most_since)
        recent = Recent(
            since=jnp.zeros((batch,), jnp.int32),
            query=jnp.zeros((batch, heads, group, entries, dim), prompt.query.dtype) if entries else None,
            moments=prompt.moments,
        )
        return compressed, _remember(recent, prompt.query, prompt.query_position)

    def update(self, cache: LayerCache, aux: Recent, step: Step, mass: Array | None) -> tuple[LayerCache, Recent]:
        recent = _remember(aux, step.query, step.position)
        since = recent.since + jnp.sum(step.position >= 0, axis=1, dtype=jnp.int32)
        return cache, dataclasses.replace(recent, since=since)

    def due(self, state: SlotState) -> Array:
        return state.aux.since >= self.interval

    def settle(self, state: SlotState, made: None) -> SlotState:
        due, cache = self.due(state), state.cache.resident()
        newest = cache.position.max(axis=(1, 2))  # this token is still there: no eviction came after it
        recent = _counted(state.aux, newest, due)
        since = jnp.where(due, 0, recent.since)
        return SlotState(cache=self._evicted(cache, recent, newest, due), aux=dataclasses.replace(recent, since=since))

    def count(self, cache: LayerStorage, aux: Recent, shared: Any) -> tuple[Array, Array]:
        """Count all stored slots, and as metadata the queries and the moments, which one step in ``interval`` reads.

        The keys that an eviction reads again, in one step of ``interval``, are not counted.
        """
        stored, _ = count_all(cache)
        moments = None if aux.moments is None else (aux.moments.mean, aux.moments.length, aux.moments.scatter)
        read = num_bytes((aux.query, moments)) / self.interval
        return stored, jnp.full(stored.shape, read / stored.size, jnp.float32)

    def bounded_slots(self) -> int:
        if self.ratio is not None:  # `compress` allocates what no row can fill
            return self._most_since
        return max(_slots(self.evict), _slots(self._later)) + self._most_since

    def max_tokens(self, in_prompt: bool) -> int | None:
        return None if in_prompt else self.interval

    @property
    def _most_since(self) -> int:
        """The most tokens of a row between two evictions."""
        # A block of a question comes before the eviction that its first token may complete.
        return 2 * self.interval - 1

    def _evicted(self, cache: LayerCache, recent: Recent, newest: Array, due: Array) -> LayerCache:
        """Evict in the rows where ``due`` bool [B]; the new cache has as many slots.

        Args:
            newest: int32 [B], position of the newest token.
            due: bool [B].
        """
        position = newest[:, None] + jnp.arange(1 - self.obs_window, 1, dtype=jnp.int32)[None]
        query = jnp.zeros((*cache.position.shape[:2], 1, 0, cache.key.shape[3]), cache.key.dtype)  # of no token
        if recent.query is not None:
            query = _entries(recent.query, position)
        prompt = Prompt(
            query=query,
            query_position=jnp.where(position >= 0, position, EMPTY),
            mass=jnp.zeros((*cache.position.shape[:2], 0), jnp.float32),
            tokens=jnp.zeros((len(due), 0), jnp.int32),
            moments=recent.moments,
            length=newest + 1,
        )
        if self.ratio is None:
            listed = cast("Eviction", self._later).kept(cache, prompt)
        else:
            listed = self._of_ratio(cache, prompt, cache.num_slots)
        return cache.compact_in_place(*listed, due)

    def _of_ratio(self, cache: LayerCache, prompt: Prompt, slots: int) -> tuple[Array, Array]:
        """List the slots that stay, as `Eviction.kept`: the ratio of each row's tokens, for a cache of so many slots."""
        # The largest capacity whose slots, which can be more, have room: `compress` and later evictions find the same.
        least, tokens = _least_capacity(self.evict), slots - self._most_since
        more = bisect.bisect_right(range(least + 1, tokens + 1), tokens, key=lambda x: _slots(_resized(self.evict, x)))
        capacity = least + more
        length = not_none("length", prompt.length).astype(jnp.float32)
        budget = jnp.maximum(jnp.rint(not_none("ratio", self.ratio) * length), 1).astype(jnp.int32)

        def of_row(cache: LayerCache, prompt: Prompt, budget: Array) -> tuple[Array, Array]:  # rows have their own budgets
            cache, prompt = jax.tree.map(lambda x: x[None], (cache, prompt))
            listed, keep = cast("Eviction", _resized(self.evict, capacity, budget)).kept(cache, prompt)
            return listed[0], keep[0]

        return jax.vmap(of_row)(cache, prompt, budget)


@pytree
class PeriodicEviction(Eviction):
    """An `Eviction` that is `Periodic` by itself. Write ``score``."""

    budget: int | Array = traced("tokens kept per KV head by every eviction", default=1024, least=1, within="capacity")
    interval: int | None = static("tokens between evictions; None evicts at the prompt's end alone", default=128, least=1)

    keeps = "`budget` tokens per KV head, and up to `interval` newer ones"

    @property
    def moves_slots(self) -> bool:
        return self.interval is not None

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        if self.interval is None:
            return self
        return Periodic(evict=dataclasses.replace(self, interval=None), interval=self.interval)


def _resized(method: SlotMethod, capacity: int, budget: Array | None = None) -> SlotMethod:
    """Return an eviction with another capacity, and with this budget or the capacity as its budget."""
    return dataclasses.replace(cast("Any", method), budget=capacity if budget is None else budget, capacity=capacity)


def _least_capacity(method: SlotMethod) -> int:
    """Find the smallest capacity that an eviction takes: it may have a window or first tokens that it keeps for certain."""
    for capacity in range(1, vars(method)["capacity"]):
        with contextlib.suppress(ValueError):
            _resized(method, capacity)
            return capacity
    return vars(method)["capacity"]


def _slots(method: SlotMethod) -> int:
    return not_none("slots_again", method.slots_again())


def _remember(recent: Recent, query: Array, position: Array) -> Recent:
    """Add the rotated queries [B, H, G, T, D] at ``position`` int32 [B, T], EMPTY for padding, to ``recent``."""
    if recent.query is None:  # an array without numbers could not be saved
        return recent
    entries = recent.query.shape[3]
    # Of more than N tokens the last N: no two write the same entry. A prompt without a window has no query.
    fresh = (position >= 0) & (position > position.max(axis=1, keepdims=True, initial=EMPTY) - entries)
    entry = jnp.where(fresh, lax.rem(position, entries), entries)  # an entry N is dropped
    row = jnp.arange(len(position))[:, None]
    kept = recent.query.at[row, :, :, entry].set(jnp.moveaxis(query, 3, 1), mode="drop", wrap_negative_indices=False)
    return dataclasses.replace(recent, query=kept)


def _counted(recent: Recent, newest: Array, due: Array) -> Recent:
    """Add the queries since the last eviction to the moments of ``recent``, in the rows where ``due`` bool [B].

    Args:
        newest: int32 [B], position of the newest token.
        due: bool [B]; other rows keep their moments to the bit, as rows of padding do.
    """
    if recent.moments is None:
        return recent
    ring, inv_freq = not_none("query", recent.query), recent.moments.inv_freq[0]
    age = jnp.arange(ring.shape[3], dtype=jnp.int32)[None]
    position = jnp.where(age < jnp.where(due, recent.since, 0)[:, None], newest[:, None] - age, EMPTY)
    # The entries are taken out of the ring, although their order does not matter for the sums. Otherwise XLA would sum the
    # ring along another axis of memory than a step writes, and transpose all of the ring in every step.
    query = _entries(ring, position)
    query = rotate(query.astype(jnp.float32), -position[:, None, None], inv_freq)  # as before RoPE
    return dataclasses.replace(recent, moments=add_queries(recent.moments, query, position, inv_freq))


def _entries(query: Array, position: Array) -> Array:
    """Take the queries [B, H, G, T, D] at ``position`` int32 [B, T] from the ring ``query``; any query where EMPTY."""
    entry = lax.rem(jnp.maximum(position, 0), query.shape[3])
    return jax.vmap(lambda query, entry: query.at[:, :, entry].get(wrap_negative_indices=False))(query, entry)
