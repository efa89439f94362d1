"""TriAttention: evict while decoding, and keep the keys that the mean query will score highly from later positions.

Stored: ``budget`` tokens per KV head after every eviction, and later tokens until the next one. The prompt is evicted at
its end, and all that is stored again after every ``interval`` tokens (`Periodic`). Of the queries before RoPE, their
mean and the mean lengths of their pairs of channels are stored: 3/2 D values in float32 for each query head. A decode step
only stores its query; an eviction adds all queries since the last one, at most ``2 * interval - 1``, to both means.

RoPE turns channels i and i + D/2 together, as a complex number, by w_f per position. Let m_f be the mean of the query of
head g in pair f, n_f the mean of its length, and k_f the key of the token at position p. From t, the next position, and
over the set S of offsets 1, 2, 4 ... up to ``reach``::

    s[g, p] = mean over d in S of sum_f |m_f| |k_f| cos( w_f (t - p + d) + arg m_f - arg k_f )
              + sum_f ( n_f - |m_f| ) |k_f|

The first sum is the product of the mean query with the key at later distances. The second grows with the scatter of the
queries, for which their mean does not speak. Each query head's scores are brought to mean 0 and deviation 1 over the stored
tokens; a KV head keeps the tokens that are best for any of its query heads.

**Source**: Mao et al., "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression" (arXiv:2604.04921,
section 4); WeianMao/triattention c3744ee6, which selects as its ``per_layer_perhead_pruning`` does.

**Departures**: m and n come from the row's own queries so far, prompt included; paper and released code measure them on
other texts beforehand, and find that they belong to the model. The prompt is evicted too, as with the code's
``allow_prefill_compression``; by default the code keeps a prompt whole. It adds noise to break ties; here the older token
stays. Where RoPE's frequencies depend on the length of the text, the departure of `ExpectedAttention` applies here too.
"""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.attention.moments import Moments, pair_lengths
from kvjax.cache import LayerCache
from kvjax.protocol.method import Prompt
from kvjax.protocol.slots import Reads
from kvjax.protocol.typing import not_none, pytree, traced
from kvjax.wrappers.periodic import PeriodicEviction
from pallas_kernels.numerics import product_precision


@pytree
class TriAttention(PeriodicEviction):
    """Keep what the mean query will attend to, evicted while decoding; see the module docstring."""

    budget: int | Array = traced("tokens kept per KV head by every eviction", default=2048, least=1, within="capacity")

    PAPER: ClassVar[str] = "arXiv:2604.04921"
    reach = 65536  # largest offset in tokens, from which later queries are taken

    reads = Reads(moments_from=0)

    def score(self, cache: LayerCache, prompt: Prompt) -> Array:
        moments, exact = not_none("moments", prompt.moments), product_precision(jnp.float32)
        query = _ahead(moments, cache.position.max(axis=(1, 2)) + 1, self.reach)
        key = cache.key.astype(jnp.float32)
        score = jnp.einsum("bhgd,bhsd->bhgs", query, key, precision=exact)
        spread = moments.length - pair_lengths(moments.mean)
        score = score + jnp.einsum("bhgf,bhsf->bhgs", spread, pair_lengths(key), precision=exact)
        return _standard(score, cache.valid[:, :, None]).max(axis=2)


def _standard(score: Array, valid: Array) -> Array:
    """Normalise ``score`` float32 [B, H, G, S] to mean 0 and deviation 1 over slots that are ``valid`` bool [B, H, 1, S]."""
    count = jnp.maximum(jnp.sum(valid, axis=3, keepdims=True, dtype=jnp.float32), 1)
    apart = score - jnp.sum(jnp.where(valid, score, 0), axis=3, keepdims=True) / count
    deviation = jnp.sqrt(jnp.sum(jnp.where(valid, apart * apart, 0), axis=3, keepdims=True) / count)
    return apart / jnp.maximum(deviation, 1e-6)


def _ahead(moments: Moments, position: Array, reach: int) -> Array:
    """Average the mean query, rotated at ``position`` int32 [B] plus each offset, over the offsets: float32 [B, H, G, D]."""
    offsets = jnp.asarray([1 << n for n in range(reach.bit_length())], jnp.float32)
    # A mean of rotations is a complex number for each pair.
    later = offsets[None, :, None] * moments.inv_freq[:, None]  # [B, offsets, D/2]
    now = position[:, None].astype(jnp.float32) * moments.inv_freq
    real, imaginary = jnp.cos(later).mean(axis=1), jnp.sin(later).mean(axis=1)
    cos = (jnp.cos(now) * real - jnp.sin(now) * imaginary)[:, None, None]
    sin = (jnp.sin(now) * real + jnp.cos(now) * imaginary)[:, None, None]
    one, other = jnp.split(moments.mean, 2, axis=-1)
    return jnp.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1)
