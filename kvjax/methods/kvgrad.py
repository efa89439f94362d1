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

A second reading and its reverse cost three times the first reading or more. The reverse needs what every layer has computed
on a chunk, about eight times the MLP's width for each token and layer: with the default chunk 3.5 GiB for each row of an 8B
model in 16 bits. A smaller ``chunk`` needs less.

**Source**: "KVgrad" (openreview.net/forum?id=cg1wTCJjjk), read in the code of NVIDIA/kvpress 0.5.5, KVgradPress; it builds on
Kim et al., "KVzip" (arXiv:2505.23416).

**Departures**: those of `KVzip`, which has the same texts and the same bound on what a head keeps. Attention of the reverse
pass is computed in blocks of queries, so that no map of all probabilities is in memory. Heads cannot be divided over devices.
"""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.sinks import with_sinks
from kvjax.cache import LayerCache
from kvjax.methods.rereading import Rereading
from kvjax.protocol.method import Inputs, Prompt, Reading
from kvjax.protocol.slots import SlotState
from kvjax.protocol.typing import not_none, pytree, static
from pallas_kernels import axes
from pallas_kernels.attend.prefix_attention import prefix_attention
from pallas_kernels.dispatch import run_shared
from pallas_kernels.numerics import finite_or_zero, product_precision
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
            for cache, score, gradient, (query, key, position, kernel) in zip(caches, scores, found, passed, strict=True):
                scale = 1 / math.sqrt(query.shape[-1])
                _, lse = prefix_attention(query, key, key, start=0, length=count, scale=scale)
                weight = jnp.linalg.norm(gradient, axis=2)
                given = score, cache, query, lse, position, begin, size
                new.append(run_shared(type(self).raised, self, *given, weight=weight, kernel=kernel))
            return tuple(new)

        none = tuple(jnp.zeros(cache.position.shape, jnp.float32) for cache in caches)
        scores = reading.once(self.kind, states, lambda: self.each_chunk(reading, read, none))
        return self.marked(states, caches, scores)

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, None]:
        return cache.compact(*self.kept(cache, prompt), room), None


def _attend(cache: LayerCache, inputs: Inputs) -> tuple[Array, tuple[Array, ...]]:
    """Attend behind the prompt by operations that can be reversed; return what scores need."""
    query, key = inputs.rotated()
    out = run_shared(_behind, query, key, inputs.value, cache.key, cache.value, cache.valid, inputs.position, inputs.sinks)
    return out, (*map(lax.stop_gradient, (query, key)), inputs.position, not_none("written", inputs.written)[1])


@jax.checkpoint
def _behind(
    query: Array, key: Array, value: Array, past: Array, held: Array, valid: Array, position: Array, sinks: Array | None
) -> Array:
    """Attend with tokens [B, H, G, T, D] to ``past`` keys and ``held`` values [B, H, S, D] and causally to themselves."""
    tokens, exact = query.shape[3], product_precision(query.dtype)
    blocks = -(-tokens // _BLOCK)
    padded = jnp.pad(query, ((0, 0), (0, 0), (0, 0), (0, blocks * _BLOCK - tokens), (0, 0)))

    @jax.checkpoint
    def block(index: Array) -> Array:
        asked = lax.dynamic_slice_in_dim(padded, index * _BLOCK, _BLOCK, 3)
        order = index * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
        own = (jnp.arange(tokens, dtype=jnp.int32)[None] <= order[:, None])[None] & (position >= 0)[:, None]
        # Stored and own tokens apart: joined, they would be copies of all rows, and the reverse would have gradients of each.
        parts = ((past, held, valid[:, :, None, None]), (key, value, own[:, None, None]))

        def logits(keys: Array, seen: Array) -> Array:
            found = jnp.einsum("bhgtd,bhsd->bhgts", asked, keys, precision=exact, preferred_element_type=jnp.float32)
            return jnp.where(seen, capped(found / math.sqrt(asked.shape[-1])), -jnp.inf)

        each = [logits(keys, seen) for keys, _, seen in parts]
        most = functools.reduce(jnp.maximum, (jnp.max(x, axis=4, keepdims=True) for x in each))
        most = lax.stop_gradient(finite_or_zero(most))
        weights = [jnp.exp(x - most) for x in each]
        total = sum(jnp.sum(x, axis=4, keepdims=True) for x in weights)
        out = jnp.zeros((), jnp.float32)
        for weight, (_, values, _) in zip(weights, parts, strict=True):
            share = (weight / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)).astype(values.dtype)
            out += jnp.einsum("bhgts,bhsd->bhgtd", share, values, precision=exact, preferred_element_type=jnp.float32)
        return with_sinks(out.astype(asked.dtype), (jnp.log(total) + most)[..., 0], sinks)[0]

    out = jnp.moveaxis(lax.map(block, jnp.arange(blocks, dtype=jnp.int32)), 0, 3)  # [B, H, G, blocks, _BLOCK, D]
    return out.reshape(*query.shape[:3], -1, query.shape[4])[:, :, :, :tokens]
