"""DuoAttention: some heads keep the whole prompt, the other heads only its first and its last tokens.

Metadata of a layer in which only some heads stream: int32 [B, H, 2], the slots of each KV head between both ends, which are
empty. A decode step does not read them.

Stored after the prompt: every prompt token for a KV head that retrieves; the first ``num_sink`` and the last ``num_recent``
tokens of the prompt for a KV head that streams; and every later token for both. Arrays have one length for all heads of a
layer, so a layer takes less memory only if all its heads stream. A step attends to fewer tokens in any layer with heads that
stream.

Score: ``scores[l, h]`` of each KV head, for the whole model. The share ``sparsity`` of all heads streams: the heads with the
lowest scores. The remaining heads retrieve.

`kvjax.head_scores` reads the files of the released code, whose scores are trained: there a head's output is a mixture of
both kinds of attention, and the score is its learned weight of the whole prompt. It also reads the scores that
``python -m experiments.heads.heads`` measures on a model as HeadKV does it.

**Source**: Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads"
(arXiv:2410.10819); mit-han-lab/duo-attention 03dca84 for the scores and the numbers of tokens; NVIDIA/kvpress 00a150c,
DuoAttentionPress, for the choice of heads and for a dense prompt.

**Departures**: as in kvpress, heads that stream prefill densely, and keep every token that comes after the prompt. In the
released code they attend to the first and the last tokens during prefill too, and evict tokens between as they decode. It
stores the two kinds of heads apart, so that memory falls in every layer.
"""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.cache import LayerCache, LayerStorage
from kvjax.methods.head_scores import check_score_sizes, score_table
from kvjax.protocol.families import AppendOnly, of_own_heads
from kvjax.protocol.method import LayerMethod, Prompt, Step
from kvjax.protocol.typing import Model, pytree, static
from kvjax.selection import compact
from kvjax.wrappers.compose import inner_of_layer


@pytree
class DuoAttention(AppendOnly):
    """Retrieval heads and streaming heads; see the module docstring."""

    scores: tuple[tuple[float, ...], ...] | None = static("of each KV head, layer by layer", default=None, least=0)
    sparsity: float = static("share of the model's heads that stream", default=0.5, least=0, most=1)
    num_sink: int = static("first tokens that a streaming head keeps", default=128, least=0)
    num_recent: int = static("last tokens of the prompt that a streaming head keeps", default=256, least=1)

    PAPER: ClassVar[str] = "arXiv:2410.10819"

    keeps = "every token in some heads, `num_sink` first and `num_recent` last ones of the prompt in the other heads"
    evicts = True

    def check_sizes(self, model: Model) -> None:
        check_score_sizes(self, model)

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        scores = score_table(self, num_layers)
        streams = np.zeros(scores.size, bool)
        streams[np.argsort(scores, axis=None, stable=True)[: round(scores.size * self.sparsity)]] = True
        of_layer = tuple(streams.reshape(scores.shape)[layer].tolist())
        return StreamingHeads(streams=of_layer, num_sink=self.num_sink, num_recent=self.num_recent)

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Array | None]:
        return inner_of_layer(self, 0, 1).compress(cache, prompt, room)


@pytree
class StreamingHeads(AppendOnly):
    """A layer of `DuoAttention`."""

    streams: tuple[bool, ...] = static("which KV heads keep both ends of the prompt only")
    num_sink: int = static()
    num_recent: int = static()

    evicts = True

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Array | None]:
        newest = cache.position.max(axis=(1, 2))[:, None, None]
        ends = (cache.position < self.num_sink) | (cache.position > newest - self.num_recent)
        if all(self.streams):
            most = min(self.num_sink + self.num_recent, cache.num_slots)
            return cache.compact(*compact(cache.valid & ends, most), room), None
        streams = of_own_heads(jnp.asarray(self.streams), cache.key.shape[1])
        # Nothing moves, so that heads that stream have one range of empty slots, between both ends.
        slots = jnp.broadcast_to(jnp.arange(cache.num_slots, dtype=jnp.int32), cache.position.shape)
        kept = cache.compact(slots, cache.valid & (ends | ~streams[None, :, None]), room)
        if not any(self.streams):
            return kept, None
        # The first range of empty slots; it is empty if there is none.
        first = jnp.argmin(kept.valid, axis=2)
        behind = kept.valid & (jnp.arange(kept.num_slots)[None, None] > first[..., None])
        stop = jnp.where(behind.any(axis=2), jnp.argmax(behind, axis=2), first)
        return kept, jnp.stack([first, stop], axis=2).astype(jnp.int32)

    def gap(self, aux: Array | None) -> Array | None:
        return aux

    def update(
        self, cache: LayerStorage, aux: Array | None, step: Step, mass: Array | None
    ) -> tuple[LayerStorage, Array | None]:
        return cache, aux
