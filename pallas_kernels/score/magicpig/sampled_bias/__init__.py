"""MagicPIG's corrections: the logit of a sampled token is raised by the log of how seldom it is sampled."""

from typing import Annotated

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.formats.quantised import Quantised
from pallas_kernels.score.magicpig.sampled_bias import pallas_triton, reference
from pallas_kernels.signature import declared, forward

SAMPLED_BIAS = Operation.of("sampled_bias", pallas_triton, reference)


@declared(SAMPLED_BIAS)
def sampled_bias(
    query: Annotated[Array, "B H G D"],
    key: Annotated[Array | Quantised, "like query B H S D"],
    centre: Annotated[Array, "float32 B H D"],
    slots: Annotated[Array | None, "int32 B H K"],
    own: Annotated[Array, "bool B H G S; B H G K with slots"],
    near: Annotated[Array, "int32 B"],
    *,
    first: int,
    num_tables: int,
    num_bits: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Compute the bias of the logits of listed slots: 0 at both ends, -log(w + 0.0001) for a slot ``first`` to ``near - 1``.

    w is the chance that the query and the key less the ``centre`` m are in the same bucket in two of L tables or more::

        p = 1 - angle(q[h, g], k_i - m_h) / pi
        w = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L-1)       K = num_bits, L = num_tables

    Args:
        slots: in range; None: entry i is slot i.
        own: which query heads attend to the slot. What no head attends to may hold anything.
        near: the slot behind the corrected ones.
        first: the first of the corrected slots.
        num_tables: L, at least 2.
        num_bits: K, at least 1.
        implementation: "pallas_triton" takes no codes, D a power of two.

    Returns:
        float32 [B, H, G, K]; -inf where a query head does not attend.
    """
    return forward()
