"""Queries in each segment's basis through Mosaic GPU, a program for some rows of a basis."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.packed import CARDS
from pallas_kernels._mosaic_gpu.pallas import plgpu
from pallas_kernels._mosaic_gpu.products import Products
from pallas_kernels._mosaic_gpu.steps import numbers
from pallas_kernels.formats.packed_vectors import TERMS, check_format
from pallas_kernels.machine import current_machine

STEPS = 1  # rows of a basis that a thread reads a part of
MOST_QUERIES = 16  # of a KV head, in registers
TAKES = f"{CARDS}, D of 32 to 256, G up to {MOST_QUERIES}"


def rounded(x: jax.Array, dtype) -> jax.Array:
    """Round float32 numbers [N] to ``dtype``, and return them as float32."""
    if dtype == jnp.float32:
        return x

    @plgpu.inline_mgpu(arg_types=(t.own(x.shape[0] // t.THREADS),), return_type=numbers(x.shape[0] // t.THREADS, jnp.float32))
    def run(ctx, x):
        return t.made_of([t.rounded(number, dtype) for number in t.numbers_of(x, floats=True)], floats=True)

    return run(x)


def _body(query_ref, basis_ref, out_ref, *, n, segments):
    # query [L, G, D]; basis [L * M * D, D]; out [L, M, G, N, D].
    line, first = lax.axis_index("x"), lax.axis_index("y") * n.rows
    row, head, writes = n.entries()
    chunks = n.chunks((basis_ref,), line * (segments * n.dim) + first + n.step_rows())
    projected = n.multiply(n.queries(query_ref, line), chunks, [basis_ref.dtype])
    segment, channel = lax.div(first + row, n.dim), lax.rem(first + row, n.dim)
    terms = out_ref.shape[3]
    at = ((line * segments + segment) * n.group + head) * terms
    for term in range(terms):
        x = projected if term < 3 else arrays.spread(0.0, projected.shape[0], jnp.float32)  # see `split_terms`
        arrays.store(out_ref, jnp.where(writes, (at + term) * n.dim + channel, -1), x)
        projected = projected - rounded(projected, out_ref.dtype)


def project_query(query, basis, *, dtype):
    """Project queries onto the basis of every segment."""
    (batch, heads, group, dim), segments = query.shape, basis.shape[2]
    n, lists = Products(group, dim, STEPS), batch * heads
    (out,) = arrays.program(
        functools.partial(_body, n=n, segments=segments),
        [jax.ShapeDtypeStruct((lists, segments, group, TERMS[str(dtype)], dim), dtype)],
        grid=(lists, segments * dim // n.rows),
    )(query.reshape(lists, group, dim), basis.reshape(lists * segments * dim, dim))
    return out.reshape(batch, heads, *out.shape[1:])


def check(query, basis, *, dtype):
    """Raise ``NotImplementedError`` for other machines, head dims, dtypes and groups than the kernel takes."""
    if not current_machine().has_kernels:
        raise NotImplementedError(f"got {current_machine()}, expected {CARDS}")
    arrays.check_floats(query)
    check_format(query.shape[-1], dtype)
    if query.shape[2] > MOST_QUERIES or basis.size >= 2**31:
        raise NotImplementedError(f"got {query.shape[2]} query heads, basis {basis.shape}, expected at most {MOST_QUERIES}")
