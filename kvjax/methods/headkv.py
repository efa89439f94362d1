"""HeadKV: as SnapKV, with a budget for every head of the model, large for the heads that retrieve and reason.

Stored after the prompt: for KV head h of layer l ``b[l, h]`` slots, and every later token. Arrays have one length for all
heads of a layer, so the largest budget of the layer is allocated for each of its heads.

The last W = ``obs_window`` tokens of the prompt are always kept. Of the tokens before them, each KV head keeps the tokens
with the highest votes, scored as in `SnapKV`. The model has L layers of H KV heads, and C = ``budget`` - W is a mean over
all its heads. Every head has a fixed part of C, and the rest is divided by ``scores``::

    b[l, h] = W + C - C // beta + round( scores[l, h] / sum(scores) * (C // beta) * L * H )

``scores`` say how important a head is. They belong to a model: `kvjax.head_scores` reads them from a file, and
``python -m experiments.heads.heads`` measures them, as the attention that a head pays to the sentence with the answer
while the model writes the answer.

**Source**: Fu et al., "Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval and
Reasoning" (arXiv:2410.19258, section 3); FYYFU/HeadKV 3ec9653, whose scripts try ``beta`` from 1.005 to 10.

**Departures**: one set per KV head, as in `SnapKV`, with the mean score of its query heads; the released code repeats keys
and values, and gives every query head a budget and a copy of its own. The released code keeps a prompt whole if it has
fewer than ``budget`` tokens; here budgets do not depend on the prompt. It stores heads of any length one behind the other
and reads them with a kernel of variable lengths. Here a decode step goes over the slots of a row's longest head, and the
accounting counts the slots that hold a token. The released code's exponent ``temp`` of the scores, 1 in its scripts, is left
out.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.methods.head_scores import check_score_sizes, score_table
from kvjax.methods.snapkv import SnapKV
from kvjax.protocol.families import WindowEviction
from kvjax.protocol.method import LayerMethod
from kvjax.protocol.typing import Model, pytree, static
from kvjax.selection import floor_share


@pytree
class HeadKV(WindowEviction):
    """SnapKV with a budget for each head; see the module docstring."""

    scores: tuple[tuple[float, ...], ...] | None = static("importance of each KV head, layer by layer", default=None, least=0)
    beta: float = static("the scores divide 1/beta of the budget; 1 = all but the window", default=1.2, least=1)

    PAPER: ClassVar[str] = "arXiv:2410.19258"

    keeps = "`budget` tokens per KV head, mean over the heads of the model"

    def check_sizes(self, model: Model) -> None:
        check_score_sizes(self, model)

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        scores = score_table(self, num_layers)
        weight = scores[layer] / scores.mean()
        return SnapKV(
            budget=self._budgets(self.budget, weight),
            capacity=int(np.max(self._budgets(self.capacity, weight))),
            obs_window=self.obs_window,
            kernel=self.kernel,
        )

    def _budgets(self, mean: Any, weight: np.ndarray) -> Any:
        """Compute the tokens that each KV head of a layer keeps, int32 [H], from ``mean``, a number, over the model.

        ``weight`` float64 [H] has the mean 1 over the model.
        """
        prefix = mean - self.obs_window
        shared = floor_share(1 / self.beta, prefix)
        library = jnp if isinstance(mean, jax.Array) else np
        extra = library.rint(weight.astype(np.float32) * library.asarray(shared).astype(np.float32))
        return (self.obs_window + prefix - shared) + extra.astype(np.int32)
