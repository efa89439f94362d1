"""Decode attention over all tokens of a cache: one query per head or a few, contiguous slots, a length known at run time."""

import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.attend.dense_decode import jax_triton, pallas_mosaic_gpu, pallas_tpu, pallas_triton, reference
from pallas_kernels.attend.dense_decode.rotation import Rotation, rotated_keys
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.quantised import Quantised, mixed_problem
from pallas_kernels.numerics import merge_pair
from pallas_kernels.signature import LOOP, declared, forward

__all__ = ["DENSE_DECODE", "Rotation", "dense_decode"]

_JOINED = frozenset(("partials", "gap", "rotation", "parts", "mass"))  # the arguments that `_joined` adds


def _joined(run: Callable[..., Any], rotates: bool = False) -> Callable[..., Any]:
    """Extend an implementation without ``partials``, ``gap``, ``rotation``, ``parts`` and ``mass`` to all arguments.

    Gaps are read too. Plain JAX rotates the keys, merges the partial softmax and computes the mass. The implementation gets
    ``query_position`` only where there are several queries, and a ``rotation`` only if it ``rotates`` by itself.
    """

    @functools.wraps(run)
    def joined(
        query, key, value, *, partials=None, gap=None, rotation=None, query_position=None, parts=False, mass=False, **options
    ):
        turned = key if rotation is None else rotated_keys(key, options["position"], rotation)  # computed only where read
        if query_position is not None:
            options["query_position"] = query_position
        found = run(query, key, value, rotation=rotation, **options) if rotates else run(query, turned, value, **options)
        out, lse = found if partials is None else merge_pair(*found, *partials)
        if mass:
            return out, lse, reference.slot_mass(query, turned, lse, **options)
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
        "pallas_mosaic_gpu": Implementation(
            pallas_mosaic_gpu.dense_decode, ("gpu",), pallas_mosaic_gpu.check, first=pallas_mosaic_gpu.first
        ),
        # For comparison. Its check is stricter than the first, so the first runs wherever this one can.
        "jax_triton": Implementation(_joined(jax_triton.dense_decode), ("gpu",), _one_query_of_one_width(jax_triton.check)),
        "pallas_tpu": Implementation(_joined(pallas_tpu.dense_decode), ("tpu",), _one_query_of_one_width(pallas_tpu.check)),
        "xla": Implementation(_joined(reference.dense_decode, rotates=True)),
    },
    logits=True,
)


@declared(DENSE_DECODE, derivative=LOOP)
def dense_decode(
    query: Annotated[Array, "B H G E; B H G T E with query_position"],
    key: Annotated[Array | Quantised, "like query B H S E"],
    value: Annotated[Array | Quantised, "like query B H S D"],
    *,
    position: Annotated[Array, "int32 B H S"],
    limit: Annotated[Array, "int32 B"],
    scale: float,
    partials: Annotated[
        tuple[Array, Array] | None,
        "floating B H G D; B H G T D with query_position",
        "float32 B H G; B H G T with query_position",
    ] = None,
    gap: Annotated[Array | None, "int32 B H 2"] = None,
    rotation: Annotated[Rotation | None, "inv_freq: float32 E/2", "origin: int32 B 2"] = None,
    query_position: Annotated[Array | None, "int32 B T"] = None,
    parts: bool = False,
    mass: bool = False,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, ...]:
    """Attend with one query per head to the slots below a limit that hold a token; softmax in float32.

    Other slots may hold anything, NaN included. With ``query_position`` there are T queries per head, and each sees the
    tokens whose position is not after its own; for a few queries the kernel reads the cache once.

    Args:
        key: keys, or codes, which "pallas_triton" multiplies as they are.
        value: like ``key``; D need not be E.
        limit: clipped to [0, S]; slots from there on do not enter and are not read.
        partials: attention to what is in no slot, under the same softmax: its output, and its lse, -inf where there is
            nothing. Both are merged with the attention to the slots. None: there is nothing else.
        gap: for each KV head the first slot of a range and the one behind its last, 0 <= first <= last <= S. **No slot
            within may hold a token**: "pallas_triton" does not read the blocks within. None: there are none.
        rotation: rotates the keys as they are read, see `Rotation`; the query is not rotated. None: keys are used as stored.
        query_position: in tokens; -1 for a padding query, which sees nothing. None: one query per head, which sees all
            tokens below the limit.
        parts: True: return N partial results, each over some of the slots; another kernel merges them with its own.
        mass: True: the result also has the attention that each slot receives, for a method that scores by it; of several
            queries from the first, because the logits of all would be more bytes than the keys. Not with ``parts``.
        implementation: "pallas_triton" takes D a power of two, E a multiple of 16, and G * T at most 64 with
            ``query_position``. "pallas_mosaic_gpu" takes D 64, 128 or 256, E as D, 16 bits or codes of 8, G * T at most 64;
            rotation and mass of 16 bits. "jax_triton" is the same kernel through the package of that name, for
            comparison: E as D, one query. "pallas_tpu" takes D as E, a multiple of 128, S of 8, one query.

    Returns:
        out [B, H, G, D] in the dtype of the query, and lse float32 [B, H, G], the log of the softmax denominator; 0 and
        -inf where a query sees no token, and ``partials`` adds nothing. With ``query_position`` both have axis T behind G.
        With ``parts`` they are float32 [B, H, N, G, D] and [B, H, N, G], or have axis T behind G. With ``mass`` also the
        probabilities, summed over the group: float32 [B, H, S], 0 for slots that are not below the limit or hold no token.
    """
    if parts and mass:
        raise ValueError("dense_decode: got parts and mass, expected one: before parts are joined there is no mass")
    query, key, value, unmixed = mixed_problem(query, key, value, rotation is None)
    return forward(
        lambda results: (unmixed(results[0]), *results[1:]),
        query=query,
        key=key,
        value=value,
        partials=None if partials is None else (unmixed(partials[0]), partials[1]),
    )
