"""KVgrad: read the prompt again, and keep the tokens whose attention the model's last hidden states depend on most.

Stored after the prompt: ``budget`` slots per KV head, as the mean over all heads of all layers, and every later token. No
query is known, so one cache serves all later questions. A head keeps at most ``floor(head_factor * budget)`` slots, which are
allocated for each head of a layer; ``head_factor`` is one number, or one for each layer, as in `KVzip`.

The prompt is read again in chunks, as in `KVzip`. Each chunk's pass is followed by its reverse, which gives the gradient of
the squares of the last layer's hidden states h, summed over the tokens that are read, with respect to what attention adds to
the residual stream a in every layer. Score of token i of a chunk for KV head h of layer l::

    s[h, i] = max over queries t of this reading and query heads g of p_t,g[i] * |v_i W_g| * |d sum |h|^2 / d a_t|

where p_t,g is KVzip's softmax, and W_g the output projection of query head g. The slots with the best scores of all heads and
layers stay, and the first ``num_sink`` tokens; with ``layerwise``, each layer keeps the best of its own heads.

A second reading and its reverse take seven times as long as the first (1.5B, 16K, H200). The reverse needs what every layer
has computed on a chunk, about eight times the MLP's width for each token and layer: with the default chunk 3.5 GiB for each
row of an 8B model in 16 bits. A smaller ``chunk`` needs less.

**Source**: "KVgrad" (openreview.net/forum?id=cg1wTCJjjk), read in the code of NVIDIA/kvpress 0.5.5, KVgradPress; it builds on
Kim et al., "KVzip" (arXiv:2505.23416).

**Departures**: those of `KVzip`, which has the same texts and the same bound on what a head keeps. Attention to the prompt is
reversed for some queries at a time, so that no map of all probabilities is in memory. Heads cannot be divided over devices.
"""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.over_cache import attend_behind
from kvjax.attention.sinks import with_sinks
from kvjax.cache import LayerCache
from kvjax.methods.rereading import Rereading
from kvjax.protocol.method import Inputs, Prompt, Reading
from kvjax.protocol.slots import SlotState
from kvjax.protocol.typing import not_none, pytree, static
from pallas_kernels import axes
from pallas_kernels.dispatch import run_shared
from pallas_kernels.numerics import product_precision
from pallas_kernels.soft_cap import capped

_BLOCK = 64  # queries whose logits are in memory at once


@pytree
class KVgrad(Rereading):
    """Keep what the last hidden states depend on; see the module docstring."""

    chunk: int = static("tokens that are reread at once", default=512, least=1)

    PAPER: ClassVar[str] = "arXiv:2505.23416"  # KVzip's, on which it builds; its own is not there

    probes = True

    def reread(self, states: tuple[SlotState, ...], reading: Reading) -> tuple[SlotState, ...]:
        if axes.is_split(axes.MODEL):  # a device's part of a sum over heads has another derivative than the sum
            raise ValueError("KVgrad cannot run where a mesh divides the heads, got devices on the axis 'model'")
        caches = tuple(state.cache.resident() for state in states)

        def read(index: Array | int, size: int, scores: tuple[Array, ...]) -> tuple[Array, ...]:
            tokens, count, _ = self.piece(reading, index, size)
            begin = self.num_sink + index * size

            def squares(nudges: Any) -> tuple[Array, Any]:
                found, stream = reading.apply(caches, tokens, count, _attend, nudges)
                real = jnp.arange(stream.shape[1], dtype=jnp.int32)[None] < count[:, None]
                return jnp.sum(jnp.where(real[..., None], jnp.square(stream.astype(jnp.float32)), 0)), (found, stream)

            still = [jnp.zeros((), jnp.float32) for _ in caches]
            shape = jax.eval_shape(squares, still)[1][1].shape
            still = [jnp.zeros(shape, jnp.float32) for _ in caches]
            found, (passed, _) = jax.grad(squares, has_aux=True)(still)
            new = []
            for cache, score, gradient, (query, lse, position, kernel) in zip(caches, scores, found, passed, strict=True):
                given = score, cache, query, lse, position, begin, size
                weight = jnp.linalg.norm(gradient, axis=2)
                new.append(run_shared(type(self).raised, self, *given, weight=weight, kernel=kernel))
            return tuple(new)

        none = tuple(jnp.zeros(cache.position.shape, jnp.float32) for cache in caches)
        scores = reading.once(self.kind, states, lambda: self.each_chunk(reading, read, none))
        return self.marked(states, caches, scores)

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, None]:
        return cache.compact(*self.kept(cache, prompt), room), None


def _attend(cache: LayerCache, inputs: Inputs) -> tuple[Array, tuple[Array, ...]]:
    """Attend behind the prompt by an operation that can be reversed; return what scores need."""
    query, key = inputs.rotated()
    out, lse = run_shared(_behind, query, key, inputs.value, cache, inputs.position, inputs.sinks)
    return out, (*map(lax.stop_gradient, (query, lse)), inputs.position, not_none("written", inputs.written)[1])


@jax.custom_vjp
def _behind(*given: Any) -> tuple[Array, Array]:
    """Run `attend_behind`: return the output, and lse over the tokens themselves. The cache has no gradient."""
    return _forward(*given)[0]


def _forward(
    query: Array, key: Array, value: Array, cache: LayerCache, position: Array, sinks: Array | None
) -> tuple[tuple[Array, Array], tuple]:
    out, lse, (_, past) = attend_behind(query, key, value, cache, position, sinks)
    whole = with_sinks(out, jnp.logaddexp(lse, past), sinks)[1]
    whole = jnp.where((position >= 0)[:, None, None], whole, jnp.inf)
    return (out, lse), (query, key, value, cache, position, out, whole)


def _reverse(kept: tuple, gradient: tuple[Array, Array]) -> tuple[Array | None, ...]:
    """Compute the gradients of query, key and value from the denominators of the softmax."""
    query, key, value, cache, position, out, whole = kept
    tokens, scale, exact = query.shape[3], 1 / math.sqrt(query.shape[-1]), product_precision(query.dtype)
    product = functools.partial(jnp.einsum, precision=exact, preferred_element_type=jnp.float32)
    mean = jnp.sum(gradient[0].astype(jnp.float32) * out.astype(jnp.float32), axis=4)
    asked = query, gradient[0], whole, mean

    def part(asked: tuple[Array, ...], keys: Array, values: Array, seen: Array) -> tuple[Array, Array]:
        """Compute the probabilities of keys, and the gradients of their products."""
        query, wanted, whole, mean = asked
        logits, back = jax.vjp(capped, product("bh...d,bhsd->bh...s", query, keys) * scale)
        share = jnp.where(seen, jnp.exp(logits - whole[..., None]), 0)
        gain = jnp.einsum("bh...d,bhsd->bh...s", wanted, values, precision=exact)  # large, so in the dtype of the values
        (slope,) = back(share * (gain.astype(jnp.float32) - mean[..., None]))
        return share.astype(query.dtype), (slope * scale).astype(query.dtype)

    def behind(asked: tuple[Array, ...]) -> Array:
        stored = jnp.arange(cache.num_slots, dtype=jnp.int32)[None] < cache.cursor[:, None]
        # Else copies of the keys of all layers exist at once.
        asked, keys, values = lax.optimization_barrier((asked, cache.key, cache.value))
        return product("bhgs,bhsd->bhgd", part(asked, keys, values, stored[:, None, None])[1], keys)

    # Token by token, some at once.
    far = lax.map(behind, tuple(jnp.moveaxis(x, 3, 0) for x in asked), batch_size=min(_BLOCK, tokens))
    own = jnp.tri(tokens, dtype=bool)[None] & (position >= 0)[:, None]
    share, slope = part(asked, key, value, own[:, None, None])
    queries = jnp.moveaxis(far, 0, 3) + product("bhgts,bhsd->bhgtd", slope, key)
    keys, values = (product("bhgts,bhgtd->bhsd", *x) for x in ((slope, query), (share, gradient[0])))
    return *(x.astype(query.dtype) for x in (queries, keys, values)), None, None, None


_behind.defvjp(_forward, _reverse)
