"""The best entries of score rows as ascending lists."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.choose.kth_select import jax_triton, pallas_triton, reference
from pallas_kernels.dispatch import Implementation, Operation

__all__ = ["KTH_SELECT", "kth_select", "kth_select_mask"]

KTH_SELECT = Operation(
    "kth_select",
    {
        "pallas_triton": Implementation(pallas_triton.kth_select, ("gpu",), pallas_triton.check),
        # For comparison. Its check is stricter than the first, so the first runs wherever it can.
        "jax_triton": Implementation(jax_triton.kth_select, ("gpu",), jax_triton.check),
        "xla": Implementation(reference.kth_select),
    },
)



def kth_select(
    score: jax.Array,
    budget: jax.Array | int,
    capacity: int,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """List the ``budget`` best entries of each row, exactly, in ascending order; of equal entries the lower index is taken.

    Not differentiable: its results are integers and truth values.

    Args:
        score: float32 [B, H, S], higher is better. -inf and NaN are never chosen; -0 equals 0.
        budget: entries to choose per row, a number or int32 that broadcasts to [B, H]; clipped to [0, ``capacity``].
        capacity: static length K of the lists; may exceed S.
        implementation: "pallas_triton" (GPU), "jax_triton" (the same through the package of that name), "xla", or None for
            the first of "pallas_triton" and "xla" that runs.
        platform: see ``Operation.run``. ``KTH_SELECT.resolve`` tells which implementation a call uses.

    Returns:
        slots int32 [B, H, K], the chosen ones first and ascending, 0 behind them; count int32 [B, H] of chosen slots.

    Raises:
        ValueError: shapes, dtypes or capacity are not as above, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    slots, _, count = _select(score, budget, capacity, implementation, platform)
    return slots, count


def kth_select_mask(
    score: jax.Array,
    budget: jax.Array | int,
    capacity: int,
    *,
    lse: jax.Array | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Select as ``kth_select`` does, but the second result is bool [B, H, K], true where ``slots`` lists a chosen slot.

    The kernel that writes the list writes this mask too; to make it of the count would be one more launch.

    With ``lse``, ``score`` has the logits of each query head, as `page_logits` returns both. The score of an entry is then
    the log of its largest share, which the kernel makes that reads the row first::

        max over g of  score[g] - log(sum over n of exp(lse[n, g]))

    Args:
        score: as in ``kth_select``; with ``lse`` float32 [B, H, G, S], without NaN.
        budget: as in ``kth_select``.
        capacity: as in ``kth_select``.
        lse: float32 [B, H, N, G], the log of the softmax denominators in N parts, -inf for an empty part; or None.
        implementation: as in ``kth_select``; "jax_triton" does not take ``lse``.
        platform: as in ``kth_select``.
    """
    slots, keep, _ = _select(score, budget, capacity, implementation, platform, lse)
    return slots, keep


def _select(score, budget, capacity, implementation, platform, lse=None):
    expected = "[B, H, S]" if lse is None else "[B, H, G, S] with an lse"
    if score.ndim != (3 if lse is None else 4) or score.dtype != jnp.float32:
        raise ValueError(f"kth_select: got score {score.dtype} {score.shape}, expected float32 {expected}")
    if lse is not None and (lse.shape != (*score.shape[:2], *lse.shape[2:3], score.shape[2]) or lse.dtype != jnp.float32):
        raise ValueError(f"kth_select: got lse {lse.dtype} {lse.shape} of {score.shape}, expected float32 [B, H, N, G]")
    if capacity < 1:
        raise ValueError(f"kth_select: got {capacity=}, expected at least 1")
    if np.ndim(budget) == 0 and not isinstance(budget, jax.Array):
        budget = int(budget)
    else:
        budget = jnp.asarray(budget)
        shape = (1,) * (2 - budget.ndim) + budget.shape
        fits = budget.ndim <= 2 and all(n in (1, size) for n, size in zip(shape, score.shape[:2], strict=True))
        if budget.dtype != jnp.int32 or not fits:
            raise ValueError(
                f"kth_select: got budget {budget.dtype} {budget.shape}, "
                f"expected int32 that broadcasts to {score.shape[:2]}"
            )
    return KTH_SELECT.run(score, budget, capacity, lse, implementation=implementation, platform=platform)
