"""Methods with exact attention over slots of a `LayerCache`: `SlotMethod`, and `BoundedSlots` for bounded storage.

Both store keys rotated at their true positions, and share one `attend` (`SlotAttention`). They differ in the prompt: a
`SlotMethod` attends to it densely and compresses at its end, while `BoundedSlots` evicts during prefill.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, cast

import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.moments import add_queries, no_moments
from kvjax.attention.over_cache import Selection, attend_selected, attend_stored, attend_whole, mass_of
from kvjax.attention.sinks import with_sinks
from kvjax.attention.sparse import SparsePrompt
from kvjax.cache import LayerCache, LayerSpec, LayerStorage
from kvjax.cache.divided import attend_past, part_slots, total
from kvjax.cache.offload import Near, empty_storage, offload
from kvjax.cache.packed_keys import ThinCache
from kvjax.cache.quantised import empty_resident
from kvjax.protocol.fields import clamped, is_traced, known
from kvjax.protocol.method import Cost, Inputs, LayerMethod, Prompt, Step, free_slots
from kvjax.protocol.typing import EMPTY, not_none, pytree, static, traced
from kvjax.rope import rotate
from kvjax.selection import check_alike, check_score, top_slots
from pallas_kernels.attend.prefix_attention import prefix_attention


@pytree
class SlotState:
    """The state of a slot method: exact storage, the method's metadata, and a record of the prompt until its end."""

    cache: LayerStorage
    aux: Any = None
    prompt: Prompt | None = None


@dataclasses.dataclass(frozen=True)
class Reads:
    """What `SlotMethod.compress` gets of a prompt besides its last queries; see `kvjax.protocol.method.Prompt`."""

    mass: bool = False  # the attention probability that each slot received
    tokens: bool = False  # token ids
    moments_from: int | None = None  # first position whose queries' moments it gets; None for no moments
    covariance: bool = False  # whether the moments include the covariance, not the means alone

    def __or__(self, other: Reads) -> Reads:
        """Read what either reads; of two first positions of moments this one's."""
        first = other.moments_from if self.moments_from is None else self.moments_from
        covariance = self.covariance or other.covariance
        return Reads(self.mass or other.mass, self.tokens or other.tokens, first, covariance)


class SlotAttention(LayerMethod):
    """The parts that all slot methods share: storing tokens, attention, accounting. See `SlotMethod` and `BoundedSlots`.

    A decode step appends its token and attends to the slots that `select` returns; then `update` maintains metadata or
    evicts. Several tokens at once after the prompt (`extend`) attend densely to all stored tokens.
    """

    # What the class needs or does. Wrappers answer with properties, so the declarations are no dataclass fields.
    lacks: tuple[str, ...] = ()
    obs_window = 0  # the number of the prompt's last queries that `compress` gets
    reads = Reads()  # what `compress` gets of the prompt besides
    observes = 0  # `update` gets the attention mass of its tokens if there are at least so many; 0: never
    asks_ends = False  # True: the mass of a pass (`kvjax.Verified`) comes from its first and its last token
    moves_slots = False  # True: `update` moves slots, so no index of another method may point to them
    packs = False  # True: `compress` returns a `kvjax.cache.packed_keys.ThinCache`, whose keys have other channels
    sparse_prompt: SparsePrompt | None = None  # sparse attention over the prompt; None means dense attention

    @property
    def selects(self) -> bool:
        """Whether `select` is written; otherwise each step attends to all stored slots."""
        return type(self).select is not SlotAttention.select

    def select(self, cache: LayerStorage, aux: Any, step: Step) -> Selection | None:
        """Select the slots that one decode step (T = 1) attends to; None, the default, means all.

        The new token is stored already.
        """
        return None

    @abc.abstractmethod
    def update(self, cache: Any, aux: Any, step: Step, mass: Array | None) -> tuple[Any, Any]:
        """Update metadata or evict, after the new tokens were stored and have attended.

        Args:
            cache: with the new tokens.
            aux: metadata, as `compress` or the last `update` returned it.
            step: the new tokens.
            mass: float32 [B, H, S], attention probability that each slot received from the new tokens, summed over tokens
                and group; None unless the method `observes` so few tokens.

        Returns:
            The cache and the metadata.
        """

    @abc.abstractmethod
    def count(self, cache: LayerStorage, aux: Any, shared: Any) -> tuple[Array, Array]:
        """Count the slots that a decode step attends to, int32 [B, H], and metadata bytes that it reads, float32 [B, H]."""

    def drafted(self, before: Any, after: Any) -> Any:
        """Return metadata for the tokens that Full reads after this method has drafted them (`kvjax.Verified`).

        The default is the metadata from ``before`` the drafted tokens. A method may return the metadata ``after`` them, which
        spares a copy of all metadata, if `update` of the pass makes anew what belongs to the drafted slots.
        """
        return before

    def counters(self, aux: Any, shared: Any) -> dict[str, Array]:
        """Return statistics of the run so far, float32 [B] each; see `Cost`. By default there are none."""
        return {}

    def bounded_slots(self) -> int | None:
        """Return the slots of bounded storage, scratch included; None, the default, if storage grows with the tokens."""
        return None

    def gap(self, aux: Any) -> Array | None:
        """Return a range of empty slots of each KV head that a step need not read, int32 [B, H, 2]; None if there is none."""
        return None

    def attend(self, state: SlotState, inputs: Inputs) -> tuple[Array, SlotState]:
        if state.prompt is not None:
            return self._read(state, state.prompt, inputs)
        query, cache = inputs.append_to(state.cache)
        step, single = _step(query, inputs), inputs.query.shape[3] == 1
        chosen = self.select(cache, state.aux, step) if single else None
        if chosen is None:
            gap = self.gap(state.aux) if single else None
            observes = 0 < self.observes <= inputs.query.shape[3]
            out, mass = attend_stored(query, cache, inputs.position, observes, gap, inputs.sinks)
        else:
            step = dataclasses.replace(step, select_aux=chosen.select_aux)
            out, lse = attend_selected(query[..., 0, :], cache, chosen)
            out, lse = with_sinks(out, lse, inputs.sinks)
            mass = mass_of(query, cache, inputs.position, lse[..., None]) if self.observes == 1 else None
        seen = cache if single else cache.resident()  # `update` may need keys that have no copies on the device
        out = out.reshape(inputs.query.shape)
        # Metadata is read before it is written, and so is a cache that gives up a token. Without a barrier XLA copies them.
        if self.bounded_slots() is not None:
            out, cache = lax.optimization_barrier((out, cache))
            seen = cache
        out, aux = lax.optimization_barrier((out, state.aux))
        changed, aux = self.update(seen, aux, step, mass)
        check_alike(self, "update", state.aux, aux)
        return out, SlotState(cache=changed if seen is cache else cache, aux=aux)

    def _read(self, state: SlotState, prompt: Prompt, inputs: Inputs) -> tuple[Array, SlotState]:
        """Attend with a prompt chunk: causally, and densely unless there is a `sparse_prompt`."""
        start, sparse = not_none("start", inputs.start), self.sparse_prompt
        (query, key), value = inputs.rotated(), inputs.value
        cache = state.cache.append(key, value, inputs.position, start)
        real = jnp.sum(inputs.position >= 0, axis=1, dtype=jnp.int32)
        mass = None
        if sparse is not None and not sparse.covers(cache.num_slots):
            read = cache.resident()
            stored = cache.read_back(key, value) if isinstance(start, int) else (read.key, read.value)
            out, lse = sparse.attend(query, *stored, start, real)
            out, lse = with_sinks(out, lse, inputs.sinks)
        elif isinstance(start, int) and not self.reads.mass:  # no earlier chunk, so a fused kernel can do it
            out = attend_whole(query, *cache.read_back(key, value), inputs.position, inputs.sinks)
        elif cache.parts > 1:
            out, lse = attend_past(query, *cache.read_back(key, value), cache, inputs.position)
            out, lse = with_sinks(out, lse, inputs.sinks)
            if self.reads.mass:
                mass = mass_of(query, cache, inputs.position, lse, limit=start + query.shape[3] - cache.first)
        else:
            read = cache.resident()
            # Storage has room for whole chunks, so one that takes most of it is the whole prompt (`start` may be traced).
            # As it is given, methods that store it differently attend to it once.
            whole = 2 * query.shape[3] > cache.num_slots
            stored = cache.read_back(key, value) if whole else (read.key, read.value)
            out, lse = prefix_attention(query, *stored, start=start, length=real, scale=1 / math.sqrt(query.shape[-1]))
            out, lse = with_sinks(out, lse, inputs.sinks)
            if self.reads.mass:  # no query of this chunk sees slots after the chunk
                mass = mass_of(query, cache, inputs.position, lse, limit=start + query.shape[3])
        prompt = _observe(prompt, query, inputs, start, mass)
        return out.reshape(inputs.query.shape), SlotState(cache=cache, prompt=prompt)

    def chosen(self, state: SlotState, inputs: Inputs) -> Array:
        query, key = inputs.rotated()
        cache = state.cache.append(key, inputs.value, inputs.position)
        chosen = self.select(cache, state.aux, _step(query, inputs))
        if chosen is None:
            return cache.position
        slots, mask = chosen.tokens(cache)
        return jnp.where(mask, jnp.take_along_axis(cache.position, slots, axis=2), EMPTY)

    def cost(self, state: SlotState, shared: Any) -> Cost:
        cache = state.cache
        slots, metadata = self.count(cache, state.aux, shared)
        attended = slots.astype(jnp.float32)
        crossing = jnp.maximum(attended - cache.copied().astype(jnp.float32)[:, None], 0)
        spared, channels = (0, 0) if cache.older is None else cast("ThinCache", cache).packed_bytes()
        return Cost(
            attended=attended.mean(axis=1),
            kv_bytes=attended.sum(axis=1) * cache.slot_bytes - spared,
            metadata_bytes=metadata.sum(axis=1) + channels,
            bus_bytes=crossing.sum(axis=1) * cache.slot_bus_bytes,
            counters=self.counters(state.aux, shared),
        )

    def room(self, state: SlotState) -> Array | None:
        return free_slots(state.cache, self.bounded_slots())


@pytree
class SlotMethod(SlotAttention):
    """Exact attention over chosen slots. Write ``compress``, ``update``, ``count``, and mostly ``select``.

    Prompt chunks attend densely and exactly. At the prompt's end `compress` may remove slots.
    """

    composable = True
    slotted = True
    dense_prompt = True
    common_prompt = True
    keys_stay = False  # True: all keys of an offloaded cache are on the device, because `select` reads them

    @abc.abstractmethod
    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[Any, Any]:
        """Make the cache to keep at the prompt's end and metadata. A cache with fewer slots needs ``room`` free slots."""

    def near(self, slots: int, room: int) -> Near:
        """Say which of ``slots`` slots of an offloaded cache have copies on the device; ``room`` more tokens may follow."""
        return Near()

    def slots_again(self) -> int | None:
        """Return the most slots per KV head that `compress` leaves, if `Periodic` may apply it again while decoding.

        Only a `kvjax.protocol.families.Eviction` can be, whose ``kept`` needs nothing of the prompt but the last queries and
        their moments. Given at least this number of slots, it leaves this number. None, the default, if it cannot be.
        """
        return None

    def init(self, spec: LayerSpec) -> SlotState:
        slots = part_slots(spec, spec.prompt_slots + (0 if self.evicts else spec.max_new_tokens), self.slot_block)
        cache, reads = empty_storage(spec, slots, values_only=self.keys_stay), self.reads
        group, dim = (spec.batch, spec.num_kv_heads, spec.group_size), spec.head_dim
        record = Prompt(
            query=jnp.zeros((*group, self.obs_window, dim), spec.dtype),
            query_position=jnp.full((spec.batch, self.obs_window), EMPTY, jnp.int32),
            mass=jnp.zeros((spec.batch, spec.num_kv_heads, slots if reads.mass else 0), jnp.float32),
            tokens=jnp.zeros((spec.batch, cache.row_slots if reads.tokens else 0), jnp.int32),
            moments=None if reads.moments_from is None else no_moments(*group, dim, reads.moments_from, reads.covariance),
        )
        return SlotState(cache=cache, prompt=record)

    def finish(self, state: SlotState, spec: LayerSpec) -> SlotState:
        if state.prompt is None:
            return state
        whole, rows = state.cache.resident(), state.cache.rows
        prompt = dataclasses.replace(state.prompt, length=whole.cursor)
        cache, aux = self.compress(whole, prompt, spec.max_new_tokens)
        if spec.offloaded:
            near = self.near(cache.num_slots, spec.max_new_tokens)
            # If the whole prompt is kept, its rows may be in host memory already.
            host = rows.host if rows is not None and cache is whole else None
            cache = offload(cache, near, host=host, values_only=self.keys_stay)
        return SlotState(cache=cache, aux=aux)


@pytree
class BoundedSlots(SlotAttention):
    """Storage for ``budget`` tokens per KV head and one more block. Write ``score``.

    Prefill runs in blocks. A block is appended and attends to all stored tokens; then the cache is cut back to the
    budget. A decode step does the same with a block of one token.
    """

    budget: int | Array = traced("tokens kept per KV head", default=1024, least=1, within="capacity")
    capacity: int = static("slots allocated for them; None = budget", default=None, least=1)
    block: int = static("prompt tokens processed between evictions", default=128, least=1)

    keeps = "`budget` tokens per KV head"
    evicts = True
    moves_slots = True

    @abc.abstractmethod
    def score(self, cache: LayerCache) -> Array:
        """Score each stored token: float32 [B, H, S]; the tokens of lowest score are evicted."""

    def init(self, spec: LayerSpec) -> SlotState:
        slots = min(self.bounded_slots(), spec.prompt_slots + spec.max_new_tokens)
        return SlotState(cache=empty_resident(spec, slots))

    def update(self, cache: LayerCache, aux: Any, step: Step, mass: Array | None) -> tuple[LayerCache, Any]:
        score = check_score(self, self.score(cache), cache.valid.shape, "[B, H, S]")
        if step.position.shape[1] == 1:
            return cache.evict(score, budget=self.budget)[0], None
        slots, keep = top_slots(score, cache.valid, self.budget, self.capacity)
        return cache.compact_in_place(slots, keep), None

    def count(self, cache: LayerStorage, aux: Any, shared: Any) -> tuple[Array, Array]:
        return count_all(cache)

    def bounded_slots(self) -> int:
        return self.capacity + self.block

    def max_tokens(self, in_prompt: bool) -> int:
        return self.block


def count_all(cache: LayerStorage) -> tuple[Array, Array]:
    """Compute `SlotMethod.count` of a method that attends to every stored slot and reads no metadata."""
    stored = total(jnp.sum(cache.valid, axis=2, dtype=jnp.int32), cache)
    return stored, jnp.zeros(stored.shape, jnp.float32)


def new_slots(cache: LayerStorage, position: Array) -> Array:
    """Return the slots of the tokens at ``position`` int32 [B, T] that were just stored: int32 [B, T]; padding gets S."""
    real = position >= 0
    order = jnp.arange(real.shape[1], dtype=jnp.int32)[None] - jnp.sum(real, axis=1, dtype=jnp.int32)[:, None]
    return jnp.where(real, cache.cursor[:, None] + order, cache.num_slots)


def newest_query(step: Step, before: Array) -> Array:
    """Return the query of each row's last token [B, H, G, D]; ``before`` in rows where the step has only padding."""
    real = jnp.sum(step.position >= 0, axis=1, dtype=jnp.int32)
    last = jnp.maximum(real - 1, 0)[:, None, None, None, None]
    query = jnp.take_along_axis(step.query, last, axis=3)[..., 0, :]
    return jnp.where((real > 0)[:, None, None, None], query, before)


def cost_of_all(cache: LayerStorage) -> Cost:
    """Compute `LayerMethod.cost` of a method that attends to every stored slot and reads no metadata."""
    stored, metadata = count_all(cache)
    tokens = stored.astype(jnp.float32)
    row = cache.slot_bytes
    return Cost(
        attended=tokens.mean(axis=1), kv_bytes=tokens.sum(axis=1) * row, metadata_bytes=metadata.sum(axis=1), counters={}
    )


def check_budget(method: Any, least: int, needs: str) -> None:
    """Refuse a ``budget`` of fewer than ``least`` tokens; a traced budget becomes ``least``. For `Method.check`.

    Args:
        method: has a field ``budget``.
        least: tokens.
        needs: the reason for ``least``, for the message.

    Raises:
        ValueError: the budget is too small, or the ``capacity`` of a traced budget is.
    """
    name = "capacity" if is_traced(method.budget) else "budget"
    value = known(vars(method)[name])
    if value is not None and value.min() < least:
        who = type(method).__name__
        raise ValueError(f"{who}: {name} must be a whole number of at least {least} tokens ({needs}), got {value}")
    object.__setattr__(method, "budget", clamped(method.budget, least, None))


def _step(query: Array, inputs: Inputs) -> Step:
    """Build the step of a rotated ``query`` [B, H, G, T, D]."""
    guess = inputs.guess
    if guess is not None:
        guess = rotate(guess, inputs.position[:, None, None], inputs.inv_freq)
    return Step(
        query=query, position=inputs.position, tokens=inputs.tokens, shared=inputs.shared, guess=guess, signal=inputs.signal
    )


def _observe(prompt: Prompt, query: Array, inputs: Inputs, start: Array | int, mass: Array | None) -> Prompt:
    """Record a prompt chunk: the last W real queries of each row so far, token ids, attention mass, moments of queries."""
    window, position = prompt.query.shape[3], inputs.position
    if prompt.tokens.shape[1]:
        tokens = lax.dynamic_update_slice_in_dim(prompt.tokens, inputs.tokens, start, 1)
        prompt = dataclasses.replace(prompt, tokens=tokens)
    if window:
        queries = jnp.concatenate([prompt.query, query], axis=3)
        positions = jnp.concatenate([prompt.query_position, position], axis=1)
        # Real tokens stand before padding, so the window ends at the chunk's last real token.
        first = jnp.sum(position >= 0, axis=1)[:, None] + jnp.arange(window)[None]
        prompt = dataclasses.replace(
            prompt,
            query=jnp.take_along_axis(queries, first[:, None, None, :, None], axis=3),
            query_position=jnp.take_along_axis(positions, first, axis=1),
        )
    if mass is not None:
        prompt = dataclasses.replace(prompt, mass=prompt.mass + mass)
    if prompt.moments is not None:
        prompt = dataclasses.replace(prompt, moments=add_queries(prompt.moments, inputs.query, position, inputs.inv_freq))
    return prompt
