"""The state of CHESS that all layers share: the vectors of pages, the list of active pages, and how unsure the model is."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.methods.chess.page_tree import Nodes
from kvjax.protocol.typing import not_none, pytree, static


@pytree
class Pages:
    """The state that all layers read: the active pages, and the numbers that decide when they change."""

    nodes: Nodes | None  # None until the prompt has ended
    active: Array  # int32 [B, A], complete pages to attend to
    count: Array  # int32 [B], used entries of `active`
    complete: Array  # int32 [B], complete pages
    seen: Array  # int32 [B], tokens seen
    tokens: Array  # int32 [B], generated tokens of the open page
    mean: Array  # float32 [B], mean entropy over these tokens, in nats
    square: Array  # float32 [B], summed squared deviation from this mean
    since: Array  # int32 [B], pages completed since the last reconstruction
    steps: Array  # int32 [B], tokens decoded
    generated: Array  # int32 [B], pages completed while decoding
    reconstructions: Array  # int32 [B], reconstructions while decoding
    num_layers: int = static()
    centred: bool = static("a reconstruction reads the vectors of pages for their mean, too")

    @property
    def tree(self) -> Nodes:
        """The vectors of pages, chunks and grids, which exist after the prompt."""
        return not_none("nodes", self.nodes)


def note_entropy(pages: Pages, logits: Array, when: Array) -> Pages:
    """Add the entropy of the next-token distribution to the mean and deviation of the open page (Welford's rule)."""
    log = jax.nn.log_softmax(logits.astype(jnp.float32))
    entropy = -jnp.sum(jnp.exp(log) * log, axis=-1)
    tokens = pages.tokens + when.astype(jnp.int32)
    off = entropy - pages.mean
    mean = pages.mean + off / jnp.maximum(tokens, 1).astype(jnp.float32)
    return dataclasses.replace(
        pages,
        tokens=tokens,
        steps=pages.steps + when.astype(jnp.int32),
        mean=jnp.where(when, mean, pages.mean),
        square=jnp.where(when, pages.square + off * (entropy - mean), pages.square),
    )
