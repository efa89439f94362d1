"""What kernels that read keys in blocks need of a GPU's shared memory, and the largest block that fits.

Triton keeps in shared memory the blocks that its pipeline has on their way, and operands of products. What it takes is known
only when it compiles; the sums here were fitted to what it asked for at many shapes, with `SLACK` above that, and
tests/compile_only/test_methods.py compares them again.
"""

from __future__ import annotations

from collections.abc import Callable

from pallas_kernels.machine import current_machine

LEAST_BLOCK = 16  # slots, the least that a product on tensor cores takes
SLACK = 2048  # bytes of reductions and index lists


def fitting_block(block: int, needed: Callable[[int], int]) -> int:
    """The largest power of two up to ``block`` slots whose kernel fits the GPU that the call is traced for.

    Args:
        block: slots, a power of two of at least `LEAST_BLOCK`.
        needed: from slots to bytes of shared memory.

    Raises:
        NotImplementedError: no block fits.
    """
    while needed(block) + SLACK > current_machine().shared_memory and block > LEAST_BLOCK:
        block //= 2
    check_fits(needed(block))
    return block


def check_fits(needed: int) -> None:
    """Raise ``NotImplementedError`` if the GPU has fewer than ``needed`` bytes of shared memory, and a few more."""
    limit = current_machine().shared_memory
    if needed + SLACK > limit:
        raise NotImplementedError(
            f"got shapes that need {needed + SLACK:,} bytes of shared memory, expected at most {limit:,}"
        )
