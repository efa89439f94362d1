"""Decode attention over index lists: one list of cache slots or pages per (row, KV head), or one per row."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.gather_attention import jax_triton, pallas_triton, reference
from pallas_kernels.numerics import merge_partials

__all__ = ["GATHER_ATTENTION", "gather_attention", "merge_partials"]

GATHER_ATTENTION = Operation(
    "gather_attention",
    {
        "pallas_triton": Implementation(pallas_triton.gather_attention, ("gpu",), pallas_triton.check),
        # For comparison: its check asks for more than the first, which therefore runs wherever it can.
        "jax_triton": Implementation(jax_triton.gather_attention, ("gpu",), jax_triton.check),
        "xla": Implementation(reference.gather_attention),
    },
)


def gather_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slots: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
    bias: jax.Array | None = None,
    page_size: int = 1,
    position: jax.Array | None = None,
    place: jax.Array | None = None,
    inv_freq: jax.Array | None = None,
    key_copy: jax.Array | None = None,
    value_copy: jax.Array | None = None,
    newest: jax.Array | None = None,
    sinks: int = 0,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one query per head over the listed slots only; softmax in float32.

    Rows that are not listed, or listed and masked, never enter, whatever they hold (NaN included). A slot
    listed twice counts twice. Not differentiable on every implementation.

    Args:
        query: [B, H, G, D].
        key: [B, H, S, D], same dtype, in device memory or in pinned host memory, of which only listed rows are read.
        value: [B, H, S, D], likewise.
        slots: int32 [B, H, K], or [B, 1, K] for one list that all heads share; each in [0, S) where ``mask``
            holds, anything elsewhere. With ``page_size`` > 1 these are pages: page p is slots p * page_size to
            (p + 1) * page_size - 1, and those of them at S or beyond do not enter.
        mask: bool, shape of ``slots``: False ignores the entry.
        scale: factor of the logits, a Python number.
        bias: float32, shape of ``slots``, added to the scaled logits of all G query heads, or None; only with
            ``page_size`` 1.
        page_size: slots per list entry.
        position: int32 [B, H, S]; slots where it is negative hold nothing and do not enter. None: all listed
            slots enter.
        place: int32, shape of ``slots``: rotate the key of entry j (rotary embedding, pairs (i, i + D/2), angle
            ``place[j] * inv_freq[i]`` in float32, the result rounded to the dtype of the key) before its logit.
            None: keys are used as stored. Only with ``page_size`` 1.
        inv_freq: float32 [D/2], radians per place; given exactly with ``place``.
        key_copy: [B, H, R, D]: keys of the first ``sinks`` slots and of the newest R - sinks, laid out as
            `pallas_kernels.host.copy_row` says; rows that are here are read here and not in ``key``. None: all in ``key``.
        value_copy: likewise, of the values.
        newest: int32 [B], the slot behind the newest token; given exactly with copies.
        sinks: see ``key_copy``; below R.
        implementation: "pallas_triton" (GPU; D a power of two), "jax_triton" (the same kernel through the package of that
            name, without bias and place), "xla", or None for the first of "pallas_triton" and "xla" that runs.
        platform: see ``Operation.run``. ``GATHER_ATTENTION.resolve`` tells which implementation a call uses.

    Returns:
        out [B, H, G, D] in the dtype of the query, and lse float32 [B, H, G], the log of the softmax
        denominator; 0 and -inf for a list without a true mask entry. Parts over disjoint lists join by
        ``merge_partials``.

    Raises:
        ValueError: shapes or dtypes disagree, ``page_size`` excludes an argument, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    _check(query, key, value, {"slots": slots, "mask": mask, "bias": bias, "place": place}, position, inv_freq)
    if page_size != 1 and (page_size < 1 or bias is not None or place is not None):
        raise ValueError(f"gather_attention: got {page_size=}, expected at least 1, and 1 with bias or place")
    _check_copies(key, (key_copy, value_copy), newest, sinks)
    return GATHER_ATTENTION.run(
        query,
        key,
        value,
        slots,
        mask,
        scale=scale,
        bias=bias,
        page_size=page_size,
        position=position,
        place=place,
        inv_freq=inv_freq,
        key_copy=key_copy,
        value_copy=value_copy,
        newest=newest,
        sinks=sinks,
        implementation=implementation,
        platform=platform,
    )


def _check(query, key, value, lists, position, inv_freq):
    """Raise ``ValueError`` where shapes or integer dtypes disagree; ``lists`` by name, None where not given."""
    rows_of = (*query.shape[:2], key.shape[2] if key.ndim == 4 else -1, query.shape[-1])
    lists = {name: x for name, x in lists.items() if x is not None}
    shape = lists["slots"].shape
    agree = query.ndim == 4 and key.shape == value.shape == rows_of and len(shape) == 3
    agree = agree and shape[0] == query.shape[0] and shape[1] in (1, query.shape[1])
    if not agree or any(x.shape != shape for x in lists.values()):
        raise ValueError(
            f"gather_attention: got query {query.shape}, key {key.shape}, value {value.shape}, "
            f"{', '.join(lists)} {[x.shape for x in lists.values()]}, "
            "expected [B, H, G, D], [B, H, S, D], [B, H, S, D], [B, H or 1, K] each"
        )
    dtypes = [str(x.dtype) for x in lists.values()]
    expected = [{"mask": "bool", "bias": "float32"}.get(name, "int32") for name in lists]
    if dtypes != expected:
        raise ValueError(f"gather_attention: got {', '.join(lists)} of {dtypes}, expected {expected}")
    if position is not None and (position.shape, str(position.dtype)) != (key.shape[:3], "int32"):
        raise ValueError(
            f"gather_attention: got position {position.dtype} {position.shape}, expected int32 [B, H, S] = {key.shape[:3]}"
        )
    half = (query.shape[-1] // 2,)
    if ("place" in lists) != (inv_freq is not None) or (inv_freq is not None and inv_freq.shape != half):
        got = None if inv_freq is None else inv_freq.shape
        raise ValueError(f"gather_attention: got inv_freq {got}, expected [D/2] = {half} exactly when place is given")


def _check_copies(key, copies, newest, sinks):
    """Raise ``ValueError`` where copies of rows of ``key`` have no room for them, or come without what places them."""
    given = [x for x in copies if x is not None]
    if bool(given) != (newest is not None):
        raise ValueError("gather_attention: got one of copies and newest, expected both or none")
    for x in given:
        rows = x.shape[2] if x.ndim == 4 else 0
        if x.shape != (*key.shape[:2], rows, key.shape[3]) or x.dtype != key.dtype or not 0 <= sinks < rows:
            raise ValueError(
                f"gather_attention: got a copy {x.dtype} {x.shape} with {sinks=}, expected {key.dtype} [B, H, R, D] for key "
                f"{key.shape}, with R above sinks"
            )
