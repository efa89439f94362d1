"""Decode attention over all tokens of a cache: one query per head or a few, contiguous slots, a length known at run time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attend.dense_decode import jax_triton, pallas_tpu, pallas_triton, reference
from pallas_kernels.attend.dense_decode.rotation import Rotation, rotated_keys
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.quantised import Quantised, mixed_problem
from pallas_kernels.numerics import merge_pair

__all__ = ["DENSE_DECODE", "Rotation", "dense_decode"]


_JOINED = frozenset(("partials", "gap", "rotation", "parts", "mass"))  # the arguments that `_joined` adds


def _joined(run: Callable[..., Any]) -> Callable[..., Any]:
    """Extend an implementation without ``partials``, ``gap``, ``rotation``, ``parts`` and ``mass`` to all arguments.

    Gaps are read too. Plain JAX rotates the keys, merges the partial softmax and computes the mass. The implementation gets
    ``query_position`` only where there are several queries.
    """

    @functools.wraps(run)
    def joined(
        query,
        key,
        value,
        *,
        partials=None,
        gap=None,
        rotation=None,
        query_position=None,
        parts=False,
        mass=False,
        **options,
    ):
        if rotation is not None:
            key = rotated_keys(key, options["position"], rotation)
        if query_position is not None:
            options["query_position"] = query_position
        found = run(query, key, value, **options)
        out, lse = found if partials is None else merge_pair(*found, *partials)
        if mass:
            return out, lse, reference.slot_mass(query, key, lse, **options)
        return (out.astype(jnp.float32)[:, :, None], lse[:, :, None]) if parts else (out, lse)

    return joined


def _one_query_of_one_width(check: Callable[..., None]) -> Callable[..., None]:
    """Extend the check of an implementation that `_joined` extends: for one query per head, and keys as wide as values."""

    def checked(query, key, value, *, query_position=None, **options):
        if query_position is not None:
            raise NotImplementedError(f"got {query.shape[3]} queries per head with positions, expected one without")
        if key.shape != value.shape:
            widths = f"keys of {key.shape[3]} numbers and values of {value.shape[3]}"
            raise NotImplementedError(f"got {widths}, expected one width")
        options = {name: given for name, given in options.items() if name not in _JOINED}
        check(query, key, value, **options)

    return checked


DENSE_DECODE = Operation(
    "dense_decode",
    {
        "pallas_triton": Implementation(pallas_triton.dense_decode, ("gpu",), pallas_triton.check),
        # For comparison. Its check is stricter than the first, so the first runs wherever this one can.
        "jax_triton": Implementation(
            _joined(jax_triton.dense_decode), ("gpu",), _one_query_of_one_width(jax_triton.check)
        ),
        "pallas_tpu": Implementation(
            _joined(pallas_tpu.dense_decode), ("tpu",), _one_query_of_one_width(pallas_tpu.check)
        ),
        "xla": Implementation(_joined(reference.dense_decode)),
    },
    logits=True,
)


def _check_shapes(query, key, value, position, limit, partials, gap, rotation, query_position):
    """Refuse arguments of `dense_decode` whose shapes disagree, and integers of another dtype than int32."""
    several = query_position is not None
    expected = (*query.shape[:2], key.shape[2] if key.ndim == 4 else -1, query.shape[-1])
    agree = query.ndim - several == value.ndim == 4 and key.shape == expected and key.shape[:3] == value.shape[:3]
    if not agree or position.shape != key.shape[:3] or limit.shape != key.shape[:1]:
        members = "[B, H, G, T, E]" if several else "[B, H, G, E]"
        raise ValueError(
            f"dense_decode: got query {query.shape}, key {key.shape}, value {value.shape}, position {position.shape}, "
            f"limit {limit.shape}, expected {members}, [B, H, S, E], [B, H, S, D], [B, H, S], [B]"
        )
    if several and (query_position.shape, str(query_position.dtype)) != ((query.shape[0], query.shape[3]), "int32"):
        raise ValueError(
            f"dense_decode: got query_position {query_position.dtype} {query_position.shape}, "
            f"expected int32 [B, T], {(query.shape[0], query.shape[3])}"
        )
    whole = (*query.shape[:-1], value.shape[3])
    if partials is not None and [x.shape for x in partials] != [whole, whole[:-1]]:
        members = "[B, H, G, T, D] and [B, H, G, T]" if several else "[B, H, G, D] and [B, H, G]"
        raise ValueError(f"dense_decode: got partials {[x.shape for x in partials]}, expected {members}, {whole}")
    if gap is not None and (gap.shape, str(gap.dtype)) != ((*key.shape[:2], 2), "int32"):
        raise ValueError(
            f"dense_decode: got gap {gap.dtype} {gap.shape}, expected int32 [B, H, 2], {(*key.shape[:2], 2)}"
        )
    if (str(position.dtype), str(limit.dtype)) != ("int32", "int32"):
        raise ValueError(f"dense_decode: got position {position.dtype} and limit {limit.dtype}, expected int32")
    angles = None if rotation is None else (rotation.inv_freq.shape, rotation.origin.shape)
    if angles not in (None, ((key.shape[3] // 2,), (key.shape[0], 2))):
        raise ValueError(f"dense_decode: got inv_freq and origin {angles}, expected [E/2] and [B, 2]")


def dense_decode(
    query: jax.Array,
    key: jax.Array | Quantised,
    value: jax.Array | Quantised,
    *,
    position: jax.Array,
    limit: jax.Array,
    scale: float,
    partials: tuple[jax.Array, jax.Array] | None = None,
    gap: jax.Array | None = None,
    rotation: Rotation | None = None,
    query_position: jax.Array | None = None,
    parts: bool = False,
    mass: bool = False,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, ...]:
    """Attend with one query per head to the slots below a limit that hold a token; softmax in float32.

    Other slots may hold anything, NaN included. With ``query_position`` there are T queries per head, and each sees the
    tokens whose position is not after its own; for a few queries the kernel reads the cache once.

    Not differentiable: ``xla`` loops over blocks of keys up to a traced bound.

    Args:
        query: [B, H, G, E]; with ``query_position`` [B, H, G, T, E].
        key: [B, H, S, E], same dtype; or codes of this dtype, which "pallas_triton" multiplies as they are.
        value: [B, H, S, D], like ``key``; D need not be E.
        position: int32 [B, H, S], negative for an empty slot.
        limit: int32 [B], clipped to [0, S]; slots from there on do not enter and are not read.
        scale: factor of the logits, a Python number.
        partials: attention to what is in no slot, under the same softmax: output [B, H, G, D] and lse float32 [B, H, G], -inf
            where there is nothing. Both are merged with the attention to the slots. None: there is nothing else. With
            ``query_position`` both have axis T behind G, like the query.
        gap: int32 [B, H, 2], for each KV head the first slot of a range and the one behind its last, 0 <= first <= last <=
            S. **No slot within may hold a token**: "pallas_triton" does not read the blocks within. None: there are none.
        rotation: rotates the keys as they are read, see `Rotation`; the query is not rotated. None: keys are used as stored.
        query_position: int32 [B, T], in tokens; -1 for a padding query, which sees nothing. None: one query per head, which
            sees all tokens below the limit.
        parts: True: return N partial results, each over some of the slots; another kernel merges them with its own.
        mass: True: the result also has the attention that each slot receives, for a method that scores by it; of several
            queries from the first, because the logits of all would be more bytes than the keys. Not with ``parts``.
        implementation: "pallas_triton" (GPU; D a power of two, E a multiple of 16, G * T at most 64 with ``query_position``);
            "jax_triton" (the same kernel through the package of that name, E as D, one query); "pallas_tpu" (TPU; D as E, a
            multiple of 128, S of 8, one query); "xla"; or None for the first of "pallas_triton", "pallas_tpu" and "xla" that
            runs.
        platform: see ``Operation.run``. ``DENSE_DECODE.resolve`` tells which implementation a call uses.

    Returns:
        out [B, H, G, D] in the dtype of the query, and lse float32 [B, H, G], the log of the softmax denominator; 0 and
        -inf where a query sees no token, and ``partials`` adds nothing. With ``query_position`` both have axis T behind G.
        With ``parts`` they are float32 [B, H, N, G, D] and [B, H, N, G], or have axis T behind G. With ``mass`` also the
        probabilities, summed over the group: float32 [B, H, S], 0 for slots that are not below the limit or hold no token.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    _check_shapes(query, key, value, position, limit, partials, gap, rotation, query_position)
    if parts and mass:
        raise ValueError(
            "dense_decode: got parts and mass, expected one of them: before parts are joined there is no mass"
        )
    if not query.dtype == key.dtype == value.dtype:
        dtypes = [str(x.dtype) for x in (query, key, value)]
        raise ValueError(f"dense_decode: got dtypes {dtypes}, expected the same dtype")
    query, key, value, turned = mixed_problem(query, key, value, rotation is None)
    out, *rest = DENSE_DECODE.run(
        query,
        key,
        value,
        position=position,
        limit=limit,
        scale=scale,
        partials=None if partials is None else (turned(partials[0]), partials[1]),
        gap=gap,
        rotation=rotation,
        query_position=query_position,
        parts=parts,
        mass=mass,
        implementation=implementation,
        platform=platform,
    )
    return turned(out), *rest
