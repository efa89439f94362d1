"""MagicPIG: sample tokens by collisions in hash tables; each sampled weight is divided by its chance to be sampled.

Stored: all keys and values; for each token of the prompt its bucket in ``num_tables`` tables of ``num_bits`` sign bits (a
byte each up to 8 bits, else two); for each KV head the mean m of the keys that are sampled from, the number of tokens that
the last step sampled, and how many steps overflowed.

Keys are hashed as k - m, queries as they are. Key i is sampled for query head (h, g) if their buckets are equal in two tables
or more. Its logit in the softmax is corrected by the chance w of that, which follows from the angle between q and k - m::

    p = 1 - angle(q[h, g], k_i - m_h) / pi
    w = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L-1)       K = num_bits, L = num_tables
    logit[h, g, i] = q[h, g] . k_i / sqrt(D) - log(w + 0.0001)

The first ``num_sink`` tokens, the prompt's last ``num_local`` and all later tokens are in the softmax with their own logits,
without a correction. Layers whose number is a multiple of ``dense_every`` attend to all tokens.

How many tokens are sampled is left to chance. With a ``capacity`` a step reads at most so many rows per KV head, those that
any query head of the group has sampled. If there are more, the step overflows: the tokens stay that have the most equal
buckets with any of the query heads, at an equal number the first ones, and the others count as not sampled. Corrections
stay as they are, so such a step is no fair sample. The statistic ``overflowed`` is the share of KV heads and steps that
did so; it should be near 0. Without a ``capacity`` there is room for the whole prompt, and a step reads all keys.

**Source**: Chen et al., "MagicPIG: LSH Sampling for Efficient LLM Generation" (arXiv:2410.16179); Infini-AI-Lab/MagicPIG
ac9aa36 for the sizes, the centre, the dense layers and the correction.

**Departures**: buckets are compared one by one, where the code looks tokens up in tables; the accounting counts all
buckets as read. The code has room for every token that is sampled, and no capacity. It subtracts the mean from all keys,
which changes each logit of a query by the same number; here it is subtracted only where keys are hashed and angles are
measured. A sampled token counts for its own query heads, and once for its KV head in the accounting. A key that is equal
to the mean is taken to be at a right angle. All layers have the same planes, those of JAX's generator; a vector in a plane
counts as above it, in the code as below. In the paper, tables, keys and values are in host memory, and the host's processor
attends to what is sampled. Here the device does, and with ``offload`` only the values are in host memory: both the correction
and attention read the key of a sampled token, which would cross the bus twice.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention import Selection
from kvjax.cache import LayerCache, LayerStorage
from kvjax.method import LayerMethod, Prompt, Step
from kvjax.methods.full import Full
from kvjax.offload import Near
from kvjax.scan import Regions, at_slots, by_blocks, region_list
from kvjax.slots import SlotMethod, count_all
from kvjax.typing import pytree, static, traced
from pallas_kernels.formats.sign_codes import buckets, random_planes
from pallas_kernels.kth_select import kth_select_mask
from pallas_kernels.numerics import product_precision

_SMOOTH = 1e-4  # keeps the correction of the rarest keys finite


@pytree
class Tables:
    """The buckets of the prompt's tokens, and what else a step needs."""

    # uint8 or uint16 [B, H, P, L], the bucket in each table, of the prompt's P slots; anything outside of the sampled slots
    ids: Array
    centre: Array  # float32 [B, H, D], mean of the keys of these slots
    near: Array  # int32 [B], the slot that ends them
    sampled: Array  # int32 [B, H], tokens that the last step sampled
    steps: Array  # int32 [B], steps so far
    overflowed: Array  # int32 [B, H], steps that sampled more than ``capacity``


@pytree
class MagicPIG(SlotMethod):
    """Importance sampling by hash tables; see the module docstring."""

    num_tables: int = static(default=150, least=2)  # hash tables
    num_bits: int = static(default=10, least=1, most=16)  # sign bits of a bucket
    num_sink: int = static(default=4, least=0)  # first tokens, always attended
    num_local: int = static(default=64, least=0)  # last tokens of the prompt, always attended
    capacity: int | None = static(default=None, least=1)  # most sampled tokens that a KV head reads; None = all
    dense_every: int = static(default=16, least=0)  # layers with a multiple of this number are dense; 0 = none
    seed: int | Array = traced(default=0, least=0)  # of the random planes
    implementation: str | None = static(default=None)  # None, a gather_attention name, or "mask": dense with a mask
    offload: bool | float = static(default=False, least=0, most=1)  # values in host memory; a number: share of the layers

    PAPER: ClassVar[str] = "arXiv:2410.16179"

    composable = False  # wrappers know slots, but not the corrections of logits
    offloadable = True
    keys_stay = True

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        return Full() if self.dense_every and layer % self.dense_every == 0 else self

    def near(self, slots: int, room: int) -> Near:
        return Near(first=self.num_sink, newest=self.num_local + room)

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Tables]:
        near = jnp.maximum(cache.cursor - self.num_local, self.num_sink)
        used = self._sampled_from(cache, near)[..., None]
        count = jnp.maximum(jnp.sum(used, axis=2, dtype=jnp.float32), 1)
        centre = jnp.sum(jnp.where(used, cache.key, 0), axis=2, dtype=jnp.float32) / count
        planes, slots = self._planes(cache), cache.num_slots - room
        ids = by_blocks(
            lambda key: buckets(key.astype(jnp.float32) - centre[:, :, None], planes), cache.key[:, :, :slots]
        )
        none = jnp.zeros(cache.position.shape[:2], jnp.int32)
        ids = jnp.where(used[:, :, :slots], ids, 0)
        return cache, Tables(ids=ids, centre=centre, near=near, sampled=none, steps=none[:, 0], overflowed=none)

    def select(self, cache: LayerStorage, aux: Tables, step: Step) -> Selection:
        query, zone = step.query[..., 0, :], self._sampled_from(cache, aux.near)
        equal = _equal_buckets(aux.ids, buckets(query, self._planes(cache)))
        equal = jnp.where((equal >= 2) & zone[:, :, None, : equal.shape[3]], equal, 0)
        most = equal.max(axis=2)  # 0 if no query head has sampled the token
        sampled = jnp.sum(most > 0, axis=2, dtype=jnp.int32)
        slots, listed = jnp.broadcast_to(jnp.arange(most.shape[2], dtype=jnp.int32)[None, None], most.shape), most > 0
        room = most.shape[2] if self.capacity is None else min(self.capacity, most.shape[2])
        if self.capacity is not None:
            slots, listed = kth_select_mask(jnp.where(listed, most.astype(jnp.float32), -jnp.inf), room, room)
        regions = Regions(
            near=aux.near, most_near=self.num_local + cache.num_slots - most.shape[2], wanted=room, most_wanted=room
        )
        chosen = region_list(cache, self.num_sink, regions, slots, listed)
        own = (at_slots(equal, chosen.slots) > 0) & at_slots(zone[:, :, None], chosen.slots)
        bias = jnp.where(own, self._correction(query, _keys_at(cache, chosen.slots), aux.centre), -jnp.inf)
        bias = jnp.where(at_slots(zone[:, :, None], chosen.slots), bias, 0)
        return Selection(
            slots=chosen.slots, mask=chosen.mask, bias=bias, told=(jnp.minimum(sampled, room), sampled > room)
        )

    def update(self, cache: LayerStorage, aux: Tables, step: Step, mass: Array | None) -> tuple[LayerStorage, Tables]:
        if step.told is None:  # these tokens attended to all
            return cache, aux
        (sampled, over), active = step.told, step.position >= 0
        return cache, Tables(
            ids=aux.ids,
            centre=aux.centre,
            near=aux.near,
            sampled=jnp.where(active, sampled, aux.sampled),
            steps=aux.steps + active[:, 0].astype(jnp.int32),
            overflowed=aux.overflowed + (active & over).astype(jnp.int32),
        )

    def count(self, cache: LayerStorage, aux: Tables, shared: Any) -> tuple[Array, Array]:
        """As many tokens as the last step sampled; the buckets are those of all tokens that it sampled from."""
        stored, _ = count_all(cache)
        searched = jnp.sum(self._sampled_from(cache, aux.near), axis=2, dtype=jnp.int32)
        each = self.num_tables * aux.ids.dtype.itemsize
        return stored - searched + aux.sampled, searched.astype(jnp.float32) * each

    def counters(self, aux: Tables, shared: Any) -> dict[str, Array]:
        if self.capacity is None:
            return {}
        steps = jnp.maximum(aux.steps, 1).astype(jnp.float32)
        return {"overflowed": aux.overflowed.astype(jnp.float32).mean(axis=1) / steps}

    def _correction(self, query: Array, key: Array, centre: Array) -> Array:
        """-log of the chance that each key [B, H, K, D] is sampled for ``query`` [B, H, G, D]: float32 [B, H, G, K]."""
        exact = product_precision(key.dtype)
        product = jnp.einsum("bhgd,bhkd->bhgk", query, key, precision=exact, preferred_element_type=jnp.float32)
        product = product - jnp.sum(query.astype(jnp.float32) * centre[:, :, None], axis=3)[..., None]
        norms = _norm(query)[..., None] * _norm(key.astype(jnp.float32) - centre[:, :, None])[:, :, None]
        angle = jnp.arccos(jnp.clip(jnp.where(norms > 0, product / jnp.where(norms > 0, norms, 1), 0), -1, 1))
        same = lax.integer_pow(1 - angle / math.pi, self.num_bits)  # the chance of equal buckets in one table
        others = lax.integer_pow(1 - same, self.num_tables - 1)
        none, once = (1 - same) * others, self.num_tables * same * others
        return -jnp.log(1 - none - once + _SMOOTH)

    def _sampled_from(self, cache: LayerStorage, near: Array) -> Array:
        """Whether each slot holds a token that is attended only when it is sampled: bool [B, H, S]."""
        slot = jnp.arange(cache.num_slots, dtype=jnp.int32)[None, None]
        return cache.valid & (slot >= self.num_sink) & (slot < near[:, None, None])

    def _planes(self, cache: LayerStorage) -> Array:
        return random_planes(self.seed, self.num_tables, self.num_bits, cache.key.shape[3])


def _equal_buckets(ids: Array, query: Array) -> Array:
    """In how many tables keys [B, H, P, L] and queries [B, H, G, L] have equal buckets: int32 [B, H, G, P]."""
    # One query head after the other: for all at once a GPU has too few registers.
    heads = [jnp.sum(ids == query[:, :, g, None], axis=3, dtype=jnp.int32) for g in range(query.shape[2])]
    return jnp.stack(heads, axis=2)


def _keys_at(cache: LayerStorage, slots: Array) -> Array:
    """The keys of a list int32 [B, H, K]: [B, H, K, D]. One with as many entries as there are slots is the cache itself."""
    if slots.shape[2] == cache.num_slots:
        return cache.key
    return jnp.take_along_axis(cache.key, slots[..., None], axis=2)


def _norm(x: Array) -> Array:
    """The norm of vectors [..., D]: float32 [...]."""
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1))
