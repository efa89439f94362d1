"""The largest block of keys whose kernel fits a GPU's shared memory.

Triton keeps in shared memory the blocks that its pipeline is loading, and operands of products. The exact amount is known
only after compilation. The kernels' estimates were fitted to the amounts that Triton requested at many shapes, and `SLACK`
is added to them; tests/compile_only/test_methods.py compares them again.
"""

from collections.abc import Callable

from pallas_kernels.machine import current_machine

LEAST_BLOCK = 16  # slots, the least that a product on tensor cores takes
SLACK = 2048  # bytes of reductions and index lists


def fitting_block(block: int, needed: Callable[[int], int]) -> int:
    """Return the largest power of two up to ``block`` slots whose kernel fits the GPU that the call is traced for.

    Args:
        block: slots, a power of two of at least `LEAST_BLOCK`.
        needed: a function from slots to bytes of shared memory.

    Raises:
        NotImplementedError: no block fits.
    """
    while needed(block) + SLACK > current_machine().shared_memory and block > LEAST_BLOCK:
        block //= 2
    check_fits(needed(block))
    return block


def check_fits(needed: int) -> None:
    """Raise ``NotImplementedError`` if the GPU has fewer than ``needed`` + `SLACK` bytes of shared memory."""
    limit = current_machine().shared_memory
    if needed + SLACK > limit:
        raise NotImplementedError(
            f"got shapes that need {needed + SLACK:,} bytes of shared memory, expected at most {limit:,}"
        )
