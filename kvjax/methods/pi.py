"""PI: Full attention with all positions divided by a factor, so that a longer text has positions that the model knows.

Stored: as under `Full`. The token at position p is rotated as if it stood at p / ``factor``.

**Source**: Chen et al., "Extending Context Window of Large Language Models via Position Interpolation" (arXiv:2306.15595).

**Departures**: the paper fine-tunes the model at the new length. Here nothing is trained.
"""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.methods.stretched import Stretched
from kvjax.protocol.typing import pytree


@pytree
class PI(Stretched):
    """Full attention with interpolated positions; see the module docstring."""

    PAPER: ClassVar[str] = "arXiv:2306.15595"
    TITLE: ClassVar[str] = "Position Interpolation"

    def divisors(self, pairs: int) -> Array:
        return jnp.broadcast_to(jnp.asarray(self.factor, jnp.float32), (pairs,))
