"""RetroInfer: keys are clustered; the best clusters are attended exactly, the next ones through centroids and sums of values.

Stored: all keys and values; for each cluster its centroid, the sum of its values, and its size; the slots of the clustered
tokens, cluster by cluster. The slots of a row are in zones::

    [ num_sink sinks | clustered tokens | fewer than num_local + buffer newest tokens ]

The sinks and the newest tokens are always attended. With C clusters, c their centroids, and empty clusters left out::

    s[h, i] = sum over g of  softmax_i( q[h, g] . c[h, i] / sqrt(D) )

The tokens of the ``fraction * C`` best clusters are attended exactly. Each of the next ``estimated * C`` clusters adds
exp(q . c / sqrt(D)) times its size to the denominator of the softmax and exp(q . c / sqrt(D)) times the sum of its values to
the numerator. One denominator serves all of these terms. The remaining clusters are left out. Both numbers of clusters are
rounded up.

A prompt of ``buffer`` tokens beside the sinks and the ``num_local`` newest is clustered at its end, a shorter one is not. The
mean key is subtracted. Each ``segment`` of tokens makes one centroid for every ``cluster_size``, which begin at evenly spaced
keys: a key belongs to the centroid with the largest product, and centroids are means of length 1. After ``iterations - 1``
rounds each key chooses among the centroids of all segments, and the centroids become means of any length. While decoding,
each ``buffer`` tokens that leave the newest ``num_local`` are a segment of their own in the same way.

**Source**: Chen et al., "RetroInfer: A Vector-Storage Approach for Scalable Long-Context LLM Inference" (arXiv:2505.02922,
sections 4.2 and 4.3); microsoft/RetrievalAttention 6b1228c for the sizes, the clustering and the update.

**Departures**: all segments but the last of a prompt have exactly ``segment`` tokens, and no number of clusters is rounded to
a multiple of 8; the code cuts a prompt into equal segments of about that size. The shares are of all clusters; the code
rounds them to the nearest number for the prompt and for each later segment. At most four times the mean number of tokens of
``fraction * C`` clusters is attended exactly (the code's buffer is as large): a cluster that has no room is estimated.
With ``offload`` keys and values are in host memory, as in the code, and a step reads the tokens of the best clusters where
they are: there is no buffer on the device of clusters that earlier steps have read, and nothing is copied while the step
before runs.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.over_cache import Selection
from kvjax.cache import LayerCache, LayerStorage
from kvjax.cache.offload import Near
from kvjax.methods.budgets import SHARE
from kvjax.methods.retroinfer.kmeans import assign, centroids_of, mean_key
from kvjax.protocol.method import Prompt, Step
from kvjax.protocol.slots import SlotMethod, SlotState, count_all
from kvjax.protocol.typing import EMPTY, pytree, static, traced
from kvjax.selection import pick, share
from pallas_kernels.attend.retroinfer.cluster_estimate import cluster_estimate
from pallas_kernels.choose.retroinfer.cluster_rank import cluster_rank
from pallas_kernels.choose.retroinfer.cluster_tokens import cluster_tokens
from pallas_kernels.soft_cap import capped

_ROOM = 4  # tokens listed for each token of a cluster of mean size
_TILE = 128  # clusters that a kernel multiplies at once


@pytree
class Clusters:
    """The index, and the last step's counts for the accounting; C clusters are allocated."""

    centroid: Array  # [B, H, C, D]
    value_sum: Array  # [B, H, C, D]
    size: Array  # int32 [B, H, C]
    start: Array  # int32 [B, H, C], where the tokens of each cluster begin in `order`
    order: Array  # int32 [B, H, S], the slots of the clustered tokens, cluster by cluster, each in ascending order
    end: Array  # int32 [B], the slot behind the clustered tokens
    used: Array  # int32 [B], clusters in use
    exact: Array  # int32 [B, H], tokens of the clusters that the last step attended to; EMPTY where there was no step


@pytree
class Segment:
    """The ``buffer`` oldest tokens that leave the newest ones, to be clustered; N = ``buffer``."""

    key: Array  # [B, H, N, D]
    value: Array  # [B, H, N, D]
    full: Array  # bool [B], whether there are so many tokens


@pytree
class RetroInfer(SlotMethod):
    """Clusters, attended exactly or estimated; see the module docstring."""

    fraction: float | Array = traced("clusters attended exactly", default=0.018, above=0, most=1, within="capacity")
    capacity: float = static("share of clusters to make room for; None = fraction", default=None, above=0, most=1)
    estimated: float | Array = traced("share of clusters that are estimated", default=0.232, least=0, most=1)
    num_sink: int = static("first tokens, always attended", default=4, least=0)
    num_local: int = static("newest tokens, never clustered", default=64, least=0)
    cluster_size: int = static("tokens for each centroid", default=16, least=1)
    buffer: int = static("tokens clustered together while decoding", default=1024, least=1)
    offload: bool | float = static("keys and values in host memory, or a share of layers", default=False, least=0, most=1)

    PAPER: ClassVar[str] = "arXiv:2505.02922"
    segment = 8192  # prompt tokens clustered together
    iterations = 10  # rounds of k-means

    composable = False  # wrappers know slots, but not estimates

    @classmethod
    def at_length(cls, length: int) -> tuple[dict[str, Any], str]:
        buffer = max(min(1024, length // SHARE), 16)
        return {"fraction": 1 / SHARE, "buffer": buffer}, f"1/{SHARE} of the clusters exactly"

    def check(self) -> None:
        if self.buffer < self.cluster_size:
            raise ValueError(
                f"RetroInfer: buffer must be at least cluster_size={self.cluster_size}, so that there is a key for each "
                f"centroid, got {self.buffer}"
            )

    def max_tokens(self, in_prompt: bool) -> int | None:
        return None if in_prompt else self.buffer

    def near(self, slots: int, room: int) -> Near:
        return Near(first=self.num_sink, newest=self.num_local + self.buffer)  # all tokens that will be clustered next

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Clusters]:
        batch, heads, slots, dim = cache.key.shape
        tokens = cache.cursor - self.num_sink - self.num_local
        tokens = jnp.where(tokens >= self.buffer, tokens, 0)
        slot = jnp.arange(slots, dtype=jnp.int32)[None]
        clustered = (slot >= self.num_sink) & (slot < self.num_sink + tokens[:, None])
        mean, size = mean_key(cache.key, clustered), min(self.segment, slots)
        each = max(size // self.cluster_size, 1)

        def count(of: Array) -> Array:
            return jnp.where(of > 0, jnp.maximum(of // self.cluster_size, 1), 0)

        def part(number: Array) -> Array:
            at = number * size + jnp.arange(size, dtype=jnp.int32)
            key = jnp.take(cache.key, self.num_sink + at, axis=2, mode="clip")
            wanted = count(jnp.clip(tokens - number * size, 0, size))
            return centroids_of(key, mean, at[None] < tokens[:, None], wanted, each, self.iterations - 1)

        made = jnp.moveaxis(lax.map(part, jnp.arange(-(-slots // size), dtype=jnp.int32)), 0, 2)
        made = made.reshape(batch, heads, -1, dim)
        most = slots // self.cluster_size + 1  # however the tokens are divided into segments
        if most > _TILE:  # a matrix product over clusters would copy them into arrays of whole tiles in every step
            most += -most % _TILE
        made = jnp.pad(made, [(0, 0), (0, 0), (0, max(most - made.shape[2], 0)), (0, 0)])[:, :, :most]
        used = tokens // size * each + count(tokens % size)
        centroid, value_sum, members, start, order = _clusters(cache.key, cache.value, mean, clustered, made, used)
        return cache, Clusters(
            centroid=centroid,
            value_sum=value_sum,
            size=members,
            start=start,
            order=order,
            end=self.num_sink + tokens,
            used=used,
            exact=jnp.full((batch, heads), EMPTY, jnp.int32),
        )

    def select(self, cache: LayerStorage, aux: Clusters, step: Step) -> Selection:
        query = step.query[..., 0, :]
        most = max(math.ceil(aux.size.shape[2] * self.capacity), 1)  # clusters that are attended exactly
        room = _ROOM * most * self.cluster_size
        logits, listed, ends, considered, exact = cluster_rank(
            query, aux.centroid, aux.size, aux.used, jnp.asarray(self.fraction, jnp.float32),
            jnp.asarray(self.fraction + self.estimated, jnp.float32), scale=1 / math.sqrt(query.shape[-1]), capacity=most,
            room=room,
        )  # fmt: skip
        slots, mask = cluster_tokens(
            listed, ends, aux.start, aux.order, aux.end, cache.cursor, first=self.num_sink, most=min(room, cache.num_slots),
            newest=self.num_local + self.buffer,
        )  # fmt: skip
        partials = cluster_estimate(capped(logits), considered, exact, aux.size, aux.value_sum)
        return Selection(slots=slots, mask=mask, partials=partials, select_aux=ends[:, :, -1])

    def update(self, cache: LayerStorage, aux: Clusters, step: Step, mass: Array | None) -> tuple[LayerStorage, Clusters]:
        active = (step.position >= 0).any(axis=1)
        exact = jnp.where(active[:, None], EMPTY if step.select_aux is None else step.select_aux, aux.exact)
        aux = dataclasses.replace(aux, exact=exact)
        if step.position.shape[1] == 1 or not self._grows(cache):
            return cache, aux
        # `settle` would not find the oldest of many tokens on the device.
        full = self._full(cache, aux)
        grown = functools.partial(self._grown, aux, full=full)
        return cache, lax.cond(full.any(), lambda: grown(self.rework(self._leaving(cache, aux))), lambda: aux)

    def due(self, state: SlotState) -> Array | None:
        return self._full(state.cache, state.aux) if self._grows(state.cache) else None

    def excerpt(self, state: SlotState) -> Segment:
        return self._leaving(state.cache, state.aux)

    def rework(self, excerpt: Segment) -> tuple[Array, ...]:
        """Group the tokens that leave into clusters, by `_clusters`."""
        key, full, each = excerpt.key, excerpt.full, self.buffer // self.cluster_size
        there = jnp.broadcast_to(full[:, None], (len(full), self.buffer))
        mean, count = mean_key(key, there), jnp.where(full, each, 0)
        made = centroids_of(key, mean, there, count, each, self.iterations - 1)
        return _clusters(key, excerpt.value, mean, there, made, count)

    def settle(self, state: SlotState, made: tuple[Array, ...]) -> SlotState:
        full = self._full(state.cache, state.aux)
        return dataclasses.replace(state, aux=self._grown(state.aux, made, full))

    def count(self, cache: LayerStorage, aux: Clusters, shared: Any) -> tuple[Array, Array]:
        """Count what a step attends to; before the first step, each of its clusters has the mean number of tokens."""
        stored, _ = count_all(cache)
        # Where the last step was followed by new clusters, nothing has come behind them yet, and it did not see them.
        fresh = (aux.exact[:, 0] >= 0) & (aux.end > self.num_sink) & (cache.cursor - aux.end == self.num_local)
        end = aux.end - jnp.where(fresh, self.buffer, 0)
        used = aux.used - jnp.where(fresh, self.buffer // self.cluster_size, 0)
        clustered = jnp.maximum(end - self.num_sink, 0)
        exact = jnp.where(aux.exact >= 0, aux.exact, share(self.fraction, clustered)[:, None])
        best = share(self.fraction, used)
        estimated = share(self.fraction + self.estimated, used) - best
        row, sums = (x.dtype.itemsize * x.shape[3] for x in (aux.centroid, aux.value_sum))
        read = (used * (row + 4) + estimated * (sums + 4) + best * 4)[:, None] + exact * 4
        return stored - clustered[:, None] + exact, read.astype(jnp.float32)

    def _grows(self, cache: LayerStorage) -> bool:
        """Decide whether a row can have enough tokens for more clusters."""
        return cache.num_slots >= self.num_sink + self.num_local + self.buffer

    def _full(self, cache: LayerStorage, aux: Clusters) -> Array:
        """Mark the rows in which ``buffer`` tokens have left the newest ones: bool [B]."""
        return cache.cursor - aux.end - self.num_local >= self.buffer

    def _leaving(self, cache: LayerStorage, aux: Clusters) -> Segment:
        """Take the tokens that have left the newest ones; rows without enough of them have any tokens."""
        slots = jnp.minimum(aux.end[:, None] + jnp.arange(self.buffer, dtype=jnp.int32)[None], cache.num_slots - 1)
        key, value = cache.rows_at(slots)
        return Segment(key=key, value=value, full=self._full(cache, aux))

    def _grown(self, aux: Clusters, made: tuple[Array, ...], full: Array) -> Clusters:
        """Add the clusters that `rework` made to the index, in the rows where ``full`` bool [B]."""
        centroid, value_sum, size, start, order = made
        clustered = aux.end - self.num_sink

        def put(old: Array, new: Array, first: Array) -> Array:  # at consecutive places; entries past the end are dropped
            if len(full) == 1:  # a slice is shorter to compile than a scatter
                start = 0, 0, first[0], *[0] * (old.ndim - 3)
                before = lax.dynamic_slice(old, start, new.shape, allow_negative_indices=False)
                return lax.dynamic_update_slice(old, jnp.where(full[0], new, before), start, allow_negative_indices=False)
            place = first[:, None] + jnp.arange(new.shape[2], dtype=jnp.int32)[None]
            place = jnp.where(full[:, None], place, old.shape[2])
            return _put_each(old, new, jnp.broadcast_to(place[:, None], new.shape[:3]))

        return dataclasses.replace(
            aux, centroid=put(aux.centroid, centroid, aux.used), value_sum=put(aux.value_sum, value_sum, aux.used),
            size=put(aux.size, size, aux.used), start=put(aux.start, start + clustered[:, None, None], aux.used),
            order=put(aux.order, order + aux.end[:, None, None], clustered), end=aux.end + jnp.where(full, self.buffer, 0),
            used=aux.used + jnp.where(full, size.shape[2], 0),
        )  # fmt: skip


def _put_each(old: Array, new: Array, place: Array) -> Array:
    """Write ``new`` [B, H, K, ...] into ``old`` [B, H, N, ...] at ``place`` int32 [B, H, K]; entries past the end drop."""

    def one(old: Array, new: Array, place: Array) -> Array:
        return old.at[place].set(new, mode="drop", wrap_negative_indices=False)

    return jax.vmap(jax.vmap(one))(old, new, place)


def _clusters(
    key: Array, value: Array, mean: Array, used: Array, made: Array, count: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """Group keys by the nearest of ``count`` int32 [B] centroids ``made``; see `kvjax.methods.retroinfer.kmeans.assign`.

    Returns:
        Centroids [B, H, C, D] and sums of values [B, H, C, D] in the dtypes of keys and values, the clusters' sizes int32
        [B, H, C]; where the keys of each cluster begin in their order, int32 [B, H, C]; and the keys in this order, int32
        [B, H, N], 0 behind the keys that count.
    """
    exists = jnp.arange(made.shape[2], dtype=jnp.int32)[None] < count[:, None]
    number, rank, keys, values, size = assign(key, value, mean, used, made, exists)
    centroid = jnp.where((size > 0)[..., None], keys / jnp.maximum(size, 1)[..., None].astype(jnp.float32), made + mean)
    start = jnp.cumsum(size, axis=2, dtype=jnp.int32) - size
    # A sort of all keys would be long to compile in each layer.
    each = lax.broadcasted_iota(jnp.int32, number.shape, 2)
    place = jnp.where(used[:, None], pick(start, number) + rank, number.shape[2])
    order = _put_each(jnp.zeros_like(number), each, place)
    return centroid.astype(key.dtype), values.astype(value.dtype), size, start, order
