"""Oracle: attend to the best tokens by the true attention of each step, as if they were known.

Stored: all keys and values, and the number of tokens that the last step attended to, for the accounting. It counts the rows
that are attended and no search, because a method that knows the best tokens need not look for them. So the score of a method
over the score of the oracle at as many bytes says how much a better choice of tokens could still give.

Score of token i for query head (h, g), where p is the softmax of the head over all stored tokens, o its output and v the
values, by one of three readings::

    by="attention"   s[h, g, i] = p[h, g, i]
    by="output"      s[h, g, i] = p[h, g, i] / (1 - p[h, g, i]) * | v[h, i] - o[h, g] |
    by="random"      s[h, g, i] = a number that follows from the token's position and the step's

Attention is not contribution: a token may have much attention and a value like the others'. By output the score is how far
the head's output moves if token i alone is left out, its attention times the distance of its value from the mean of all
others. Random is the other end, what as many bytes give without
any choice: the same tokens in all heads of a step, and others in the next step.

With ``heads="sum"`` a KV head attends to the ``budget`` tokens with the largest sum over its query heads. With
``heads="each"`` each query head attends to the ``budget`` tokens that are best for it, and the KV head reads the union: up to
G times as many rows. The step's own token is always attended, and is one of the budget. ``mass`` below 1 leaves out the
tokens that no query head needs (with "each": that this head does not need) to have this share of its attention: top-p.

**Source**: exact top-k of the true attention is the upper end in xAlg-ai/sparse-attention-hub 1a048c9, whose oracle is per
query head and whose sinks and newest tokens are apart; top-p is that of `kvjax.wrappers.Twilight` (arXiv:2502.02770) with
exact shares. The reading by output is this library's own.

**Departures**: sinks and newest tokens compete like all others. A token with all but a millionth of a head's attention has an
infinite score by output, where float32 has no digits left. Choosing each token by its score alone is not the best set: values
may cancel out, and the model's later layers correct or enlarge an error. So a method can score above an oracle.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.attention.over_cache import Selection
from kvjax.cache import LayerCache, LayerStorage
from kvjax.protocol.method import Prompt, Step
from kvjax.protocol.slots import SlotMethod, count_all
from kvjax.protocol.typing import EMPTY, pytree, static, traced
from kvjax.selection import compact, mask_of, pick_each, top_mass, top_slots
from pallas_kernels.numerics import finite_or_zero, product_precision
from pallas_kernels.soft_cap import capped

READINGS = ("attention", "output", "random")
_ALL = 1e-6  # a token that leaves less attention to all others scores inf by output


@pytree
class Oracle(SlotMethod):
    """The best tokens by the true attention of each step; see the module docstring."""

    budget: int | Array = traced("tokens attended per KV head, or per query head", default=1024, least=1, within="capacity")
    capacity: int = static("entries allocated for them; None = budget", default=None, least=1)
    by: str = static('"attention", "output" error, or "random"', default="attention", choices=READINGS)
    heads: str = static('a list by the "sum" over a group, or for "each" query head', default="sum", choices=("sum", "each"))
    mass: float | Array = traced("leave out what is beyond this share of attention; 1 = none", default=1.0, above=0, most=1)

    lacks = ("sinks", "latent")

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Array]:
        return cache, jnp.full(cache.position.shape[:2], EMPTY, jnp.int32)

    def select(self, cache: LayerStorage, aux: Array, step: Step) -> Selection:
        batch, heads, group, _, _ = step.query.shape
        slots, valid = cache.num_slots, cache.valid[:, :, None]
        logits = logits_of(step.query[..., 0, :], cache.key, cache.valid)
        newest = jnp.arange(slots, dtype=jnp.int32)[None, None, None] == cache.cursor[:, None, None, None] - 1
        needed = valid & (top_mass(logits, self.mass) | newest)
        if self.by == "random":
            score = drawn(cache.position, step.position)[:, :, None]
        else:
            score = worth(self.by, logits, cache.value, cache.valid)
        each = self.heads == "each"
        score, needed = (score, needed) if each else (score.sum(axis=2), needed.any(axis=2))
        shape = (batch, heads * group if each else heads, slots)
        score = jnp.broadcast_to(jnp.where(newest if each else newest[:, 0], jnp.inf, score), needed.shape)
        best, listed = top_slots(score.reshape(shape), needed.reshape(shape), self.budget, self.capacity)
        bias = None
        if each:
            own = mask_of(best, listed, slots).reshape(needed.shape)
            best, listed = compact(own.any(axis=2), min(group * self.capacity, slots))
            bias = jnp.where(pick_each(own, best), 0, -jnp.inf)
        found = jnp.where(step.position >= 0, jnp.sum(listed, axis=2, dtype=jnp.int32), EMPTY)
        return Selection(slots=best, mask=listed, bias=bias, select_aux=found)

    def update(self, cache: LayerStorage, aux: Array, step: Step, mass: Array | None) -> tuple[LayerStorage, Array]:
        found = step.select_aux
        return cache, aux if found is None else jnp.where(found >= 0, found, aux)

    def count(self, cache: LayerStorage, aux: Array, shared: Any) -> tuple[Array, Array]:
        """Count what the last step attended to; before the first step the budget."""
        stored, nothing = count_all(cache)
        return jnp.where(aux >= 0, aux, jnp.minimum(stored, self.budget)), nothing


def logits_of(query: Array, key: Array, valid: Array) -> Array:
    """Compute the exact logits of rotated queries [B, H, G, D] to keys [B, H, S, D]: float32 [B, H, G, S], -inf if empty."""
    exact = product_precision(key.dtype)
    logits = jnp.einsum("bhgd,bhsd->bhgs", query, key, precision=exact, preferred_element_type=jnp.float32)
    return jnp.where(valid[:, :, None], capped(logits / math.sqrt(query.shape[-1])), -jnp.inf)


def worth(by: str, logits: Array, value: Array, valid: Array, lse: Array | None = None, out: Array | None = None) -> Array:
    """Score tokens by "attention" or by "output": float32 [B, H, G, S], 0 for an empty slot.

    Args:
        by: the reading; see the module docstring.
        logits: float32 [B, H, G, S], -inf for empty slots.
        value: [B, H, S, D].
        valid: bool [B, H, S].
        lse: float32 [B, H, G] of the softmax, where it has tokens in no slot too; None: it has these alone.
        out: [B, H, G, D], the output of this softmax; None where ``lse`` is None.
    """
    lse = jax.nn.logsumexp(logits, axis=-1) if lse is None else lse
    weight = jnp.exp(logits - finite_or_zero(lse)[..., None])
    if by == "attention":
        return weight
    value = jnp.where(valid[..., None], value, 0).astype(jnp.float32)
    if out is None:
        out = jnp.einsum("bhgs,bhsd->bhgd", weight, value, precision=product_precision(jnp.float32))
    away = jnp.sqrt(jnp.sum(jnp.square(value[:, :, None] - out.astype(jnp.float32)[..., None, :]), axis=-1))
    rest = 1 - weight
    return jnp.where(rest < _ALL, jnp.inf, weight / jnp.maximum(rest, _ALL) * away)


def drawn(position: Array, at: Array) -> Array:
    """Draw a number for each token and step, by the last rounds of MurmurHash3: float32 [B, H, S], whole, below 2**24.

    Args:
        position: int32 [B, H, S], of the tokens.
        at: int32 [B, 1], the position of the step.
    """
    word = position.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) ^ at[:, :, None].astype(jnp.uint32) * jnp.uint32(0x85EBCA77)
    for shift, odd in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        word = (word ^ (word >> shift)) * jnp.uint32(odd)
    return (word >> 8).astype(jnp.float32)
