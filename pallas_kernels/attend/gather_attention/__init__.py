"""Decode attention over index lists: one list of cache slots or pages per (row, KV head), or one per row."""

from typing import Annotated

from jax import Array

from pallas_kernels.attend.gather_attention import jax_triton, pallas_mosaic_gpu, pallas_tpu, pallas_triton, reference
from pallas_kernels.dispatch import Operation
from pallas_kernels.formats.quantised import Quantised, vectors
from pallas_kernels.host import Rows
from pallas_kernels.numerics import merge_partials
from pallas_kernels.signature import declared, forward

__all__ = ["GATHER_ATTENTION", "gather_attention", "merge_partials"]

# The check of "jax_triton", which is for comparison, is stricter than the first, so the first runs wherever it can.
GATHER_ATTENTION = Operation.of(
    "gather_attention", pallas_triton, pallas_mosaic_gpu, jax_triton, pallas_tpu, reference, logits=True
)


@declared(GATHER_ATTENTION)
def gather_attention(
    query: Annotated[Array, "B H G D"],
    key: Annotated[Array | Quantised, "like query B H S D; B H _ D with rows"],
    value: Annotated[Array | Quantised, "like query B H S D; B H R D with rows"],
    slots: Annotated[Array, "int32 B H|1 K"],
    mask: Annotated[Array, "bool like slots"],
    *,
    scale: float,
    bias: Annotated[Array | None, "float32 like slots or B H G K"] = None,
    page_size: Annotated[int, ">=1"] = 1,
    position: Annotated[Array | None, "int32 B H S"] = None,
    place: Annotated[Array | None, "int32 like slots"] = None,
    inv_freq: Annotated[Array | None, "float32 D/2"] = None,
    rows: Annotated[Rows | None, "host: B H S _"] = None,
    partials: Annotated[tuple[Array, Array] | None, "float32 B H N G D", "float32 B H N G"] = None,
    logits: bool = False,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, ...]:
    """Attend with one query per head to the listed slots only; softmax in float32.

    Rows that are not listed, or listed and masked, never enter, and may hold anything, NaN included. A slot that is listed
    twice counts twice.

    Args:
        key: keys, or codes, which "pallas_triton" multiplies as they are.
        value: like ``key``.
        slots: one list for each head, or one that all heads share. Each slot is in [0, S) where ``mask`` is true, and may be
            anything elsewhere. With ``page_size`` > 1 these are pages: page p is slots p * page_size to
            (p + 1) * page_size - 1, and slots at S or beyond do not enter.
        mask: an entry with False is ignored.
        bias: added to the scaled logits of all G query heads; or a number for each query head, -inf where this head does not
            attend; or None. Only with ``page_size`` 1.
        page_size: slots per list entry.
        position: negative for an empty slot, which does not enter. None: all listed slots enter.
        place: the key of entry j is rotated before its logit (rotary embedding, pairs (i, i + D/2), angle
            ``place[j] * inv_freq[i]`` in float32, the result rounded to the dtype of the key). None: keys are used as
            stored. Only with ``page_size`` 1.
        inv_freq: radians per place; given exactly with ``place``.
        rows: the rows of an offloaded cache; only listed rows are read from host memory. ``value`` is then the copies on the
            device, and so is ``key`` unless it has all slots. A row with a copy is read from the device. If they are codes,
            so are the host's rows, and their scales have all slots.
        partials: N parts of attention to other tokens, which enter the same softmax, and the logs of their denominators.
        logits: True: the result has the logits too. Only with ``page_size`` 1.
        implementation: "pallas_triton" takes D a power of two. "pallas_mosaic_gpu" takes D 64, 128 or 256, 16 bits or codes
            of 8, G at most 64, without logits and a bias of each query head, and place without codes and bias.
            "jax_triton" is the kernel of "pallas_triton" through the package of that name, for comparison, without bias,
            place, parts beside and logits. "pallas_tpu" takes lists of pages with ``position``, whole tiles.

    Returns:
        out [B, H, G, D] in the dtype of the query, and lse float32 [B, H, G], the log of the softmax denominator; 0 and -inf
        for a list without a true mask entry and nothing beside it. ``merge_partials`` joins parts over disjoint lists.

        With ``logits`` also the logits under this softmax, float32 [B, H, G, K], -inf for entries that do not enter.
    """
    if page_size > 1 and (logits or bias is not None or place is not None):
        raise ValueError(f"gather_attention: got {page_size=}, expected 1 with bias, place or logits")
    if (place is None) != (inv_freq is None):
        raise ValueError("gather_attention: got one of place and inv_freq, expected both or none")
    if rows is not None:
        _check_rows(key, value, rows)
    return forward()


def _check_rows(key, value, rows):
    """Raise ``ValueError`` where the rows of an offloaded cache do not fit to the copies of ``key`` and ``value``."""
    slots, width = rows.host.shape[2:]
    widths, near = [vectors(x).shape[3] for x in (key, value)], value.shape[2]
    both = width > widths[1]
    held = (near,) if both else (near, slots)  # rows that keys may have
    if key.shape[2] not in held or width != (sum(widths) if both else widths[1]) or not 0 <= rows.sinks < near:
        raise ValueError(
            f"gather_attention: got key {key.shape}, value {value.shape}, rows.host {rows.host.shape} and "
            f"rows.sinks={rows.sinks}, expected keys and values of one number of copies above sinks, and hosted rows of "
            f"{sum(widths)} numbers; or of {widths[1]}, and keys of all slots"
        )
    dtypes = {str(x.dtype) for x in (vectors(key), vectors(value), rows.host)}
    scales = [x.scale.shape for x in (key, value) if isinstance(x, Quantised)]
    if len(dtypes) > 1 or any(shape[:3] != (*key.shape[:2], slots) for shape in scales):
        raise ValueError(
            f"gather_attention: got key, value and rows.host of {sorted(dtypes)} with scales {scales}, expected one dtype, "
            f"and scales of all slots, {(*key.shape[:2], slots)}"
        )
