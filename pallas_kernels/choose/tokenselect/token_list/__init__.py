"""The tokens that a row attends to, as one list: sinks, chosen tokens and newest tokens (TokenSelect)."""

from typing import Annotated

import jax.numpy as jnp
from jax import Array

from pallas_kernels.choose.tokenselect.token_list import pallas_mosaic_gpu, pallas_triton, reference
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import INTEGERS, declared

TOKEN_LIST = Operation.of("token_list", pallas_triton, pallas_mosaic_gpu, reference)


@declared(TOKEN_LIST, derivative=INTEGERS)
def token_list(
    fresh: Annotated[Array, "int32 B K"],
    length: Annotated[Array, "int32 B"],
    awake: Annotated[Array, "int32 B"],
    *,
    budget: Annotated[Array | int, "int32 []"],
    miss: Annotated[Array | None, "bool B"] = None,
    chosen: Annotated[Array | None, "int32 B K"] = None,
    num_sink: int,
    num_local: int,
    extra: int = 0,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array, Array]:
    """List the tokens to attend to, in order and without a gap: first, chosen and newest tokens; all tokens of a short row.

    Args:
        fresh: the ``budget`` tokens chosen now, ascending.
        length: tokens stored.
        awake: the list of a row with a negative number is empty.
        budget: at most K.
        miss: whether ``fresh`` replaces ``chosen``; given exactly with it.
        chosen: tokens chosen before, or None if none are kept.
        num_sink: number of first tokens.
        num_local: number of newest tokens.
        extra: number of unused entries to add at the end.

    Returns:
        chosen int32 [B, K], the tokens chosen for the next step; token int32 [B, E] with E = num_sink + K + num_local +
        extra, 0 where unused; used bool [B, E], true for the first ``min(length, num_sink + budget + num_local)`` entries.
    """
    if (miss is None) != (chosen is None):
        raise ValueError("token_list: got one of miss and chosen, expected both or neither")
    args = fresh, length, awake, jnp.asarray(budget, jnp.int32), *(() if chosen is None else (miss, chosen))
    sizes = {"num_sink": num_sink, "num_local": num_local, "extra": extra}
    return TOKEN_LIST.run(*args, **sizes, implementation=implementation, platform=platform)
