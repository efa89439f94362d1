"""InfLLM: older tokens form blocks; each chunk selects blocks by a few representative keys, and attends to a local window.

Stored: all keys **before** RoPE, and all values; for each block one representative per query head; for each token that is in
no block yet, the attention that it has received so far, per query head. A row of n tokens falls into four parts::

    [ num_sink sinks | blocks of block_size tokens | fewer than block_size tokens | num_local newest tokens ]

A chunk of queries attends to all tokens outside the blocks, and to the ``budget / block_size`` blocks with the best scores,
under one softmax. Keys nearer than ``num_local`` tokens have their true distance. All farther keys have the distance
``num_local - 1``: they are not rotated, and the query is rotated to that position. So no larger distance occurs, and a text
can be longer than the trained length. While a key is near, it collects the attention that each query head pays to it. When a
block is complete, the mean of the ``num_repr`` keys that collected most is its representative r::

    qbar[h, g] = mean over the chunk's queries i of rope(q[i, h, g], num_local - 1)
    s[block] = sum over all query heads (h, g) of  r[h, g, block] . qbar[h, g]

All heads of a layer select the same blocks. The prompt is prefilled in chunks of ``chunk`` tokens; in decoding a chunk is one
query. In decoding, the representative of a block is computed after the layers of the step that completes the block.

**Source**: Xiao et al., "InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context Memory"
(arXiv:2402.04617, section 3); thunlp/InfLLM 12b7079 for the sizes, the parts of a row, and the distance.

**Departures**: collected attention is float32, not in the dtype of the model. Query heads do not choose blocks of their own
(the code's option "perhead"). With ``offload`` all blocks are in host memory, without a cache of those that were read lately,
and each chunk of a prompt copies the whole layer to the device. The paper ranks the keys of a block by the mean of their
logits; the code and this method rank by the sum of their probabilities. In the code, the chunk's queries that are still near
to a token attend to it twice, if it leaves the window within that chunk of the prompt; here once.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.sinks import with_sinks
from kvjax.cache import LayerSpec, LayerStorage
from kvjax.cache.offload import Near, empty_storage, offload
from kvjax.methods.budgets import SHARE, ends
from kvjax.protocol.method import Cost, Inputs, LayerMethod
from kvjax.protocol.slots import check_budget
from kvjax.protocol.typing import EMPTY, pytree, static, traced
from kvjax.rope import rotate
from pallas_kernels import axes
from pallas_kernels.attend.dense_attention import dense_attention
from pallas_kernels.attend.gather_attention import gather_attention
from pallas_kernels.choose.kth_select import kth_select_mask
from pallas_kernels.host import take_rows
from pallas_kernels.numerics import merge_pair
from pallas_kernels.score.column_mass import column_mass


@pytree
class BlockState:
    """Un-rotated storage, and the index that selects blocks; W is ``num_local + block_size``."""

    cache: LayerStorage
    representative: Array  # [B, H, G, N, D], of each complete block
    received_ring: Array  # float32 [B, H, G, W], attention that the newest W tokens have received; slot s at s mod W
    due: Array  # bool [B], whether the last step completed a block whose representative is not made yet


@pytree
class Block:
    """A block that is complete, and the attention that its keys have received."""

    key: Array  # [B, H, block_size, D]
    received: Array  # float32 [B, H, G, block_size]


@pytree
class Places:
    """What a chunk attends to: tokens at one distance, and the consecutive tokens that some window of the chunk reaches."""

    far: Array  # int32 [B, F], slots
    far_used: Array  # bool [B, F]
    near: Array  # int32 [B, num_local - 1 + T], slots; the first query's window ends T - 1 entries before the last
    near_used: Array  # bool, the same shape
    query: Array  # [B, H, G, T, D], rotated to position num_local - 1


@pytree
class InfLLM(LayerMethod):
    """Blocks chosen by representative keys, and a local window; see the module docstring."""

    budget: int | Array = traced("tokens of the chosen blocks, in whole blocks", default=2048, least=1, within="capacity")
    capacity: int = static("tokens allocated for them; None = budget", default=None, least=1)
    num_sink: int = static("first tokens, always attended", default=128, least=0)
    num_local: int = static("newest tokens, always attended, at their true distances", default=4096, least=1)
    block_size: int = static("tokens per block", default=128, least=1)
    chunk: int = static("prompt tokens that share one choice of blocks, at most num_local", default=512, least=1)
    offload: bool | float = static("rows in host memory; a number: share of the layers", default=False, least=0, most=1)

    PAPER: ClassVar[str] = "arXiv:2402.04617"
    num_repr = 4  # keys of a block whose mean represents it

    extrapolates = True
    moves_slots = False
    lacks = ()

    @classmethod
    def at_length(cls, length: int) -> tuple[dict[str, Any], str]:
        total, sinks, local = ends(length, 128, 4096)
        if total >= 128 + 4096 + 2048:
            return {}, ""
        block = max(size for size in (8, 16, 32, 64, 128) if size == 8 or 4 * size <= total)
        knobs = {"num_sink": sinks, "num_local": local, "chunk": min(512, local), "block_size": block}
        blocks = f"; blocks of {block} tokens" if block < 128 else ""
        note = f"1/{SHARE} of the context, sinks and recent tokens too{blocks}"
        return {**knobs, "budget": total - sinks - local}, note

    def check(self) -> None:
        check_budget(self, self.block_size, f"one block of block_size={self.block_size}")
        if self.num_repr > self.block_size:
            raise ValueError(f"InfLLM: block_size must be at least {self.num_repr}, got {self.block_size}")
        if self.chunk > self.num_local:
            raise ValueError(f"InfLLM: chunk must be at most num_local={self.num_local}, got {self.chunk}")

    def init(self, spec: LayerSpec) -> BlockState:
        slots = spec.prompt_slots + spec.max_new_tokens
        heads = spec.batch, spec.num_kv_heads, spec.group_size
        blocks = max((slots - self.num_sink - self.num_local) // self.block_size, 1)
        return BlockState(
            cache=empty_storage(spec, slots),
            representative=jnp.zeros((*heads, blocks, spec.head_dim), spec.dtype),
            received_ring=jnp.zeros((*heads, self.num_local + self.block_size), jnp.float32),
            due=jnp.zeros((spec.batch,), bool),
        )

    def attend(self, state: BlockState, inputs: Inputs) -> tuple[Array, BlockState]:
        cache = state.cache.append(inputs.key, inputs.value, inputs.position, inputs.start)
        one = inputs.query.shape[3] == 1 and inputs.start is None  # a prompt chunk can be one token
        places = self._places(state, inputs)
        if one:
            out, lse, logits = self._attend_one(cache, places, inputs)
            return out, self._noted_one(state, cache, lse, logits, inputs)
        read = cache.resident()
        out, mass = self._attend(read, places, inputs)
        return out, self._noted(state, cache, read, mass, inputs)

    def finish(self, state: BlockState, spec: LayerSpec) -> BlockState:
        if not spec.offloaded:
            return state
        near, rows = Near(first=self.num_sink, newest=self.num_local + self.block_size), state.cache.rows
        cache = offload(state.cache.resident(), near, host=None if rows is None else rows.host)
        return dataclasses.replace(state, cache=cache)

    def due(self, state: BlockState) -> Array | None:
        never = state.cache.num_slots < self.num_sink + self.num_local + self.block_size
        return None if never else state.due

    def excerpt(self, state: BlockState) -> Block:
        first = self.num_sink + self._newest_block(state) * self.block_size
        slot = first[:, None] + jnp.arange(self.block_size, dtype=jnp.int32)[None]
        # The block's last token has just left the window. In rows without a complete block these are any tokens.
        received = _of_slots(state.received_ring, lax.rem(slot, state.received_ring.shape[3]))
        return Block(key=state.cache.keys_at(slot), received=received)

    def rework(self, excerpt: Block) -> Array:
        """Compute the representative of the block: [B, H, G, D]."""
        return self._represent(excerpt.key, excerpt.received[..., None, :])[..., 0, :]

    def settle(self, state: BlockState, made: Array) -> BlockState:
        number = jnp.where(state.due, self._newest_block(state), state.representative.shape[3])
        return dataclasses.replace(
            state,
            representative=_put(state.representative, made[..., None, :], number[:, None]),
            due=jnp.zeros_like(state.due),
        )

    def chosen(self, state: BlockState, inputs: Inputs) -> Array:
        places = self._places(state, inputs)
        slots = jnp.concatenate([places.far, places.near], axis=1)
        used = jnp.concatenate([places.far_used, places.near_used], axis=1)
        return jnp.broadcast_to(jnp.where(used, slots, EMPTY)[:, None], (*inputs.key.shape[:2], slots.shape[1]))

    def cost(self, state: BlockState, shared: None) -> Cost:
        tokens, representative = state.cache.cursor, state.representative
        blocks = self._blocks(jnp.maximum(tokens - 1, 0))
        left_out = jnp.maximum(blocks - self.budget // self.block_size, 0) * self.block_size
        attended = (tokens - left_out).astype(jnp.float32)
        heads = state.cache.position.shape[1]
        far = jnp.maximum(attended - state.cache.copied().astype(jnp.float32), 0)  # without a copy on the device
        size = representative.dtype.itemsize * math.prod((*representative.shape[1:3], representative.shape[4]))
        return Cost(
            attended=attended,
            kv_bytes=attended * (heads * state.cache.slot_bytes),
            metadata_bytes=blocks.astype(jnp.float32) * size + state.received_ring[0].size * 4,
            bus_bytes=far * (heads * state.cache.slot_bus_bytes),
            counters={},
        )

    def max_tokens(self, in_prompt: bool) -> int:
        return self.chunk

    def _blocks(self, tokens: Array) -> Array:
        """Count the complete blocks of rows of ``tokens`` int32 [B]: int32 [B]."""
        return lax.div(jnp.maximum(tokens - self.num_sink - self.num_local, 0), self.block_size)

    def _places(self, state: BlockState, inputs: Inputs) -> Places:
        """Choose blocks for a chunk that follows the tokens of ``state``."""
        before, real = state.cache.cursor[:, None], inputs.position >= 0
        size, tokens, count = self.block_size, inputs.query.shape[3], self._blocks(state.cache.cursor)[:, None]
        query = rotate(inputs.query, jnp.full((1,), self.num_local - 1, jnp.int32), inputs.inv_freq)
        # A mean selects like the sum. The selection of a row without a token does not matter.
        asked = query if tokens == 1 else jnp.where(real[:, None, None, :, None], query, 0)
        asked = asked.sum(axis=3, dtype=jnp.float32)
        score = jnp.einsum("bhgd,bhgnd->bn", asked, state.representative.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        number = jnp.arange(score.shape[1], dtype=jnp.int32)[None]
        score = jnp.where(number < count, axes.total(score), -jnp.inf)[:, None]
        most = min(self.capacity // size, score.shape[2])
        best, found = (x[:, 0] for x in kth_select_mask(score, self.budget // size, most))
        inside = jnp.arange(size, dtype=jnp.int32)[None]
        blocks = (self.num_sink + best[..., None] * size + inside[None]).reshape(len(before), -1)
        sinks = jnp.broadcast_to(jnp.arange(self.num_sink, dtype=jnp.int32)[None], (len(before), self.num_sink))
        far = jnp.concatenate([sinks, blocks, self.num_sink + count * size + inside], axis=1)
        chosen = jnp.repeat(found, size, axis=1)
        listed = jnp.concatenate([jnp.ones_like(sinks, bool), chosen, jnp.ones((len(before), size), bool)], axis=1)
        listed = listed & (far <= before - self.num_local)
        near = before - self.num_local + 1 + jnp.arange(self.num_local - 1 + tokens, dtype=jnp.int32)[None]
        present = (near >= 0) & (near < before + jnp.sum(real, axis=1, dtype=jnp.int32)[:, None])
        return Places(
            far=jnp.where(listed, far, 0), far_used=listed, near=jnp.where(present, near, 0), near_used=present, query=query
        )

    def _attend_one(self, cache: LayerStorage, places: Places, inputs: Inputs) -> tuple[Array, ...]:
        """Attend with one token, as `_attend`. The query is at ``num_local - 1`` for near keys too, at positions before it.

        Returns:
            The output [B, H, G, 1, D], the log of the softmax denominator float32 [B, H, G], and the logits of the near
            tokens, float32 [B, H, G, num_local], -inf where there is none.
        """
        used = jnp.concatenate([places.far_used, places.near_used], axis=1)
        every = jnp.concatenate([jnp.zeros(places.far.shape[1:], jnp.int32), jnp.arange(self.num_local, dtype=jnp.int32)])
        out, lse, logits = gather_attention(
            places.query[..., 0, :], *cache.stored, jnp.concatenate([places.far, places.near], axis=1)[:, None],
            used[:, None], scale=1 / math.sqrt(inputs.query.shape[-1]), place=jnp.broadcast_to(every, used.shape)[:, None],
            inv_freq=inputs.inv_freq, rows=cache.rows, logits=True,
        )  # fmt: skip
        out, lse = with_sinks(out, lse, inputs.sinks)
        return out[..., None, :], lse, logits[..., places.far.shape[1] :]

    def _attend(self, cache: LayerStorage, places: Places, inputs: Inputs) -> tuple[Array, Array]:
        """Attend with a chunk: output [B, H, G, T, D]; mass of each near token, float32 [B, H, G, num_local - 1 + T]."""
        tokens, window, count = inputs.query.shape[3], self.num_local, places.near.shape[1]
        heads, real, scale = inputs.key.shape[:2], inputs.position >= 0, 1 / math.sqrt(inputs.query.shape[-1])
        shift, slot = (jnp.arange(n, dtype=jnp.int32) for n in (tokens, count))  # places of queries and of near tokens
        far_key, far_value, near_key, near_value = (
            take_rows(x, slots[:, None]) for slots in (places.far, places.near) for x in (cache.key, cache.value)
        )
        # The first near tokens leave the windows of later queries. They are keys a second time, at the one distance.
        leaving = tokens - 1
        far_place = [jnp.where(places.far_used, 0, EMPTY), jnp.where(places.near_used, slot + 1, EMPTY)[:, :leaving]]
        far = dense_attention(
            places.query,
            jnp.concatenate([far_key, near_key[:, :, :leaving]], axis=2),
            jnp.concatenate([far_value, near_value[:, :, :leaving]], axis=2),
            query_position=jnp.where(real, shift, EMPTY),
            key_position=_of_heads(jnp.concatenate(far_place, axis=1), heads),
            scale=scale,
        )
        query = rotate(inputs.query, window - 1 + shift, inputs.inv_freq)
        near_key, last = rotate(near_key, slot, inputs.inv_freq), jnp.where(real, window - 1 + shift, EMPTY)
        near_place = _of_heads(jnp.where(places.near_used, slot, EMPTY), heads)
        near = dense_attention(
            query, near_key, near_value, query_position=last, key_position=near_place,
            query_first=jnp.broadcast_to(shift, real.shape), scale=scale,
        )  # fmt: skip
        out, lse = with_sinks(*merge_pair(*near, *far), inputs.sinks)
        mass = [_mass(query, near_key[:, :, leaving:], lse, last, near_place[..., leaving:])]
        if leaving:  # a query sees of these tokens its own and all later ones: in the other order, a causal mask
            before = jnp.where(real, leaving - shift, EMPTY)
            place = jnp.where(near_place >= 0, leaving - slot, EMPTY)[..., :leaving]
            mass.insert(0, _mass(query, near_key[:, :, :leaving], lse, before, place))
        return out, jnp.concatenate(mass, axis=3)

    def _noted_one(self, state: BlockState, cache: LayerStorage, lse: Array, logits: Array, inputs: Inputs) -> BlockState:
        """Update the state after a step with the results of `_attend_one`; `settle` does the rest.

        ``inputs`` tells a row's token: reading the cursor of ``state`` here would make XLA copy it.
        """
        width, real = state.received_ring.shape[3], inputs.position[:, 0] >= 0
        # In tokens; 0 for the new one.
        age = lax.rem(cache.cursor[:, None] + (width - 1) - jnp.arange(width, dtype=jnp.int32)[None], width)
        own = _of_slots(logits, jnp.maximum(self.num_local - 1 - age, 0))
        mass = jnp.where((age < self.num_local)[:, None, None], jnp.exp(own - lse[..., None]), 0)
        received = jnp.where((age > 0)[:, None, None], state.received_ring, 0) + mass
        outside = cache.cursor - self.num_sink - self.num_local
        return BlockState(
            cache=cache,
            representative=state.representative,
            received_ring=jnp.where(real[:, None, None, None], received, state.received_ring),
            due=real & (outside > 0) & (lax.rem(outside, self.block_size) == 0),
        )

    def _noted(self, state: BlockState, cache: LayerStorage, seen: LayerStorage, mass: Array, inputs: Inputs) -> BlockState:
        """Update the state after a chunk whose near tokens received ``mass``, as in `_attend`; ``seen`` has their keys."""
        before, size, width = state.cache.cursor[:, None], self.block_size, state.received_ring.shape[3]
        heads, tokens = mass.shape[:3], inputs.query.shape[3]
        real = jnp.sum(inputs.position >= 0, axis=1, dtype=jnp.int32)[:, None]
        each = jnp.arange(width, dtype=jnp.int32)[None]
        received = _of_slots(state.received_ring, lax.rem(before + each, width))  # in the order of the tokens
        received = jnp.pad(received, [(0, 0)] * 3 + [(0, tokens)]).at[..., size + 1 :].add(mass)
        # The blocks that these tokens may complete.
        number = self._blocks(before) + jnp.arange(-(-tokens // size), dtype=jnp.int32)[None]
        inside = jnp.arange(size, dtype=jnp.int32)[None, None]
        slot = (self.num_sink + number[..., None] * size + inside).reshape(len(before), -1)
        at = jnp.clip(slot - before + width, 0, received.shape[3] - 1)
        own = _of_slots(received, at).reshape(*heads, -1, size)
        made = self._represent(seen.keys_at(jnp.clip(slot, 0, cache.num_slots - 1)), own)
        number = jnp.where(number < self._blocks(before + real), number, state.representative.shape[3])
        left = real + lax.rem(each + width - lax.rem(before + real, width), width)
        return BlockState(
            cache=cache,
            representative=_put(state.representative, made, number),
            received_ring=_of_slots(received, left),
            due=jnp.zeros_like(state.due),
        )

    def _newest_block(self, state: BlockState) -> Array:
        """Return the number of the last complete block, int32 [B]; 0 if there is none."""
        return jnp.maximum(self._blocks(state.cache.cursor) - 1, 0)

    def _represent(self, key: Array, received: Array) -> Array:
        """Average the keys of [B, H, N * size, D] that ``received`` float32 [B, H, G, N, size] most: [B, H, G, N, D]."""
        heads, (count, size) = received.shape[:3], received.shape[3:]
        first = jnp.arange(count, dtype=jnp.int32)[:, None] * size
        best = lax.top_k(received, self.num_repr)[1] + first[None, None, None]
        key = jnp.take_along_axis(key[:, :, None], best.reshape(*heads, -1, 1), axis=3)
        key = key.reshape(*heads, count, self.num_repr, key.shape[4])
        return key.mean(axis=4, dtype=jnp.float32).astype(key.dtype)


def _put(representative: Array, new: Array, number: Array) -> Array:
    """Write ``new`` [B, H, G, K, D] into ``representative`` [B, H, G, N, D] at ``number`` int32 [B, K]; N is dropped."""

    def one(old: Array, new: Array, number: Array) -> Array:
        return old.at[:, :, number].set(new, mode="drop", wrap_negative_indices=False)

    return jax.vmap(one)(representative, new, number)


def _of_slots(received: Array, at: Array) -> Array:
    """Take the entries ``at`` int32 [B, K], which are in range, of ``received`` [B, H, G, W]: [B, H, G, K]."""

    def one(received: Array, at: Array) -> Array:
        return received.at[:, :, at].get(mode="promise_in_bounds", wrap_negative_indices=False)

    return jax.vmap(one)(received, at)


def _of_heads(place: Array, heads: tuple[int, ...]) -> Array:
    """Repeat ``place`` int32 [B, S] for all KV heads: [B, H, S]."""
    return jnp.broadcast_to(place[:, None], (*heads, place.shape[1]))


def _mass(query: Array, key: Array, lse: Array, asked: Array, place: Array) -> Array:
    """Sum the attention that each query head pays to each key: float32 [B, H, G, S]; see `column_mass`.

    Queries [B, H, G, T, D] are at ``asked`` int32 [B, T], and keys [B, H, S, D] at ``place`` int32 [B, H, S].
    """
    group, heads = query.shape[2], (len(query), -1)
    mass = column_mass(
        query.reshape(*heads, 1, *query.shape[3:]),
        jnp.repeat(key, group, axis=1),
        lse.reshape(*heads, 1, lse.shape[3]),
        query_position=asked,
        key_position=jnp.repeat(place, group, axis=1),
        scale=1 / math.sqrt(query.shape[-1]),
    )
    return mass.reshape(*query.shape[:3], -1)
