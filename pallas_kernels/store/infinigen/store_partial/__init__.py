"""What a search of later steps reads of a step's token: some channels of its key, and its query (InfiniGen)."""

from typing import Annotated

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.host import Rows
from pallas_kernels.signature import declared, forward
from pallas_kernels.store.infinigen.store_partial import pallas_triton, reference

STORE_PARTIAL = Operation.of("store_partial", pallas_triton, reference, in_place=True)


@declared(STORE_PARTIAL)
def store_partial(
    key: Annotated[Array, "floating B H S D; B H R D with rows"],
    position: Annotated[Array, "int32 B H S"],
    cursor: Annotated[Array, "int32 B"],
    matrix: Annotated[Array, "float32 B H D C"],
    query: Annotated[Array, "like key B H G D"],
    place: Annotated[Array, "int32 B"],
    partial: Annotated[Array, "like key B H C N>=S"],
    last: Annotated[Array, "like query"],
    *,
    rows: Rows | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Write the key in slot ``cursor - 1`` times the matrix of its head, in float32, to the same slot of the partial keys.

    Of partial keys the slots are the last axis (`pallas_kernels.score.infinigen.partial_score`).

    A row without tokens, a full row that could not store its token, and a head without the newest token change no key. The
    query replaces the query of an earlier step in rows whose step has a token.

    Args:
        key: with ``rows`` the copies.
        query: of this step.
        place: negative in a row whose step has no token.
        partial: rewritten in place where the caller gives it up.
        last: the query of the last step that had a token. Rewritten in place too.
        implementation: "pallas_triton" takes D a power of two.

    Returns:
        partial and last.
    """
    return forward()
