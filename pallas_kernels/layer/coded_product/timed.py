"""The shapes at which `coded_product` is timed: the largest product of an 8B layer, in 8 and in 4 bits.

V vectors and a matrix of N rows of K numbers: 8 bits with a scale for each row, or 4 with a scale and a minimum for each of
the G groups of a row.
"""

import jax.numpy as jnp

from pallas_kernels.formats.coded_matrix import GROUP, CodedMatrix
from pallas_kernels.formats.shapes import Drawing, Timed, normal


def matrix(d: Drawing) -> CodedMatrix:
    """Draw the codes of a matrix and their scales."""
    if d.bits == 8:
        codes = d.random.randint(next(d.keys), (d.N, d.K), -127, 128, jnp.int8)
        return CodedMatrix(codes=codes, scales=jnp.full((d.N, 1), 1e-3, jnp.float32))
    codes = d.random.bits(next(d.keys), (d.N, d.K // 2), jnp.uint8)
    scales = d.random.uniform(next(d.keys), (d.N, d.K // GROUP), jnp.float32, 0.005, 0.01).astype(jnp.float16)
    return CodedMatrix(codes=codes, scales=scales, minima=-8 * scales)


TIMED = Timed(
    label=lambda n: f"{n.bits} bits, {n.V} vector{'s' * (n.V > 1)}", sizes={"N": 28672, "K": 4096},
    shapes=tuple({"bits": bits, "V": vectors} for bits in (8, 4) for vectors in (1, 16)), tiny={"N": 40, "K": 128},
    arrays={"x": normal("V K"), "matrix": matrix}, reads=("matrix",), chained="x", float32=False,
)  # fmt: skip
