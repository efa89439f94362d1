"""Decode attention over index lists: one list of cache slots or pages per (row, KV head), or one per row."""

from __future__ import annotations

import jax

from pallas_kernels.attend.gather_attention import jax_triton, pallas_tpu, pallas_triton, reference
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.quantised import Quantised, vectors
from pallas_kernels.host import Rows
from pallas_kernels.numerics import merge_partials

__all__ = ["GATHER_ATTENTION", "gather_attention", "merge_partials"]

GATHER_ATTENTION = Operation(
    "gather_attention",
    {
        "pallas_triton": Implementation(pallas_triton.gather_attention, ("gpu",), pallas_triton.check),
        # For comparison. Its check is stricter than the first, so the first runs wherever it can.
        "jax_triton": Implementation(jax_triton.gather_attention, ("gpu",), jax_triton.check),
        "pallas_tpu": Implementation(pallas_tpu.gather_attention, ("tpu",), pallas_tpu.check),
        "xla": Implementation(reference.gather_attention),
    },
    logits=True,
)


def gather_attention(
    query: jax.Array,
    key: jax.Array | Quantised,
    value: jax.Array | Quantised,
    slots: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
    bias: jax.Array | None = None,
    page_size: int = 1,
    position: jax.Array | None = None,
    place: jax.Array | None = None,
    inv_freq: jax.Array | None = None,
    rows: Rows | None = None,
    partials: tuple[jax.Array, jax.Array] | None = None,
    logits: bool = False,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, ...]:
    """Attend with one query per head to the listed slots only; softmax in float32.

    Rows that are not listed, or listed and masked, never enter, and may hold anything, NaN included. A slot that is listed
    twice counts twice.

    Differentiable: through ``xla``.

    Args:
        query: [B, H, G, D].
        key: [B, H, S, D], same dtype; or codes of this dtype. "pallas_triton" multiplies them as they are.
        value: [B, H, S, D], like ``key``.
        slots: int32 [B, H, K], or [B, 1, K] for one list that all heads share. Each is in [0, S) where ``mask`` is true, and
            may be anything elsewhere. With ``page_size`` > 1 these are pages: page p is slots p * page_size to
            (p + 1) * page_size - 1, and slots at S or beyond do not enter.
        mask: bool, shape of ``slots``; an entry with False is ignored.
        scale: factor of the logits, a Python number.
        bias: float32, shape of ``slots``, added to the scaled logits of all G query heads; or [B, H, G, K], a number for each
            query head, -inf where this head does not attend; or None. Only with ``page_size`` 1.
        page_size: slots per list entry.
        position: int32 [B, H, S], negative for an empty slot, which does not enter. None: all listed slots enter.
        place: int32, shape of ``slots``: the key of entry j is rotated before its logit (rotary embedding, pairs
            (i, i + D/2), angle ``place[j] * inv_freq[i]`` in float32, the result rounded to the dtype of the key). None:
            keys are used as stored. Only with ``page_size`` 1.
        inv_freq: float32 [D/2], radians per place; given exactly with ``place``.
        rows: the rows of an offloaded cache; only listed rows are read from host memory. ``value`` is then the
            copies [B, H, R, D] on the device, and so is ``key`` unless it has all slots. A row with a copy is read
            from the device. If they are codes, so are the host's rows, and their scales have all slots.
        partials: N parts of attention to other tokens, which enter the same softmax: float32 [B, H, N, G, D], and the logs of
            their denominators, float32 [B, H, N, G].
        logits: True: the result has the logits too. Only with ``page_size`` 1.
        implementation: "pallas_triton" (GPU; D a power of two), "jax_triton" (the same kernel through the package of that
            name, without bias, place, parts beside and logits), "pallas_tpu" (TPU; lists of pages with ``position``, whole
            tiles), "xla", or None for the first of "pallas_triton", "pallas_tpu" and "xla" that runs.
        platform: see ``Operation.run``. ``GATHER_ATTENTION.resolve`` tells which implementation a call uses.

    Returns:
        out [B, H, G, D] in the dtype of the query, and lse float32 [B, H, G], the log of the softmax denominator; 0 and -inf
        for a list without a true mask entry and nothing beside it. ``merge_partials`` joins parts over disjoint lists.

        With ``logits`` also the logits under this softmax, float32 [B, H, G, K], -inf for entries that do not enter.

    Raises:
        ValueError: shapes or dtypes disagree, ``page_size`` excludes an argument, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    lists = {"slots": slots, "mask": mask, "bias": bias, "place": place}
    _check(query, key, value, lists, position, inv_freq, rows)
    _check_options(query, lists, page_size, partials, logits)
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
        rows=rows,
        partials=partials,
        logits=logits,
        implementation=implementation,
        platform=platform,
    )


def _check_options(query, lists, page_size, partials, logits):
    """Raise ``ValueError`` where ``page_size`` excludes another argument, or the parts beside have other shapes."""
    apart = logits or any(lists[name] is not None for name in ("bias", "place"))
    if page_size < 1 or (page_size != 1 and apart):
        raise ValueError(f"gather_attention: got {page_size=}, expected at least 1, and 1 with bias, place or logits")
    if partials is None:
        return
    parts, lse = (x.shape for x in partials)
    if lse != (*query.shape[:2], *lse[2:3], query.shape[2]) or parts != (*lse, query.shape[3]):
        raise ValueError(f"gather_attention: got partials {parts}, {lse}, expected [B, H, N, G, D] and [B, H, N, G]")


def _check(query, key, value, lists, position, inv_freq, rows):
    """Raise ``ValueError`` where shapes or integer dtypes disagree; ``lists`` by name, None where not given."""
    slots = (key if rows is None else rows.host).shape[2] if key.ndim == 4 else -1
    rows_of = (*query.shape[:2], slots, query.shape[-1])
    lists = {name: x for name, x in lists.items() if x is not None}
    shape = lists["slots"].shape
    agree = query.ndim == 4 and len(shape) == 3 and (rows is not None or key.shape == value.shape == rows_of)
    agree = agree and shape[0] == query.shape[0] and shape[1] in (1, query.shape[1])
    apart = {"bias": (*query.shape[:3], shape[-1])}  # may be given for each query head
    if not agree or any(x.shape not in (shape, apart.get(name)) for name, x in lists.items()):
        raise ValueError(
            f"gather_attention: got query {query.shape}, key {key.shape}, value {value.shape}, "
            f"{', '.join(lists)} {[x.shape for x in lists.values()]}, "
            "expected [B, H, G, D], [B, H, S, D], [B, H, S, D], [B, H or 1, K] each, the bias also [B, H, G, K]"
        )
    dtypes = [str(x.dtype) for x in lists.values()]
    expected = [{"mask": "bool", "bias": "float32"}.get(name, "int32") for name in lists]
    if dtypes != expected:
        raise ValueError(f"gather_attention: got {', '.join(lists)} of {dtypes}, expected {expected}")
    if position is not None and (position.shape, str(position.dtype)) != (rows_of[:3], "int32"):
        raise ValueError(
            f"gather_attention: got position {position.dtype} {position.shape}, expected int32 [B, H, S] = {rows_of[:3]}"
        )
    half = (query.shape[-1] // 2,)
    if ("place" in lists) != (inv_freq is not None) or (inv_freq is not None and inv_freq.shape != half):
        got = None if inv_freq is None else inv_freq.shape
        raise ValueError(f"gather_attention: got inv_freq {got}, expected [D/2] = {half} exactly when place is given")
    if rows is None:
        return
    dim, host, sinks = query.shape[-1], rows.host, rows.sinks
    widths = [vectors(x).shape[3] for x in (key, value)]
    both = host.shape[3] > widths[1]
    near = value.shape[2]
    width = sum(widths) if both else widths[1]
    held = near if both or key.shape[2] == near else slots
    shapes = [(*rows_of[:2], near, dim), (*rows_of[:2], held, dim), (*rows_of[:3], width)]
    if [value.shape, key.shape, host.shape] != shapes or not 0 <= sinks < near:
        raise ValueError(
            f"gather_attention: got value {value.shape}, key {key.shape}, host {host.shape} and {sinks=}, expected {shapes} "
            f"and sinks below {near}"
        )
    kinds = {str(vectors(x).dtype) for x in (key, value)} | {str(host.dtype)}
    scales = [x.scale.shape for x in (key, value) if isinstance(x, Quantised)]
    if len(kinds) > 1 or any(shape[:3] != rows_of[:3] for shape in scales):
        raise ValueError(
            f"gather_attention: got key, value and host of {sorted(kinds)} with scales {scales}, expected one dtype, and "
            f"scales of all slots, {rows_of[:3]}"
        )
