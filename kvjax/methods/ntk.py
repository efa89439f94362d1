"""NTK: Full attention with a larger base of RoPE, so that a longer text has angles that the model knows.

Stored: as under `Full`. With s = ``factor``, the base b of the frequencies becomes b * s^(D / (D - 2)), so the frequency of
pair i is divided by s^(2 i / (D - 2)): the first pair keeps its frequency, and the last pair's is divided by s.

**Source**: bloc97, "NTK-Aware Scaled RoPE" (2023), as in Peng et al., "YaRN" (arXiv:2309.00071, section 3.1). TokenSelect
(arXiv:2411.02886) compares itself with it at 128K tokens.

**Departures**: none. The factor is fixed; where it grows with the text (dynamic NTK), stored keys would have to be rotated
again. `kvjax.rope` describes a model's own rule of that kind.
"""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.methods.stretched import Stretched
from kvjax.protocol.typing import Model, layer_ropes, pytree


@pytree
class NTK(Stretched):
    """Full attention with NTK-aware RoPE; see the module docstring."""

    PAPER: ClassVar[str] = "arXiv:2309.00071"
    TITLE: ClassVar[str] = "NTK-aware scaling"

    def check_sizes(self, model: Model) -> None:
        parts = [x.rotated for x in layer_ropes(model) if x.rotated not in (None, 0, model.head_dim)]
        if parts:  # the new base is for all channels of a head
            raise ValueError(
                f"NTK: expected layers that rotate whole heads or nothing, got {parts[0]} of {model.head_dim} channels"
            )

    def divisors(self, pairs: int) -> Array:
        power = np.arange(pairs, dtype=np.float32) / max(pairs - 1, 1)
        return jnp.exp(jnp.log(jnp.asarray(self.factor, jnp.float32)) * jnp.asarray(power))
