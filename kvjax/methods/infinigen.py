"""InfiniGen: guess a layer's query from the input of the layer before; select tokens by a few channels of the guess.

Stored: all keys and values; per KV head a matrix P [D, C] in float32, C = floor(ratio * D); for each token its rotated key
times P, C values in the dtype of the keys (at D = 128 in bfloat16, 50 bytes beside the 512 of key and value).

P comes from the prompt. Q [n, D] has the rotated queries that a group of query heads has for the last ``obs_window`` tokens,
and V its right singular vectors (Q = U S V^T). P has the C columns of V with the largest sums of |QV| over the rows. Columns
without energy are 0: columns whose sum is at most sqrt(D * 2^-23) times the largest.

The guess q' of a layer's query applies the layer's own projection, bias, norm and RoPE to the attention input of the layer
before. For KV head h, query head g of its group, and the tokens i before the newest::

    e[h, g, i] = (q'[h, g] P[h]) . (k[h, i] P[h]) / sqrt(D)
    n[h, g]    = number of i with  e[h, g, i] >= max over i of e[h, g, i] - alpha
    s[h, i]    = mean over g of e[h, g, i]

A step attends to its own token, and in each KV head to the best earlier tokens by s: to as many as the mean of n over all
query heads of the layer, rounded down, and to at most ``budget``. A head with at most ``budget`` earlier tokens attends to
all of them. So do layers below ``num_dense_layers``. Layer 0, if it is not dense, takes its own query for the guess.

**Source**: Lee et al., "InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV Cache Management"
(arXiv:2406.19707); snu-comparch/InfiniGen 3754f52: the system code for the columns, each head's own maximum, the token that
is always attended and the 400 of ``budget``; the code for Llama for RoPE and ``alpha`` (4 for OPT).

**Departures**: the code has a rotation for each query head; here a KV head has one, of the queries of its group, and one list
(the mean over the group). The code makes rotations once, from a book, and turns OPT's weights by them; here they come from
the prompt. The code for Llama takes the columns of queries and keys from one short text. It fixes ``budget`` as a share of
the tokens so far, prefills sparsely, and compares all heads with the maximum of the first. The system code counts tokens
over all rows of a batch together. Its limit on the tokens in host memory is left out. Nothing is fetched ahead: the guess is
computed together with the query, so that the weights are read once, and offloaded rows are read when they are attended.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.over_cache import Selection
from kvjax.cache import LayerCache, LayerStorage
from kvjax.methods.eigen import eigenvectors
from kvjax.methods.full import Full
from kvjax.protocol.method import LayerMethod, Prompt, Step
from kvjax.protocol.scan import by_blocks
from kvjax.protocol.slots import SlotMethod, count_all, new_slots, newest_query
from kvjax.protocol.typing import pytree, static, traced
from pallas_kernels import axes
from pallas_kernels.choose.infinigen.partial_select import partial_select, wanted
from pallas_kernels.score.infinigen.partial_score import partial_score
from pallas_kernels.store.infinigen.store_partial import store_partial

_EXACT = lax.Precision.HIGHEST
_ALIGNED = 16  # slots; a kernel reads 16 bytes at once


@pytree
class PartialKeys:
    """The index that is stored in addition to the keys and values."""

    partial: Array  # [B, H, C, N], in the dtype of the keys; 0 for empty slots; N is S, rounded up to `_ALIGNED`
    matrix: Array  # float32 [B, H, D, C], P
    query: Array  # [B, H, G, D], rotated: the row's newest guess, by which accounting counts, or its query if there is none


@pytree
class InfiniGen(SlotMethod):
    """Retrieval by a guess of the query, before the layer runs; see the module docstring."""

    budget: int | Array = traced("most tokens found per KV head, besides its own", default=400, least=1, within="capacity")
    capacity: int = static("entries allocated for them; None = budget", default=None, least=1)
    ratio: float = static("share of the channels that the search reads", default=0.2, above=0, most=1)
    alpha: float | Array = traced("logits below a head's maximum that still count", default=5.0, least=0)
    offload: bool | float = static("keys and values in host memory, or a share of layers", default=False, least=0, most=1)

    PAPER: ClassVar[str] = "arXiv:2406.19707"
    obs_window = 2048  # last prompt tokens, whose queries choose the channels
    num_dense_layers = 2  # first layers, which attend to all tokens

    needs_guess = True

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        return Full() if layer < self.num_dense_layers else self

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, PartialKeys]:
        matrix = self._matrix(prompt)
        keys = by_blocks(lambda key: _times(key, matrix), cache.key)
        keys = jnp.where(cache.valid[..., None], keys, 0).swapaxes(2, 3)
        keys = jnp.pad(keys, ((0, 0), (0, 0), (0, 0), (0, -keys.shape[3] % _ALIGNED)))
        return cache, PartialKeys(partial=keys, matrix=matrix, query=prompt.query[..., -1, :])

    def select(self, cache: LayerStorage, aux: PartialKeys, step: Step) -> Selection:
        query = _guess(step).query[..., 0, :]
        capacity = min(self.capacity + 1, cache.num_slots)
        slots, mask = partial_select(
            *self._search(cache, aux, query),
            jnp.asarray(self.budget, jnp.int32),
            capacity=capacity,
            scale=_scale(query),
            total=axes.total,
            query_heads=_query_heads(query),
        )
        return Selection(slots=slots, mask=mask)

    def update(
        self, cache: LayerStorage, aux: PartialKeys, step: Step, mass: Array | None
    ) -> tuple[LayerStorage, PartialKeys]:
        guess = _guess(step)
        if step.position.shape[1] == 1:
            key, rows = cache.newest_key
            stored, new = (cache.position, cache.cursor), (guess.query[..., 0, :], step.position[:, 0])
            keys, query = store_partial(key, *stored, aux.matrix, *new, aux.partial, aux.query, rows=rows)
        else:
            slot = new_slots(cache, step.position)
            new = _times(cache.keys_at(jnp.where(slot < cache.num_slots, slot, 0)), aux.matrix)
            slot = jnp.where(slot < cache.num_slots, slot, aux.partial.shape[3])  # tokens without a slot are dropped
            row = jnp.arange(len(slot))[:, None]
            keys = aux.partial.at[row, :, :, slot].set(new.swapaxes(1, 2), mode="drop")
            query = newest_query(guess, aux.query)
        return cache, PartialKeys(partial=keys, matrix=aux.matrix, query=query)

    def count(self, cache: LayerStorage, aux: PartialKeys, shared: Any) -> tuple[Array, Array]:
        """Count what a step with the newest guess would attend to; bytes of the partial keys and of the matrix."""
        stored, _ = count_all(cache)
        _, near, before = partial_score(*self._search(cache, aux, aux.query), scale=_scale(aux.query))
        listed = wanted(axes.total(near)[:, None], before, self.budget, _query_heads(aux.query))
        columns = aux.partial.shape[2]
        scanned = stored.astype(jnp.float32) * (columns * aux.partial.dtype.itemsize)
        return jnp.minimum(stored, listed), scanned + aux.matrix.shape[2] * columns * 4

    def _matrix(self, prompt: Prompt) -> Array:
        """Compute P, float32 [B, H, D, C]."""
        dim = prompt.query.shape[4]
        real = prompt.query_position[:, -self.obs_window :] >= 0
        query = jnp.where(real[:, None, None, :, None], prompt.query[..., -self.obs_window :, :].astype(jnp.float32), 0)
        query = query.reshape(*query.shape[:2], -1, dim)
        vectors = eigenvectors(jnp.einsum("bhnd,bhne->bhde", query, query, precision=_EXACT))
        weight = jnp.abs(jnp.einsum("bhnd,bhdc->bhnc", query, vectors, precision=_EXACT)).sum(axis=2)
        largest, chosen = lax.top_k(weight, max(int(dim * self.ratio), 1))
        # Directions that no query has are arbitrary, and a row must not differ from itself in a larger batch.
        known = largest > math.sqrt(dim * jnp.finfo(jnp.float32).eps) * largest[..., :1]
        return jnp.where(known[:, :, None], jnp.take_along_axis(vectors, chosen[:, :, None], axis=3), 0)

    def _search(self, cache: LayerStorage, aux: PartialKeys, query: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Prepare the arguments of `partial_score` and `partial_select` for a guess [B, H, G, D]."""
        return _times(query, aux.matrix), aux.partial, cache.position, cache.cursor, jnp.asarray(self.alpha, jnp.float32)


def _scale(query: Array) -> float:
    return 1 / math.sqrt(query.shape[3])


def _query_heads(query: Array) -> int:
    """Count the query heads of all devices, from a guess [B, H, G, D]."""
    return query.shape[1] * query.shape[2] * axes.size(axes.MODEL)


def _times(rows: Array, matrix: Array) -> Array:
    """Multiply ``rows`` [B, H, N, D] by ``matrix`` float32 [B, H, D, C], in the dtype of the rows."""
    return jnp.einsum("bhnd,bhdc->bhnc", rows.astype(jnp.float32), matrix, precision=_EXACT).astype(rows.dtype)


def _guess(step: Step) -> Step:
    """Replace the step's query by its guess, if it has one."""
    return step if step.guess is None else dataclasses.replace(step, query=step.guess)
