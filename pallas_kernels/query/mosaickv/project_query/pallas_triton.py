"""Queries in the basis of every segment, as one Pallas Triton kernel: a program per 16 rows of a basis."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.block_specs import of_row
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.formats.packed_vectors import TERMS, check_format

ROWS = 16  # rows of a basis per program


def _kernel(query_ref, basis_ref, parts_ref, *, group):
    # Of one row of the batch: query [H, G, D], basis [H, M, D, D], parts [H, M, G, N, D]. A program computes the channels of
    # `ROWS` rows of one basis for all query heads of its KV head.
    head, segment = pl.program_id(1) // basis_ref.shape[1], pl.program_id(1) % basis_ref.shape[1]
    row = pl.program_id(2) * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
    basis = basis_ref[head, segment, row, :]
    padded = pl.next_power_of_2(group)
    queries = [query_ref[head, min(g, group - 1), :].astype(jnp.float32) for g in range(padded)]
    projected = [jnp.sum(basis * query[None], axis=1) for query in queries]
    # Join the heads into one block [ROWS, Gp], so that all are written at once: threads wait for each other at every store.
    # Stacking the two halves of the list, again and again, leaves the heads in order.
    while len(projected) > 1:
        half = len(projected) // 2
        projected = [jnp.stack(pair, axis=-1) for pair in zip(projected[:half], projected[half:], strict=True)]
    rest = projected[0].reshape(ROWS, padded)
    # Heads that pad the group repeat the last head and write the same values to its rows.
    number = jnp.minimum(jnp.broadcast_to(jnp.arange(padded, dtype=jnp.int32)[None], rest.shape), group - 1)
    row = jnp.broadcast_to(row[:, None], rest.shape)
    # Each term takes the leading bits of the rest. After three terms the rest is zero; the fourth only makes a power of two.
    for part in range(parts_ref.shape[3]):
        term = rest.astype(parts_ref.dtype)
        if part == 3:
            term = jnp.zeros_like(term)
        plt.store(parts_ref.at[head, segment, number, part, row], term)
        rest = rest - term.astype(jnp.float32)


def project_query(query, basis, *, dtype, interpret=False):
    """Project queries onto the basis of every segment; ``interpret=True`` runs anywhere, slowly."""
    rows, heads, group, dim = query.shape
    segments, terms = basis.shape[2], TERMS[str(dtype)]

    parts = jax.ShapeDtypeStruct((rows, heads, segments, group, terms, dim), dtype)
    return triton_call(
        functools.partial(_kernel, group=group),
        grid=(rows, heads * segments, dim // ROWS),
        in_specs=[of_row(query), of_row(basis)],
        out_specs=of_row(parts),
        out_shape=parts,
        name="project_query",
        interpret=interpret,
    )(query, basis)


def check(query, basis, *, dtype):
    """Raise ``NotImplementedError`` for head dims and dtypes that the kernel does not take."""
    check_format(query.shape[-1], dtype)
