"""AttentionMatching: few slots with biases and new values, which answer the queries of a second reading as all tokens did.

Stored after the prompt: ``budget`` slots per KV head, as the mean over all heads of all layers, and every later token. A slot
of the prompt has the key of a token, a bias, and a value of its own; the bias is two more channels of the key, in rows of a
multiple of 16 numbers. No question is known, so one cache serves all later questions. A head keeps at most
``floor(head_factor * budget)`` slots, which are allocated for each head of a layer; see `KVzip` for ``head_factor``.

The prompt is read again in chunks, and tokens are scored by the largest attention that they receive, as in `KVzip`::

    s[h, i] = max over queries t of this reading and query heads g of p_t,g[i]

The slots with the best scores of all heads and layers stay, and the first ``num_sink`` tokens. Then each KV head is fitted to
N = ``queries`` queries of the second reading: evenly spaced tokens, with all query heads of the group. With the logits x of
query n to all tokens of the prompt, their maximum m[n], and the kept tokens j::

    M[n, j] = exp(x[n, j] - m[n]);   w = the weights with the least |M w - sum over all i of exp(x[n, i] - m[n])|^2
    bias[j] = log w[j],  e^-3 <= w[j] <= e^3
    P[n, j] = softmax over j of x[n, j] + bias[j]
    value = the values with the least |P value - attention of query n to the whole prompt|^2

w begins as 1 and takes 16 steps of projected gradient descent. The values are a ridge regression: their squared distance from
the tokens' own values counts, times ``ridge`` and the mean square of a column of P.

**Source**: Zweiger et al., "Fast KV Compaction via Attention Matching" (arXiv:2602.16284); adamzweiger/compaction 2e59cc8:
keys of the highest attention, chosen in all heads together ("global", "max"), queries by repetition ("repeat"), bounds.

**Departures**: the released code scores by a softmax over all of the prompt, and this by KVzip's, over the chunk that is
repeated. For w it solves least squares, cuts, and takes 2 steps. It fits values without a penalty in its settings, or with
one towards zero; here the penalty is towards what was stored, so that tokens that no sampled query asks for keep their
values. Its other scores (mean, root mean square), matching pursuit, budgets of heads measured beforehand, queries of answers
that the model makes up, and queries of the compacted model ("on-policy") are left out. It draws queries at random. It pads
heads with biases of -inf; here these slots are empty. The texts that ask for the repetition are KVzip's.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.over_cache import attend_behind
from kvjax.cache import LayerCache
from kvjax.cache.packed_keys import ThinCache, biased
from kvjax.methods.rereading import Rereading
from kvjax.protocol.method import Inputs, Prompt, Reading
from kvjax.protocol.slots import SlotState
from kvjax.protocol.typing import not_none, pytree, static
from kvjax.selection import kept_positions, pick
from pallas_kernels.dispatch import run_shared
from pallas_kernels.numerics import finite_or_zero, product_precision
from pallas_kernels.soft_cap import capped

_EXACT = product_precision(jnp.float32)
_BOUND = math.exp(3)  # of a slot's weight, and its inverse
_DESCENTS = 16  # steps of projected gradient descent
_FEW = 512  # slots of a head that are not worth a second program
_BLOCK = 16  # sampled tokens whose logits of the whole prompt are in memory at once


@pytree
class Asked:
    """The queries of N tokens of the second reading, and what they found in the whole prompt."""

    query: Array  # [B, H, G, N, D], rotated
    out: Array  # [B, H, G, N, D]
    lse: Array  # float32 [B, H, G, N]; -inf where there is no query
    most: Array  # float32 [B, H, G, N], the largest logit of any token of the prompt; 0 until all are read


@pytree
class AttentionMatching(Rereading):
    """Fit few slots to the attention of a second reading; see the module docstring."""

    queries: int = static("queries of each KV head to which its slots are fitted", default=4096, least=1)
    ridge: float = static("weight of the distance from the tokens' own values", default=0.1, above=0)

    PAPER: ClassVar[str] = "arXiv:2602.16284"
    TITLE: ClassVar[str] = "Attention Matching"

    cuts = (*Rereading.cuts, "ridge")
    lacks = ("codes", "latent")
    packs = True

    def reread(self, states: tuple[SlotState, ...], reading: Reading) -> tuple[SlotState, ...]:
        caches = tuple(state.cache.resident() for state in states)

        def read(index: Array | int, size: int, found: tuple) -> tuple:
            tokens, count, first = self.piece(reading, index, size)
            at = self._places(found[0][1], reading.length, self.num_sink + index * size, size, first)

            def attend(state: tuple[LayerCache, Array, Asked], inputs: Inputs) -> tuple[Array, tuple]:
                cache, score, asked = state
                query, key = inputs.rotated()
                out, lse, past = run_shared(attend_behind, query, key, inputs.value, cache, inputs.position, inputs.sinks)
                given = score, cache, query, lse, inputs.position, self.num_sink + index * size, size
                score = run_shared(type(self).raised, self, *given)
                return out, (cache, score, _sampled(asked, at, query, past))

            given = tuple((cache, *old) for cache, old in zip(caches, found, strict=True))
            return tuple(tuple(new) for _, *new in reading.apply(given, tokens, count, attend)[0])

        scores = (jnp.zeros(cache.position.shape, jnp.float32) for cache in caches)
        none = tuple(zip(scores, (self._none(not_none("prompt", state.prompt)) for state in states), strict=True))

        def find() -> tuple[tuple[Array, Asked], ...]:
            found = zip(caches, self.each_chunk(reading, read, none), strict=True)
            return tuple((score, run_shared(_with_most, asked, cache.key, cache.valid)) for cache, (score, asked) in found)

        return self.marked(states, caches, *zip(*reading.once(self.kind, states, find), strict=True))

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[ThinCache, None]:
        slots, keep = self.kept(cache, prompt)
        position, _ = kept_positions(cache.position, slots, keep, 0)
        key, value, asked = pick(cache.key, slots), pick(cache.value, slots), prompt.asked
        bias = jnp.zeros(slots.shape, jnp.float32)
        if asked is not None:
            asked = jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:]), asked)
            heads = (asked.query, asked.out, asked.lse, asked.most, key, value, keep)
            flat = lax.map(self._fitted, tuple(x.reshape(-1, *x.shape[2:]) for x in heads))
            bias, value = (x.reshape(*slots.shape, *x.shape[2:]) for x in flat)
        return biased(key, value, bias, position, room), None

    def _fitted(self, given: tuple[Array, ...]) -> tuple[Array, Array]:
        """Run `_fit` for one head, on the first half of its slots if all that count are there: few heads fill their slots."""
        query, out, lse, most, key, value, keep = given
        every, half = len(keep), len(keep) // 2

        def first(size: int) -> tuple[Array, Array]:
            bias, new = _fit(query, out, lse, most, key[:size], value[:size], keep[:size], ridge=self.ridge)
            return jnp.pad(bias, (0, every - size)), jnp.concatenate([new, value[size:]])

        if every <= _FEW:
            return first(every)
        return lax.cond(keep[half], lambda: first(every), lambda: first(half))

    def _none(self, prompt: Prompt) -> Asked:
        """Make room for the sampled queries."""
        shape = (*prompt.query.shape[:3], -(-self.queries // prompt.query.shape[2]))
        rows = jnp.zeros((*shape, prompt.query.shape[4]), prompt.query.dtype)
        return Asked(query=rows, out=rows, lse=jnp.full(shape, -jnp.inf, jnp.float32), most=jnp.zeros(shape, jnp.float32))

    def _places(self, asked: Asked, length: Array, begin: Array | int, size: int, first: Array) -> Array:
        """Place the sampled tokens in a piece that has the prompt's tokens ``begin`` to ``begin + size`` from ``first`` on.

        Returns:
            int32 [B, N], below 0 for tokens that are not in this piece.
        """
        count = asked.lse.shape[3]
        rest = jnp.maximum(length - self.num_sink, 0)[:, None]
        order = jnp.arange(-1, count, dtype=jnp.int32)[None]
        at = self.num_sink + order * rest // count
        inside = (at[:, 1:] > at[:, :-1]) & (at[:, 1:] >= begin) & (at[:, 1:] < jnp.minimum(begin + size, length[:, None]))
        return jnp.where(inside, first + at[:, 1:] - begin, -1)


def _sampled(asked: Asked, at: Array, query: Array, past: tuple[Array, Array]) -> Asked:
    """Record the queries [B, H, G, T, D] at ``at`` int32 [B, N], below 0 where this chunk does not have them.

    ``past`` is their attention to the prompt: output [B, H, G, T, D], and lse float32 [B, H, G, T].
    """

    def put(old: Array, new: Array) -> Array:
        index, held = (x.reshape(len(at), 1, 1, -1, *(1,) * (new.ndim - 4)) for x in (jnp.maximum(at, 0), at >= 0))
        return jnp.where(held, jnp.take_along_axis(new, index, axis=3).astype(old.dtype), old)

    return dataclasses.replace(asked, query=put(asked.query, query), out=put(asked.out, past[0]), lse=put(asked.lse, past[1]))


def _with_most(asked: Asked, key: Array, valid: Array) -> Asked:
    """Fill in the largest logits over all keys [B, H, S, D] that are ``valid`` bool [B, H, S]."""
    query = jnp.moveaxis(asked.query, 3, 0)
    most = lax.map(lambda x: jnp.max(_logits(x, key, valid), axis=3), query, batch_size=min(_BLOCK, len(query)))
    return dataclasses.replace(asked, most=jnp.moveaxis(most, 0, 3))


def _logits(query: Array, key: Array, held: Array) -> Array:
    """Compute logits float32 [..., N, S] of query [..., N, D] and key [..., S, D], -inf where not ``held`` bool [..., S]."""
    exact = product_precision(key.dtype)
    products = jnp.einsum("...nd,...sd->...ns", query, key, precision=exact, preferred_element_type=jnp.float32)
    return jnp.where(held[..., None, :], capped(products / math.sqrt(key.shape[-1])), -jnp.inf)


def _fit(
    query: Array, out: Array, lse: Array, most: Array, key: Array, value: Array, keep: Array, *, ridge: float
) -> tuple[Array, Array]:
    """Fit the slots of one head: the bias float32 [K], and the values [K, D].

    Args:
        query: [N, D]; ``out`` [N, D], ``lse`` and ``most`` float32 [N] as in `Asked`, of all query heads.
        key: [K, D], the keys that stay; ``value`` [K, D] and ``keep`` bool [K], False for entries that do not count.
    """
    real = lse > -jnp.inf
    kept = _logits(query, key, keep)
    mass = jnp.where(real[:, None], jnp.exp(kept - finite_or_zero(most)[:, None]), 0)
    whole = jnp.where(real, jnp.exp(lse - finite_or_zero(most)), 0)
    bias = jnp.where(keep, jnp.log(_descended(mass, whole)), 0)
    share = jnp.where(real[:, None], jax.nn.softmax(kept + bias[None], axis=1), 0)
    old = value.astype(jnp.float32)
    missing = jnp.where(real[:, None], out.astype(jnp.float32) - jnp.matmul(share, old, precision=_EXACT), 0)
    new = old + _ridge(share, missing, keep, ridge)
    return bias, new.astype(value.dtype)


def _ridge(columns: Array, target: Array, keep: Array, ridge: float) -> Array:
    """Solve ``columns`` [N, K] x = ``target`` [N, E] by least squares with a penalty on x: float32 [K, E], 0 if it fails."""
    weight = ridge * jnp.sum(jnp.square(columns)) / jnp.maximum(jnp.sum(keep, dtype=jnp.float32), 1)
    few = len(columns) < columns.shape[1]
    square = _square(columns if few else columns.T)
    square += (weight + jnp.finfo(jnp.float32).tiny) * jnp.eye(len(square))
    factor = jax.scipy.linalg.cho_factor(square)
    if few:
        found = jnp.matmul(columns.T, jax.scipy.linalg.cho_solve(factor, target), precision=_EXACT)
    else:
        found = jax.scipy.linalg.cho_solve(factor, jnp.matmul(columns.T, target, precision=_EXACT))
    return jnp.where(jnp.all(jnp.isfinite(found)), found, 0)


def _square(rows: Array) -> Array:
    """Multiply ``rows`` float32 [N, K] by their transpose: [N, N], exact to 2^-16.

    It is most of a head's work, and GPUs multiply numbers of 16 bits ten times as fast: so each is the sum of two.
    """
    high = lax.reduce_precision(rows, 8, 7)
    parts = [x.astype(jnp.bfloat16) for x in (high, rows - high)]
    both, once = (jnp.matmul(parts[0], part.T, preferred_element_type=jnp.float32) for part in parts)
    return both + once + once.T


def _descended(columns: Array, target: Array) -> Array:
    """Lower ``|columns weight - target|`` from a weight of ones, float32 [K], by projected gradient descent in the bounds."""

    def gradient(given: Array, target: Array | float) -> Array:
        return jnp.matmul(columns.T, jnp.matmul(columns, given, precision=_EXACT) - target, precision=_EXACT)

    def power(_: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        vector = gradient(carry[0], 0.0)
        norm = jnp.linalg.norm(vector)
        return vector / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny), norm

    def descend(_: int, weight: Array) -> Array:
        return jnp.clip(weight - gradient(weight, target) / jnp.maximum(norm, 1e-6), 1 / _BOUND, _BOUND)

    ones = jnp.ones(columns.shape[1], jnp.float32)
    _, norm = lax.fori_loop(0, 4, power, (ones, jnp.float32(0)))  # the largest eigenvalue of the columns' square
    return lax.fori_loop(0, _DESCENTS, descend, ones)
