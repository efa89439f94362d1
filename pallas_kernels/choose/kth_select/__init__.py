"""The best entries of score rows as ascending lists."""

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.choose.kth_select import jax_triton, pallas_mosaic_gpu, pallas_triton, reference
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import INTEGERS, declared, forward

__all__ = ["KTH_SELECT", "kth_select", "kth_select_mask"]

# The check of "jax_triton", which is for comparison, is stricter than the first, so the first runs wherever it can.
KTH_SELECT = Operation.of("kth_select", pallas_triton, pallas_mosaic_gpu, jax_triton, reference)


@declared(KTH_SELECT, derivative=INTEGERS)
def kth_select(
    score: Annotated[Array, "float32 B H S"],
    budget: Annotated[Array | int, "int32 [] or H|1 or B|1 H|1"],
    capacity: Annotated[int, ">=1"],
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """List the ``budget`` best entries of each row, exactly, in ascending order; of equal entries the lower index is taken.

    Args:
        score: higher is better. -inf and NaN are never chosen; -0 equals 0.
        budget: entries to choose per row; clipped to [0, ``capacity``].
        capacity: static length K of the lists; may exceed S.
        implementation: "jax_triton" is the same kernel through the package of that name, for comparison.

    Returns:
        slots int32 [B, H, K], the chosen ones first and ascending, 0 behind them; count int32 [B, H] of chosen slots.
    """
    return forward(lambda results: (results[0], results[2]), budget=_budget(budget))


@declared(KTH_SELECT, derivative=INTEGERS)
def kth_select_mask(
    score: Annotated[Array, "float32 B H S; B H G S with lse"],
    budget: Annotated[Array | int, "int32 [] or H|1 or B|1 H|1"],
    capacity: Annotated[int, ">=1"],
    *,
    lse: Annotated[Array | None, "float32 B H N G"] = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Select as ``kth_select`` does, but the second result is bool [B, H, K], true where ``slots`` lists a chosen slot.

    The kernel that writes the list writes this mask too; to make it of the count would be one more launch.

    With ``lse``, ``score`` has the logits of each query head, as `page_logits` returns both. The score of an entry is then
    the log of its largest share, which the kernel makes that reads the row first::

        max over g of  score[g] - log(sum over n of exp(lse[n, g]))

    Args:
        score: as in ``kth_select``; with ``lse`` without NaN.
        budget: as in ``kth_select``.
        capacity: as in ``kth_select``.
        lse: the log of the softmax denominators in N parts, -inf for an empty part; or None.
        implementation: as in ``kth_select``; "jax_triton" does not take ``lse``.
    """
    return forward(lambda results: results[:2], budget=_budget(budget))


def _budget(budget: Array | int) -> Array | int:
    """Make a number of NumPy one of Python, and its array one of JAX."""
    number = np.ndim(budget) == 0 and not isinstance(budget, jax.Array)
    return int(budget) if number else jnp.asarray(budget)
