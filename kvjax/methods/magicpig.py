"""MagicPIG: sample tokens by collisions in hash tables; each sampled weight is divided by its chance to be sampled.

Stored: all keys and values; for each token of the prompt its bucket in ``num_tables`` tables of ``num_bits`` sign bits (a
byte each up to 8 bits, else two); for each KV head the mean m of the keys that are sampled from, the number of tokens that
the last step sampled, and how many steps overflowed.

Keys are hashed as k - m, queries unchanged. Key i is sampled for query head (h, g) if their buckets are equal in two tables
or more. Its logit in the softmax is corrected by the probability w of this event, which follows from the angle between q and
k - m::

    p = 1 - angle(q[h, g], k_i - m_h) / pi
    w = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L-1)       K = num_bits, L = num_tables
    logit[h, g, i] = q[h, g] . k_i / sqrt(D) - log(w + 0.0001)

The first ``num_sink`` tokens, the prompt's last ``num_local`` and all later tokens are in the softmax with their own logits,
without a correction. Layers whose number is a multiple of ``dense_every`` attend to all tokens.

The number of sampled tokens is random. With a ``capacity`` a step reads at most so many rows per KV head: rows that any query
head of the group has sampled. If there are more, the step overflows: it keeps the tokens with the most equal buckets with
any of the query heads, the first ones in a tie, and counts all other tokens as not sampled. Corrections stay as they are, so
such a step is no fair sample. The statistic ``overflowed`` is the share of KV heads and steps that overflowed; it should be
near 0. Without a ``capacity`` there is room for the whole prompt, and a step reads all keys.

**Source**: Chen et al., "MagicPIG: LSH Sampling for Efficient LLM Generation" (arXiv:2410.16179); Infini-AI-Lab/MagicPIG
ac9aa36 for the sizes, the centre, the dense layers and the correction.

**Departures**: buckets are compared one by one, where the code looks tokens up in tables; the accounting counts all
buckets as read. The code has room for every token that is sampled, and no capacity. It subtracts the mean from all keys,
which changes each logit of a query by the same number; here it is subtracted only where keys are hashed and angles are
measured. A sampled token counts for its own query heads, and once for its KV head in the accounting. A key that is equal
to the mean is taken to be at a right angle. All layers have the same planes, drawn by JAX's generator; a vector in a plane
counts as above it, in the code as below. In the paper, tables, keys and values are in host memory, and the host's processor
attends to the sampled tokens. Here the device does, and with ``offload`` only the values are in host memory: both the
correction and attention read the key of a sampled token, which would cross the bus twice.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.attention.over_cache import Selection
from kvjax.cache import LayerCache, LayerStorage
from kvjax.cache.offload import Near
from kvjax.methods.full import Full
from kvjax.protocol.method import LayerMethod, Prompt, Step
from kvjax.protocol.scan import by_blocks
from kvjax.protocol.slots import SlotMethod, count_all
from kvjax.protocol.typing import pytree, static
from kvjax.selection import mask_of
from pallas_kernels.choose.magicpig.match_select import match_select
from pallas_kernels.formats.sign_codes import buckets, random_planes
from pallas_kernels.score.magicpig.bucket_matches import bucket_matches
from pallas_kernels.score.magicpig.sampled_bias import sampled_bias

_ALIGNED = 16  # slots that a kernel reads at once


@pytree
class Tables:
    """The buckets of the prompt's tokens, and the state that a step needs with them."""

    # uint8 or uint16 [B, H, L, N], the bucket of each of the prompt's slots in each table; 0 outside of the slots that are
    # sampled from. N is the number of these slots, rounded up to a multiple of `_ALIGNED`.
    buckets: Array
    centre: Array  # float32 [B, H, D], mean of the keys of these slots
    near: Array  # int32 [B], the slot that ends them
    sampled: Array  # int32 [B, H], tokens that the last step sampled
    steps: Array  # int32 [B], steps so far
    overflowed: Array  # int32 [B, H], steps that sampled more than ``capacity``


@pytree
class MagicPIG(SlotMethod):
    """Importance sampling by hash tables; see the module docstring."""

    num_tables: int = static("hash tables", default=150, least=2)
    num_bits: int = static("sign bits of a bucket", default=10, least=1, most=16)
    num_sink: int = static("first tokens, always attended", default=4, least=0)
    num_local: int = static("last tokens of the prompt, always attended", default=64, least=0)
    capacity: int | None = static("most sampled tokens that a KV head reads; None = all", default=None, least=1)
    offload: bool | float = static("values in host memory; a number: share of the layers", default=False, least=0, most=1)

    PAPER: ClassVar[str] = "arXiv:2410.16179"
    dense_every = 16  # layers with a multiple of this number are dense; 0 = none
    seed = 0  # of the random planes

    composable = False  # wrappers know slots, but not the corrections of logits
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
        ids = by_blocks(lambda key: buckets(key.astype(jnp.float32) - centre[:, :, None], planes), cache.key[:, :, :slots])
        none = jnp.zeros(cache.position.shape[:2], jnp.int32)
        ids = jnp.where(used[:, :, :slots], ids, 0).swapaxes(2, 3)
        ids = jnp.pad(ids, ((0, 0), (0, 0), (0, 0), (0, -slots % _ALIGNED)))
        return cache, Tables(buckets=ids, centre=centre, near=near, sampled=none, steps=none[:, 0], overflowed=none)

    def select(self, cache: LayerStorage, aux: Tables, step: Step) -> Selection:
        query, size, searched = step.query[..., 0, :], cache.num_slots, aux.buckets.shape[3]
        asked = buckets(query, self._planes(cache)), aux.buckets, aux.near
        fixed: dict[str, Any] = {"first": self.num_sink, "num_bits": self.num_bits}
        room = searched if self.capacity is None else min(self.capacity, searched)
        if self.capacity is None:
            slots, (mask, own, sampled) = None, self._over_all(cache, aux, bucket_matches(*asked, **fixed))
        else:
            # Fewer slots than buckets may hold prompt tokens; the difference is less than `_ALIGNED`.
            behind = min(self.num_local + size - searched + _ALIGNED - 1, size)
            listed, mask, own, sampled = match_select(*asked, cache.cursor, capacity=room, room=behind, **fixed)
            slots = listed if listed.shape[2] < size else None
            if slots is None:  # a list of all slots is not longer
                own = jax.vmap(lambda own: mask_of(listed, own, size), 2, 2)(own)
                mask = mask_of(listed, mask, size)
        bias = sampled_bias(query, cache.stored[0], aux.centre, slots, own, aux.near, num_tables=self.num_tables, **fixed)
        if slots is None:
            slots = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None, None], mask.shape)
        return Selection(slots=slots, mask=mask, bias=bias, select_aux=(jnp.minimum(sampled, room), sampled > room))

    def update(self, cache: LayerStorage, aux: Tables, step: Step, mass: Array | None) -> tuple[LayerStorage, Tables]:
        if step.select_aux is None:  # these tokens attended to all
            return cache, aux
        (sampled, over), active = step.select_aux, step.position >= 0
        return cache, Tables(
            buckets=aux.buckets,
            centre=aux.centre,
            near=aux.near,
            sampled=jnp.where(active, sampled, aux.sampled),
            steps=aux.steps + active[:, 0].astype(jnp.int32),
            overflowed=aux.overflowed + (active & over).astype(jnp.int32),
        )

    def count(self, cache: LayerStorage, aux: Tables, shared: Any) -> tuple[Array, Array]:
        """Count as many tokens as the last step sampled, and the buckets of all tokens that it sampled from."""
        stored, _ = count_all(cache)
        searched = jnp.sum(self._sampled_from(cache, aux.near), axis=2, dtype=jnp.int32)
        each = self.num_tables * aux.buckets.dtype.itemsize
        return stored - searched + aux.sampled, searched.astype(jnp.float32) * each

    def counters(self, aux: Tables, shared: Any) -> dict[str, Array]:
        if self.capacity is None:
            return {}
        steps = jnp.maximum(aux.steps, 1).astype(jnp.float32)
        return {"overflowed": aux.overflowed.astype(jnp.float32).mean(axis=1) / steps}

    def _over_all(self, cache: LayerStorage, aux: Tables, found: Array) -> tuple[Array, Array, Array]:
        """Extend ``found`` bool [B, H, G, N], the tokens that query heads have sampled, to masks over all slots.

        Returns:
            By any head, bool [B, H, S]; by each head, bool [B, H, G, S]; how many are sampled, int32 [B, H].
        """
        every = cache.num_slots
        found = jnp.pad(found[..., :every], ((0, 0),) * 3 + ((0, max(every - found.shape[3], 0)),))
        always, union = ~self._sampled_from(cache, aux.near), found.any(axis=2)
        sampled = jnp.sum(union, axis=2, dtype=jnp.int32)
        return cache.valid & (always | union), always[:, :, None] | found, sampled

    def _sampled_from(self, cache: LayerStorage, near: Array) -> Array:
        """Mark the slots whose token is attended only when it is sampled: bool [B, H, S]."""
        slot = jnp.arange(cache.num_slots, dtype=jnp.int32)[None, None]
        return cache.valid & (slot >= self.num_sink) & (slot < near[:, None, None])

    def _planes(self, cache: LayerStorage) -> Array:
        return random_planes(self.seed, self.num_tables, self.num_bits, cache.key.shape[3])
