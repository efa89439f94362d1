"""PyramidKV: as SnapKV, with large budgets in the first layers and small ones in the last.

Stored after the prompt: in layer l of L, ``b_l`` tokens for each KV head, and every later token. A kernel is compiled for
each size of arrays, so there are at most 8 sizes: ``ceil(L / 8)`` neighbouring layers have arrays as large as the first of
these layers needs. With 32 layers the arrays have about 9 % more slots than tokens are kept. No step reads these spare slots
before later tokens are in them.

The last W = ``obs_window`` tokens of the prompt are always kept. Of the tokens before them, layer l keeps those with
the highest votes, scored as in `SnapKV`, and their number falls in a straight line from the first layer to the last::

    b_l = W + floor( high - (high - low) * l / (L - 1) ),   low = (budget - W) / beta,   high = 2 * (budget - W) - low

``budget`` is the mean of the layers. A budget of W + ``beta`` or less leaves the last layer little more than its
window, and a budget of W leaves every layer its window alone.

**Source**: Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling"
(arXiv:2406.02069, section 4); Zefan-Cai/KVCache-Factory c97f9d7.

**Departures**: the budgets of the layers do not depend on the prompt, because they are the sizes of arrays. The
released code keeps a prompt of fewer than ``budget`` tokens whole, and gives every layer the same budget up to a length
of ``2 * (budget - W)``. It makes the pyramid flatter where the first layer would keep more tokens than the prompt has;
from a length of about ``2 * budget`` on both are the same. It rounds the difference of neighbouring layers down; here
each budget is rounded down. Each KV head keeps one set, as in `SnapKV`. NVIDIA/kvpress 8bb29b9 takes a budget without the
window, and falls back to a flat one if the last layer would keep fewer tokens than the window.
"""

from typing import Any, ClassVar

from kvjax.methods.snapkv import SnapKV
from kvjax.protocol.families import WindowEviction
from kvjax.protocol.method import LayerMethod
from kvjax.protocol.typing import pytree, static

_SIZES = 8  # of arrays, at most


@pytree
class PyramidKV(WindowEviction):
    """SnapKV with a budget for each layer; see the module docstring."""

    # Up to 100, so that no product below leaves int32 in a model of up to 400 layers.
    beta: int = static("the last layer keeps 1/beta of the mean prefix; 1 = all layers alike", default=20, least=1, most=100)

    PAPER: ClassVar[str] = "arXiv:2406.02069"

    keeps = "`budget` tokens per KV head, mean over the layers"

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        first = layer - layer % -(-num_layers // _SIZES)
        return SnapKV(
            budget=self._budget(self.budget, layer, num_layers),
            capacity=self._budget(self.capacity, first, num_layers),
            obs_window=self.obs_window,
            kernel=self.kernel,
        )

    def _budget(self, mean: Any, layer: int, num_layers: int) -> Any:
        """Compute the tokens that a layer keeps if the mean over the layers is ``mean``, an int or an array of int32."""
        if num_layers == 1:
            return mean
        prefix = mean - self.obs_window
        share = (2 * self.beta - 1) * (num_layers - 1) - 2 * layer * (self.beta - 1)
        whole = self.beta * (num_layers - 1)
        # prefix * share // whole, in parts that int32 can hold
        return self.obs_window + prefix // whole * share + prefix % whole * share // whole
