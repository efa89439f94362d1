"""The best entries of score rows as ascending lists."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.kth_select import jax_triton, pallas_triton, reference

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
    """The ``budget`` best entries of each row, exactly, as an ascending list; of equal entries the lower index is taken.

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
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """As ``kth_select``, but the second result is bool [B, H, K], true where ``slots`` lists a chosen slot.

    The kernel that writes the list writes this mask too; to make it of the count would be one more launch.
    """
    slots, keep, _ = _select(score, budget, capacity, implementation, platform)
    return slots, keep


def _select(score, budget, capacity, implementation, platform):
    if score.ndim != 3 or score.dtype != jnp.float32:
        raise ValueError(f"kth_select: got score {score.dtype} {score.shape}, expected float32 [B, H, S]")
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
    return KTH_SELECT.run(score, budget, capacity, implementation=implementation, platform=platform)
