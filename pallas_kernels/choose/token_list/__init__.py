"""The tokens that a row attends to, as one list: sinks, chosen tokens and newest tokens (TokenSelect)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.choose.token_list import pallas_triton, reference
from pallas_kernels.dispatch import Implementation, Operation

__all__ = ["TOKEN_LIST", "token_list"]

TOKEN_LIST = Operation(
    "token_list",
    {
        "pallas_triton": Implementation(pallas_triton.token_list, ("gpu",)),
        "xla": Implementation(reference.token_list),
    },
)


def token_list(
    fresh: jax.Array,
    length: jax.Array,
    awake: jax.Array,
    *,
    budget: jax.Array | int,
    miss: jax.Array | None = None,
    chosen: jax.Array | None = None,
    num_sink: int,
    num_local: int,
    extra: int = 0,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """List the tokens to attend to, in order and without a gap: first, chosen and newest tokens; all tokens of a short row.

    Not differentiable: its results are integers and truth values.

    Args:
        fresh: int32 [B, K], the ``budget`` tokens chosen now, ascending.
        length: int32 [B], tokens stored.
        awake: int32 [B]; the list of a row with a negative number is empty.
        budget: int32 scalar, at most K.
        miss: bool [B], whether ``fresh`` replaces ``chosen``; given exactly with it.
        chosen: int32 [B, K], tokens chosen before, or None if none are kept.
        num_sink: number of first tokens.
        num_local: number of newest tokens.
        extra: number of unused entries to add at the end.
        implementation: "pallas_triton" (GPU), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        chosen int32 [B, K], the tokens chosen for the next step; token int32 [B, E] with E = num_sink + K + num_local +
        extra, 0 where unused; used bool [B, E], true for the first ``min(length, num_sink + budget + num_local)`` entries.

    Raises:
        ValueError: only one of miss and chosen is given, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    if (miss is None) != (chosen is None):
        raise ValueError(f"token_list: got miss {miss} and chosen {chosen}, expected both or neither")
    args = fresh, length, awake, jnp.asarray(budget, jnp.int32), *(() if chosen is None else (miss, chosen))
    sizes = {"num_sink": num_sink, "num_local": num_local, "extra": extra}
    return TOKEN_LIST.run(*args, **sizes, implementation=implementation, platform=platform)
