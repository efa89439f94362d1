"""SOCKET's search: the score of each token is the sum of soft votes for its buckets in many hash tables."""

from typing import Annotated

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.score.socket.bucket_score import pallas_triton, reference
from pallas_kernels.signature import declared, forward

BUCKET_SCORE = Operation.of("bucket_score", pallas_triton, reference)


@declared(BUCKET_SCORE)
def bucket_score(
    query: Annotated[Array, "B H G D"],
    planes: Annotated[Array, "float32 L P D"],
    temperature: Annotated[Array, "float32 []"],
    ids: Annotated[Array, "uint8|uint16 B H N>=S/16 L*16"],
    norm: Annotated[Array, "B H S"],
    position: Annotated[Array, "int32 B H S"],
    cursor: Annotated[Array, "int32 B"],
    *,
    first: int,
    num_local: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Score each token by the norm of its value times how likely the query finds its buckets, summed over tables and group.

    In table l the likelihood of bucket c, whose corner is y_c (a sign for each bit, see `formats.sign_codes`), is
    softmax_c(tanh(W_l q) . y_c / (sqrt(D) * temperature)).

    Args:
        planes: the planes W_l of each of L tables.
        temperature: above 0.
        ids: the bucket of each key in each table, below 2**P, in blocks of 16 tokens (see `formats.sign_codes.in_blocks`);
            what is behind S may hold anything.
        norm: of the values; computed with in float32.
        position: negative for an empty slot; there ``norm`` may hold anything.
        first: the first slot that is searched.
        num_local: the newest tokens, which are not searched.
        implementation: "pallas_triton" takes two to eight bits, ids in uint8, D a power of two.

    Returns:
        float32 [B, H, S]; -inf for empty slots and for those that are not searched.
    """
    return forward()
