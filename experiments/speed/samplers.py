"""A sampler whose draws agree with a draft as often as it is told."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.decoding.sampling import rows_of
from kvjax.protocol.typing import pytree, static

_SAME, _OTHER = 7, 8  # two token ids


@pytree
class Forced:
    """Draw without regard to the logits, so that a pass keeps as many drafted tokens as a real model would.

    Outside of a pass the token is always the same one. In a pass the draw behind a drafted token is that token with the
    probability ``rates``, and another token otherwise. The largest logit is looked for, and not used: it takes its time.
    """

    rates: Array  # float32 [N], probability that a drafted token is kept if all tokens before it are; N = depth, at least 2
    rows: int = static("B")

    @classmethod
    def keeping(cls, kept: Sequence[float], rows: int) -> Forced:
        """Make a sampler by the share of drafted tokens ``kept`` at each place, for batches of so many ``rows``."""
        rates = [now / before if before else 0.0 for before, now in zip([1.0, *kept], kept, strict=False)]
        return cls(rates=jnp.asarray(rates, jnp.float32), rows=rows)

    def process(self, logits: Array, memory: None) -> tuple[Array, None]:
        """Leave the logits as they are."""
        return logits, None

    def draw(self, logits: Array, key: Array) -> tuple[Array, Array]:
        """Draw next tokens int32 [B] from logits float32 [B, V], which are returned, too."""
        return self.draw_each(logits, jax.vmap(jax.random.fold_in, (None, 0))(key, rows_of(len(logits))))

    def draw_each(self, logits: Array, keys: Array) -> tuple[Array, Array]:
        """Draw B tokens int32 for steps, or B * N tokens for a pass, from logits float32 [.., V] with a key for each."""
        # No logit is at a place below 0, which the compiler does not know.
        token = jnp.where(jnp.argmax(logits, axis=-1) < 0, _OTHER, _SAME).astype(jnp.int32)
        if len(logits) == self.rows:
            return token, logits
        right = jax.vmap(jax.random.uniform)(keys) < jnp.tile(self.rates, self.rows)
        return jnp.where(right, token, _OTHER), logits
