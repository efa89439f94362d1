"""MagicPIG's corrections: the logit of a sampled token is raised by the log of how seldom it is sampled."""

from __future__ import annotations

from jax import Array

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.quantised import Quantised
from pallas_kernels.score.sampled_bias import pallas_triton, reference

__all__ = ["SAMPLED_BIAS", "sampled_bias"]

SAMPLED_BIAS = Operation(
    "sampled_bias",
    {
        "pallas_triton": Implementation(pallas_triton.sampled_bias, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.sampled_bias),
    },
)


def sampled_bias(
    query: Array,
    key: Array | Quantised,
    centre: Array,
    slots: Array | None,
    own: Array,
    near: Array,
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

    Differentiable: through ``xla``.

    Args:
        query: [B, H, G, D].
        key: [B, H, S, D], same dtype; or codes of this dtype.
        centre: float32 [B, H, D].
        slots: int32 [B, H, K], in range; None: entry i is slot i.
        own: bool [B, H, G, K], which query heads attend to the slot. What no head attends to may hold anything.
        near: int32 [B], the slot behind the corrected ones.
        first: the first of the corrected slots.
        num_tables: L, at least 2.
        num_bits: K, at least 1.
        implementation: "pallas_triton" (GPU; no codes, D a power of two), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        float32 [B, H, G, K]; -inf where a query head does not attend.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    batch, heads, group, entries = own.shape
    count = key.shape[2] if slots is None else entries
    got = [query.shape[:3], key.shape[:2], key.shape[3], centre.shape, near.shape, count]
    listed = (batch, heads, entries) if slots is None else slots.shape
    want = [(batch, heads, group), (batch, heads), query.shape[3], (batch, heads, query.shape[3]), (batch,), entries]
    if got != want or listed != (batch, heads, entries):
        raise ValueError(
            f"sampled_bias: got query {query.shape}, key {key.shape}, centre {centre.shape}, slots "
            f"{None if slots is None else slots.shape}, near {near.shape} for own {own.shape}, expected [B, H, G, D], "
            "[B, H, S, D], [B, H, D], [B, H, K], [B] for [B, H, G, K]; without slots K is S"
        )
    kinds = [str(x.dtype) for x in (centre, own, near, *([] if slots is None else [slots]))]
    if kinds != ["float32", "bool", "int32", "int32"][: len(kinds)] or query.dtype != key.dtype:
        raise ValueError(
            f"sampled_bias: got query {query.dtype}, key {key.dtype}, and centre, own, near, slots of {kinds}, expected one "
            "dtype for both, and float32, bool, int32, int32"
        )
    return SAMPLED_BIAS.run(
        query, key, centre, slots, own, near, first=first, num_tables=num_tables, num_bits=num_bits,
        implementation=implementation, platform=platform,
    )  # fmt: skip
