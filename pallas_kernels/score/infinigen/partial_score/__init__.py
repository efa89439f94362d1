"""Values of tokens by a few channels of their keys, and how many tokens come near the largest logit (InfiniGen)."""

from typing import Annotated

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.score.infinigen.partial_score import pallas_triton, reference
from pallas_kernels.signature import declared, forward

PARTIAL_SCORE = Operation.of("partial_score", pallas_triton, reference)


@declared(PARTIAL_SCORE, derivative="through ``xla``, except for the counts")
def partial_score(
    query: Annotated[Array, "floating B H G C"],
    key: Annotated[Array, "like query B H C N>=S"],
    position: Annotated[Array, "int32 B H S"],
    cursor: Annotated[Array, "int32 B"],
    alpha: Annotated[Array, "float32 []"],
    *,
    scale: float,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array, Array]:
    """Score the tokens before the newest one by partial keys, and count those whose logits come near the largest.

    With ``e[h, g, s] = scale * query[h, g] . key[h, :, s]`` over the stored tokens s before the newest::

        score[h, s] = mean over g of e[h, g, s]
        near        = number of (h, g, s) with  e[h, g, s] >= max over s of e[h, g, s] - alpha

    Args:
        key: empty slots may hold anything, and so may those from S on. The kernels are fast where N is a multiple of 16.
        scale: factor of the products, a Python number.
        implementation: "pallas_triton" takes C up to 256, G up to 32.

    Returns:
        score float32 [B, H, S], finite for a token before the newest, inf for the newest and -inf for an empty slot; near
        int32 [B]; and the number of tokens before the newest, int32 [B, H].
    """
    return forward()
