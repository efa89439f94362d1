"""ThinK: keep every token, but only those channels of the prompt's keys that the prompt's last queries ask for most.

Stored per KV head: the numbers of the C kept channels, which are the same for all tokens; of the prompt's keys these
channels, packed, with zeros up to a multiple of 16 numbers; the prompt's last ``num_recent`` keys and all later keys with all
channels; all values. With C = 77 of D = 128 channels a token of the prompt takes 416 bytes in bfloat16, in place of 512.

Score of channel c, over the prompt's last ``obs_window`` queries and all tokens i that are stored, rotated::

    s[h, c] = mean over g and queries of q[h, g, c]^2  *  mean over i of k[h, i, c]^2

At the prompt's end the C best channels stay. A step attends to all tokens: a dropped channel adds nothing to q.k, and the
scale stays 1/sqrt(D). Prompt attention is dense and exact. After an eviction, as in ``Stages(evict=SnapKV(),
retrieve=ThinK())``, only the tokens that are left enter the score.

**Source**: Xu et al., "ThinK: Thinner Key Cache by Query-Driven Pruning" (arXiv:2407.21018, section 3);
SalesforceAIResearch/ThinK e365413 for the two means, the number of channels, and which tokens stay whole.

**Departures**: each KV head has one set of channels, by the mean over the group, as in NVIDIA/kvpress; the code repeats keys
and values for every query head, and each has channels of its own. kvpress zeroes channels, also in the newest tokens
(``num_recent=0``), and saves no memory. The code for FlashAttention unpacks all keys in every step; here a step multiplies
packed keys, as the code without FlashAttention does, on a GPU in one kernel. Values keep all channels, as in the code; the
paper also tries to prune the channels of values.
"""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache
from kvjax.cache.packed_keys import ThinCache, thin
from kvjax.protocol.families import AppendOnly
from kvjax.protocol.method import Prompt
from kvjax.protocol.typing import pytree, static
from pallas_kernels.choose.kth_select import kth_select

_ROUNDING = 1e-6  # a share of channels such as 1 - 0.9 is a little below 0.1


@pytree
class ThinK(AppendOnly):
    """Drop channels of the prompt's keys; see the module docstring."""

    channels: float = static("share of the key channels to keep", default=0.6, above=0, most=1)
    num_recent: int = static("last prompt tokens, whose keys keep all channels", default=32, least=0)

    PAPER: ClassVar[str] = "arXiv:2407.21018"
    obs_window = 32  # last prompt tokens, whose queries choose the channels

    keeps = "every token, part of the key channels"
    lacks = ("codes", "latent")
    packs = True

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[ThinCache, None]:
        dim = cache.key.shape[3]
        kept = dim - int(dim * (1 - self.channels) + _ROUNDING)
        channels, _ = kth_select(self._score(cache, prompt), max(kept, 1), max(kept, 1))
        first = prompt.query_position.max(axis=1) + 1 - self.num_recent
        whole = cache.position >= first[:, None, None]
        return thin(cache, channels, whole, self.num_recent, room), None

    def _score(self, cache: LayerCache, prompt: Prompt) -> Array:
        """Score each channel: float32 [B, H, D]. Sums replace the means, because all channels have equally many terms."""
        asked = (prompt.query_position[:, -self.obs_window :] >= 0)[:, None, None, :, None]
        query = jnp.where(asked, prompt.query[..., -self.obs_window :, :].astype(jnp.float32), 0)
        key = jnp.where(cache.valid[..., None], cache.key.astype(jnp.float32), 0)
        return jnp.square(query).sum(axis=(2, 3)) * jnp.square(key).sum(axis=2)
