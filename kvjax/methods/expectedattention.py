"""ExpectedAttention: at the prompt's end keep the tokens that later queries are expected to attend to.

Stored after the prompt: ``budget`` slots, chosen for each KV head separately, and every later token. During prefill
the mean and the covariance of each query head's queries before RoPE are stored too: D * D + 3/2 D values in float32 for
each query head, which are freed at the prompt's end.

Future queries are modelled by a normal distribution with the mean and covariance of the prompt's queries without the
first ``num_sink``, turned by the mean rotation R of the next ``num_future`` positions. Its mean m and covariance C give
the expected attention logit of key k_i, and a softmax over the tokens from ``num_sink`` on makes shares::

    z[g, i] = k_i . R m_g / sqrt(D) + k_i . R C_g R^T k_i / (2 D)
    s[h, i] = ( mean over the group of softmax_i z[g, i] ) * |v_i|

The first ``num_sink`` tokens are always kept.

**Source**: Devoto et al., "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution" (arXiv:2510.00636); NVIDIA/kvpress 8bb29b9, ExpectedAttentionPress with its defaults.

**Departures**: none known where RoPE does not depend on the length of the text. Where it does (dynamic NTK and
longrope, beyond the old context), the change of the frequencies stays in the queries, and later positions have the
frequencies of short texts. kvpress computes the queries a second time at the prompt's end; here their moments are
updated as they come, so a prompt may be prefilled in chunks.
"""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.moments import rotation_mean
from kvjax.cache import LayerCache
from kvjax.protocol.families import Eviction
from kvjax.protocol.method import Prompt
from kvjax.protocol.slots import Reads, check_budget
from kvjax.protocol.typing import not_none, pytree
from pallas_kernels.numerics import product_precision


@pytree
class ExpectedAttention(Eviction):
    """Keep the tokens with the largest expected attention; see the module docstring."""

    num_sink = 4  # first tokens, which are always kept and whose queries do not count

    PAPER: ClassVar[str] = "arXiv:2510.00636"
    TITLE: ClassVar[str] = "Expected Attention"
    num_future = 512  # positions after the prompt at which queries are expected

    lacks = ("latent",)

    def check(self) -> None:
        check_budget(self, self.num_sink + 1, f"num_sink={self.num_sink} first tokens and one more")

    @property
    def reads(self) -> Reads:
        return Reads(moments_from=self.num_sink, covariance=True)

    def score(self, cache: LayerCache, prompt: Prompt) -> Array:
        moments, exact = not_none("moments", prompt.moments), product_precision(jnp.float32)
        turn = rotation_mean(moments, cache.position.max(axis=(1, 2)) + 1, self.num_future)
        mean = jnp.einsum("bij,bhgj->hbgi", turn, moments.mean, precision=exact)
        covariance = jnp.einsum("bij,bhgjk,blk->hbgil", turn, moments.covariance, turn, precision=exact)

        def head(given: tuple[Array, Array, Array]) -> Array:  # one at a time: a number per slot and channel is much
            m, c, key = given[0], given[1], given[2].astype(jnp.float32)
            turned = jnp.einsum("bgil,bsl->bgsi", c, key, precision=exact)
            linear = jnp.einsum("bgi,bsi->bgs", m, key, precision=exact) / math.sqrt(key.shape[2])
            return linear + jnp.sum(turned * key[:, None], axis=3) / (2 * key.shape[2])

        logits = lax.map(head, (mean, covariance, cache.key.swapaxes(0, 1))).swapaxes(0, 1)  # [B, H, G, S]
        first = cache.position < self.num_sink  # of empty slots too, which are never kept
        shares = jax.nn.softmax(jnp.where(first[:, :, None], jnp.finfo(jnp.float32).min, logits), axis=3).mean(axis=2)
        norm = jnp.sqrt(jnp.sum(jnp.square(cache.value.astype(jnp.float32)), axis=3))
        return jnp.where(first, jnp.inf, shares * norm)
