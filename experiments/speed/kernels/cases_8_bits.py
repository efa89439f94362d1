"""Cases of operations that read or write codes of 8 bits (`pallas_kernels.formats.quantised`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import Array

from experiments.speed.kernels.case import Case, Sizes, listed, store
from pallas_kernels.attend.dense_decode import DENSE_DECODE, dense_decode
from pallas_kernels.attend.gather_attention import GATHER_ATTENTION, gather_attention
from pallas_kernels.formats.quantised import Quantised, quantise, whole


def cases_8_bits(sizes: Sizes) -> Iterator[Case]:
    """Decode attention over codes; the reference reads the numbers that they stand for."""
    scale, slots = 1 / math.sqrt(sizes.dim), sizes.count(131072)

    def make(batch: int, kind: str, dense: bool) -> tuple:
        query, key, value = store(sizes, batch, slots)
        codes = query, quantise(key, kind), quantise(value, kind)
        if dense:
            position = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, sizes.heads, slots))
            return *codes, position, jnp.full((batch,), slots, jnp.int32)
        lists = listed(3, (batch, sizes.heads), slots, sizes.count(2048))
        return *codes, lists, jnp.ones(lists.shape, bool)

    def decode(query: Array, key: Any, value: Any, position: Array, limit: Array, **how: Any) -> Any:
        return dense_decode(query, key, value, position=position, limit=limit, scale=scale, **how)

    def gather(query: Array, key: Any, value: Any, lists: Array, mask: Array, **how: Any) -> Any:
        return gather_attention(query, key, value, lists, mask, scale=scale, **how)

    def exact(run: Any, query: Array, key: Quantised, value: Quantised, *rest: Array) -> Any:
        numbers = (whole(x).astype(jnp.float32) for x in (key, value))
        return run(query.astype(jnp.float32), *numbers, *rest, implementation="xla")

    row = 2 * (sizes.dim + 2)  # a key, a value and their scales
    for batch, kind in ((1, "int8"), (8, "int8"), (1, "float8_e4m3fn")):
        yield Case(
            DENSE_DECODE,
            f"{slots} tokens in {kind}, {batch} rows",
            functools.partial(make, batch, kind, dense=True),
            decode,
            batch * sizes.heads * slots * row,
            reference=functools.partial(exact, decode),
        )
    yield Case(
        GATHER_ATTENTION,
        f"{sizes.count(2048)} of {slots} tokens in int8 per KV head",
        functools.partial(make, 1, "int8", dense=False),
        gather,
        sizes.heads * sizes.count(2048) * row,
        reference=functools.partial(exact, gather),
    )
