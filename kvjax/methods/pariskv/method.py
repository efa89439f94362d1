"""ParisKV: keys get votes for their sign patterns; a 4-bit estimate of q.k ranks the keys with the most votes.

Slots fall into regions: sinks, the retrieval zone, and a dense tail of ``num_local`` tokens and less than ``buffer``
more. The step whose token fills the buffer finds the oldest ``buffer`` tokens of the tail in the zone. Every step attends
to the sinks, to the tail and, per KV head, to the ``budget`` best keys of the zone. Rows shorter than ``dense_below``
attend to all tokens.

Stored: all keys and values; 144 bytes of code per key at D = 128; and the number of the zone's keys in each cluster. The code
of a key is a cluster id for each slice of 8 rotated channels (its signs), 4 bits per channel, and a bfloat16 weight per
slice. Levels and weights share a row of 128 bytes, 32 of them empty.

Score, where y and q~ are the rotated key and the rotated mean query of the group, b a slice and ids(i)_b key i's cluster::

    votes[i] = sum over b of  #{ z in .05 .15 .30 .50 .75 1 : before_b[ids(i)_b] < rho * zone * z }
    s[i]     = sum over b of  weight[i, b] * (decoded direction of y_b) . q~_b

``before_b[c]`` counts the zone's keys in clusters whose sign vector has a larger product with q~_b than the sign vector of c.
The ``beta * zone`` keys with the most votes are candidates. A step attends to the ``budget`` best of them by s, an estimate
of q.k.

**Source**: "ParisKV: Fast and Drift-Robust KV-Cache Retrieval for Long-Context LLMs" (arXiv:2602.07721); amy-77/ParisKV
db7ad7f for the schedule of rho and beta, the group's mean query, the levels (in bfloat16) and when a flush comes.

**Departures**: among candidates with equal votes at the cut the lowest slot is taken first; in the code's kernel the order
of atomics decides. The oldest tokens of local window *and* buffer join the zone, as in the code; in the paper only tokens
of the local window do, which can be smaller than the buffer. A token is encoded when it arrives and counted later, one per
step; the code encodes a whole buffer at once. The state is the same, and the work per step is constant. A flush ends the
step before the one whose token fills the buffer, so ``num_local`` is at least 2. Keys and queries are rotated and averaged
in float32, in the code in bfloat16; so signs and levels of channels near a bound may differ. Neither keys nor the query are
divided by their norm: the weight of a key contains its norm again, and the norm of the query does not change the ranking.
So there is no switch for it. What the rotation gives: docs/notebook/readings-others.md. Shares of the zone are rounded to
millionths. A key's levels and weights take 128 bytes, a line of memory, in place of the paper's 96. Three bugs of the code
are not replicated: offloading writes a slot late, batch rows above 0 are re-ranked with wrong codes, and generated tokens
are rotated one position too far in all layers but the first.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.attention.over_cache import Selection
from kvjax.cache import LayerCache, LayerStorage
from kvjax.cache.divided import total
from kvjax.cache.offload import Near
from kvjax.methods.budgets import scaled
from kvjax.methods.pariskv import divided, hashing
from kvjax.protocol.fields import number
from kvjax.protocol.method import Prompt, Step
from kvjax.protocol.slots import SlotMethod, count_all
from kvjax.protocol.typing import pytree, static, traced
from pallas_kernels.choose.pariskv.choice import choice
from pallas_kernels.choose.pariskv.collision.votes import sizes
from pallas_kernels.choose.pariskv.rerank import Regions
from pallas_kernels.store.pariskv.encode import encode
from pallas_kernels.store.pariskv.store_codes import store_codes

SCHEDULE = (
    (5_000, 0.50, 0.50),
    (10_000, 0.30, 0.25),
    (30_000, 0.25, 0.20),
    (None, 0.20, 0.10),
)  # tokens of the zone below which it applies, rho, beta
_BLOCK = 4096  # slots encoded at once when an index is built, which bounds the memory needed


@pytree
class Index:
    """The codes of the stored keys, which are zero for empty slots, and the counts of clusters."""

    ids: Array  # uint8 [B, H, S, N], see `pallas_kernels.store.pariskv.encode.encode`
    rows: Array  # uint8 [B, H, S, D], see `pallas_kernels.store.pariskv.encode.encode`
    stop: Array  # int32 [B], the retrieval zone is the slots from num_sink to here
    counts: Array  # int32 [B, H, N, 256], keys of the zone in each cluster
    next: Array  # int32 [B, H, N, 256], keys of the buffer so far, which the next flush adds to `counts`


@pytree
class ParisKV(SlotMethod):
    """Collision votes, then re-ranking by quantized keys; see the module docstring."""

    budget: int | Array = traced("tokens retrieved from the zone per KV head", default=100, least=1, within="capacity")
    capacity: int = static("entries allocated for them; None = budget", default=None, least=1)
    rho: float | Array | None = traced(
        "share of the zone's keys that get votes, per slice; None = from the zone's length", default=None, above=0, most=1
    )
    beta: float | None = static(
        "share of the zone to re-rank, at most rho; None = from the zone's length", default=None, above=0, most=1
    )
    num_sink: int = static("first tokens, always attended", default=64, least=0)
    num_local: int = static("newest tokens, always attended", default=256, least=2)
    buffer: int = static("tokens that join the zone together", default=512, least=1)
    dense_below: int = static("shorter rows attend to all tokens", default=2000, least=0)
    offload: bool | float = static("keys and values in host memory, or a share of layers", default=False, least=0, most=1)

    PAPER: ClassVar[str] = "arXiv:2602.07721"
    seed = 42  # seed of the rotation's signs

    slot_block = 1

    @classmethod
    def at_length(cls, length: int) -> tuple[dict[str, Any], str]:
        share, note = scaled(2000, length)  # rows below 2000 tokens are dense
        paper = {"budget": 100, "num_sink": 64, "num_local": 256, "buffer": 512, "dense_below": 2000}
        return {knob: max(int(value * share), 1) for knob, value in paper.items()}, note

    def check(self) -> None:
        rho, beta = number(self.rho), number(self.beta)
        if rho is not None and beta is not None and rho < beta:
            raise ValueError(f"ParisKV: rho must be at least beta={beta}, got rho={rho}")

    def near(self, slots: int, room: int) -> Near:
        return Near(first=self.num_sink, newest=self.num_local + self.buffer)

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Index]:
        dim = cache.key.shape[-1]
        if dim < hashing.SLICE or dim & (dim - 1):
            raise ValueError(f"ParisKV: head_dim must be a power of two of at least {hashing.SLICE}, got {dim}")
        stop = jnp.maximum(cache.cursor - self.num_local, self.num_sink)
        full = self._beyond(cache, stop) // self.buffer * self.buffer  # with a buffer of one token the first step fills it
        return cache, self.index(cache, stop + full)

    def index(self, cache: LayerCache, stop: Array) -> Index:
        """Build the index for a zone that ends at slot ``stop`` int32 [B], from scratch; steps keep the same state."""
        batch, heads, slots, dim = cache.key.shape
        size, slices = min(_BLOCK, slots), dim // hashing.SLICE
        waiting = stop + self._beyond(cache, stop)
        empty, signs = jnp.zeros((batch, heads, slices, hashing.CLUSTERS), jnp.int32), hashing.random_signs(self.seed, dim)
        # Zeros that depend on nothing are made for all layers at the start of a program.
        stop, zero = lax.optimization_barrier((stop, jnp.zeros((), jnp.uint8)))
        index = Index(
            ids=jnp.full((batch, heads, slots, slices), zero),
            rows=jnp.full((batch, heads, slots, dim), zero),
            stop=stop,
            counts=empty,
            next=empty,
        )

        def block(number: Array, index: Index) -> Index:
            start = jnp.minimum(number * size, slots - size)  # the last block overlaps the block before it
            slot = (start + jnp.arange(size, dtype=jnp.int32))[None, None]
            place = cache.first + slot if cache.parts > 1 else slot  # among the slots of all devices
            valid = lax.dynamic_slice_in_dim(cache.valid, start, size, 2)
            keys = lax.dynamic_slice_in_dim(cache.key, start, size, 2)
            ids, rows = encode(keys, valid, signs, scale=hashing.rotation_scale(dim))
            first = valid & (slot >= number * size) & (place >= self.num_sink)
            inside, soon = first & (place < _rows(stop)), first & (place >= _rows(stop)) & (place < _rows(waiting))
            return Index(
                ids=lax.dynamic_update_slice_in_dim(index.ids, ids, start, 2),
                rows=lax.dynamic_update_slice_in_dim(index.rows, rows, start, 2),
                stop=stop,
                counts=index.counts + hashing.cluster_counts(ids, inside),
                next=index.next + hashing.cluster_counts(ids, soon),
            )

        index = lax.fori_loop(0, -(-slots // size), block, index)
        if cache.parts == 1:
            return index
        return dataclasses.replace(index, counts=total(index.counts, cache), next=total(index.next, cache))

    def select(self, cache: LayerStorage, aux: Index, step: Step) -> Selection | None:
        slots = cache.row_slots
        if self._always_dense(slots):
            return None
        candidates = self._allocated(slots)
        # Long rows list their regions. Short rows are dense and list their first slots, at most `bound`.
        capacity, least = self.capacity, self.num_sink + self.num_local
        bound = max(self.dense_below, least + 2 * capacity, least + self.buffer + 1) - 1
        best = min(capacity, candidates)
        size = max(least + best + self.buffer, min(bound, slots))
        regions = Regions(
            sinks=self.num_sink,
            best=best,
            tail=self.num_local + self.buffer,
            size=max(size, min(-(-size // 16) * 16, slots)),  # whole packs, by which attention sees where a list ends
        )
        signs, scale = hashing.random_signs(self.seed, cache.key.shape[3]), hashing.rotation_scale(cache.key.shape[3])
        if cache.parts > 1:
            index = aux.ids, aux.rows, aux.counts, aux.stop
            return divided.choose(
                step.query[..., 0, :],
                signs,
                cache,
                index,
                self._shares(),
                self.budget,
                self._enough(),
                regions=regions,
                capacity=candidates,
                scale=scale,
            )
        chosen, mask = choice(
            step.query[..., 0, :],
            signs,
            aux.counts,
            aux.ids,
            aux.rows,
            cache.position,
            cache.cursor,
            aux.stop,
            self._shares(),
            self.budget,
            self._enough(),
            first=self.num_sink,
            capacity=candidates,
            regions=regions,
            scale=scale,
        )
        return Selection(slots=chosen, mask=mask)

    def update(self, cache: LayerStorage, aux: Index, step: Step, mass: Array | None) -> tuple[LayerStorage, Index]:
        dim = cache.key.shape[3]
        if cache.parts > 1:
            index = aux.ids, aux.rows, aux.counts, aux.next, aux.stop
            sizes = {"num_local": self._near_next, "buffer": self.buffer, "scale": hashing.rotation_scale(dim)}
            made = divided.store(cache, step.position, hashing.random_signs(self.seed, dim), index, **sizes)
            return cache, Index(**dict(zip(("ids", "rows", "counts", "next", "stop"), made, strict=True)))
        key, copies = cache.newest_key if step.position.shape[1] == 1 else (cache.key, cache.rows)
        ids, rows, counts, waiting, stop = store_codes(
            key,
            cache.position,
            step.position,
            cache.cursor,
            hashing.random_signs(self.seed, dim),
            aux.ids,
            aux.rows,
            aux.counts,
            aux.next,
            aux.stop,
            num_local=self._near_next,
            buffer=self.buffer,
            scale=hashing.rotation_scale(dim),
            rows=copies,
        )
        return cache, Index(ids=ids, rows=rows, stop=stop, counts=counts, next=waiting)

    def count(self, cache: LayerStorage, aux: Index, shared: Any) -> tuple[Array, Array]:
        stored, none = count_all(cache)
        if self._always_dense(cache.row_slots):
            return stored, none
        slot = cache.first + jnp.arange(cache.num_slots, dtype=jnp.int32)[None, None]
        kept = cache.valid & ((slot < self.num_sink) | (slot >= _rows(aux.stop)))
        zone, candidates, _ = sizes(aux.counts, self._shares(), self._allocated(cache.row_slots))
        slices = aux.ids.shape[3]
        metadata = zone * slices + candidates * aux.rows.shape[3]
        attended = total(jnp.sum(kept, axis=2, dtype=jnp.int32), cache) + jnp.minimum(candidates, self.budget)
        dense = ((cache.cursor < self._enough()) | (aux.stop <= self.num_sink))[:, None]  # rows that attend to all tokens
        return jnp.where(dense, stored, attended), jnp.where(dense, none, metadata.astype(jnp.float32))

    def counters(self, aux: Index, shared: Any) -> dict[str, Array]:
        return {"retrieval": (aux.stop - self.num_sink).astype(jnp.float32)}

    @property
    def _near_next(self) -> int:
        """The stored tokens that are in the local window of the next step, whose own token is in it too."""
        return self.num_local - 1

    def _beyond(self, cache: LayerStorage, stop: Array) -> Array:
        """Count the tokens from ``stop`` on that the next step's local window leaves out, int32 [B]."""
        return jnp.maximum(cache.cursor - stop - self._near_next, 0)

    def _shares(self) -> Array:
        """Build the schedule for `collision`, int32 [4, 8]: per row the zone length at its end, and shares in millionths."""
        column = np.array([[0 if end is None else end, rho, beta] for end, rho, beta in SCHEDULE], np.float32).T
        # Numbers of the schedule are constants of the program, which no step computes.
        ends, rho, beta = (
            made if given is None else jnp.full(made.shape, given, jnp.float32)
            for made, given in zip(column, (None, self.rho, self.beta), strict=True)
        )
        tiers = rho[:, None] * np.array(hashing.TIERS, np.float32)[None]
        parts = [hashing.parts_of(x) for x in (beta[:, None], tiers)]
        first = ends[:, None].astype(np.int32)
        whole = all(isinstance(x, np.ndarray) for x in parts)
        return jnp.asarray(np.concatenate([first, *parts], axis=1)) if whole else jnp.concatenate([first, *parts], axis=1)

    def _allocated(self, slots: int) -> int:
        """Compute the most candidates that a cache of ``slots`` slots can have."""
        zone = max(slots - self.num_sink - self.num_local, 0)
        if self.beta is not None:
            return hashing.most_of(self.beta, zone)
        return max(hashing.most_of(beta, zone if end is None else min(zone, end - 1)) for end, _, beta in SCHEDULE)

    def _always_dense(self, slots: int) -> bool:
        """Decide whether the cache is too small for a row that selects, with any budget."""
        return slots < max(self.dense_below, self.num_sink + self.num_local + 2)

    def _enough(self) -> Array:
        """Compute the least number of stored tokens with which a row selects, int32."""
        return jnp.maximum(self.dense_below, self.num_sink + self.num_local + 2 * self.budget)


def _rows(x: Array) -> Array:
    """Reshape [B] to [B, 1, 1]."""
    return x[:, None, None]
