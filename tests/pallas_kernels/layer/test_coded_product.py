"""Products with matrices in 8 and 4 bits against float64; what is stored and how; what the compiled program holds."""

import functools
import itertools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.coded_matrix import CHUNK, GROUP, CodedMatrix, decoded, levels, packed, taken
from pallas_kernels.layer.coded_product import coded_product, few_vectors
from tests.pallas_kernels import cases

RUN = cases.implementations("coded_product") | {"jax_triton": functools.partial(coded_product, implementation="jax_triton")}
RUN = {name: functools.partial(run, dtype=jnp.float32) for name, run in RUN.items()}
EACH = [*cases.NAMES, pytest.param("jax_triton", marks=[cases.NEEDS_GPU, cases.NEEDS_JAX_TRITON])]
KINDS = ("8 bits", "8 bits in groups", "4 bits")


def draw(kind, count=40, width=128, seed=0):
    """A random matrix, and its numbers in float64, computed number by number from the order of the format's docstring."""
    rng = np.random.default_rng(seed)
    groups = 1 if kind == "8 bits" else width // GROUP
    scale = rng.uniform(0.5, 1, (count, groups)).astype(np.float16 if groups > 1 else np.float32)
    least = rng.normal(size=scale.shape).astype(np.float16) * 4 if kind == "4 bits" else None
    codes = rng.integers(0, 16, (count, width)) if kind == "4 bits" else rng.integers(-127, 128, (count, width))
    stored = np.zeros((count, width // 2) if kind == "4 bits" else (count, width), np.uint8 if kind == "4 bits" else np.int8)
    for number in range(width):
        chunk, place = divmod(number, 64)
        if kind == "4 bits":
            stored[:, chunk * 32 + place % 32] |= (codes[:, number] << (4 * (place // 32))).astype(np.uint8)
        else:
            stored[:, number] = codes[:, number]
    wide = np.repeat(scale.astype(np.float64), width // groups, axis=1)
    numbers = codes * wide + (0 if least is None else np.repeat(least.astype(np.float64), width // groups, axis=1))
    minima = None if least is None else jnp.asarray(least)
    return CodedMatrix(codes=jnp.asarray(stored), scales=jnp.asarray(scale), minima=minima), numbers, codes


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [[3, 40, 128], [5, 40, 128], *cases.one_shape([1, 33, 64], [4, 33, 448], [16, 64, 448])])
def test_product_equals_float64(name, kind, shape):
    rows, count, width = shape
    matrix, numbers, _ = draw(kind, count, width)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, width)), jnp.bfloat16)
    expected = np.asarray(x, np.float64) @ numbers.T
    error = np.abs(np.asarray(cases.compiled(RUN[name])(x, matrix), np.float64) - expected).max() / np.abs(expected).max()
    # Plain JAX rounds numbers with a scale of their own group to bfloat16, as the weights of a model in bfloat16 are.
    assert error < (4e-3 if name == "xla" and kind != "8 bits" else 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_few_vectors_keep_small_numbers_beside_large_ones_and_pass_nan_on(kind):
    """Numbers from 2^-20 to 2^20 in each vector; a vector with NaN or infinity is NaN, and the others are as without it."""
    matrix, numbers, _ = draw(kind, 33, 256)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(4, 256)) * 2.0 ** rng.integers(-20, 20, (4, 1)), jnp.bfloat16)
    x = x.at[0, 100:].set(0).at[1, 3].set(jnp.nan).at[3, 255].set(jnp.inf)
    got = np.asarray(cases.compiled(RUN["interpreted"])(x, matrix), np.float64)
    assert np.isnan(got[[1, 3]]).all()
    expected = np.asarray(x, np.float64)[[0, 2]] @ numbers.T
    error = np.abs(got[[0, 2]] - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert (error < 2e-5).all()


def passed(x, *, numbers, scale=None, gated=False, residual=None):
    """In float64: a norm, the product with ``numbers``, gates, and a sum."""
    x, scale, residual = (None if a is None else np.asarray(a, np.float64) for a in (x, scale, residual))
    x = x if scale is None else x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * scale
    out = x @ numbers.T
    if gated:
        gates, others = np.split(out, 2, axis=-1)
        out = gates / (1 + np.exp(-np.maximum(gates, -700))) * others
    return out if residual is None else residual + out


@cases.every_body
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", cases.one_shape([3, 22, 192], [1, 22, 448], [4, 32, 2048]))
@pytest.mark.parametrize("names", cases.one_shape(["scale gated residual"], ["scale"], ["gated"], ["residual"]))
def test_norm_gates_and_sum_in_passing_equal_float64_and_nan_stays_in_its_row(name, kind, shape, names):
    (rows, count, width), rng = shape, np.random.default_rng(1)
    matrix, numbers, _ = draw(kind, count, width)
    gated = "gated" in names[0]
    small = 0.1 / width**0.5  # gates are numbers of about 1
    x = jnp.asarray(rng.normal(size=(rows, width)) * small, jnp.bfloat16)
    arrays = {
        "scale": jnp.asarray(rng.normal(size=width) * small, jnp.bfloat16),
        "residual": jnp.asarray(rng.normal(size=(rows, count // 2 if gated else count)), jnp.float32),
    }
    arrays = {key: value for key, value in arrays.items() if key in names[0]}
    expected = passed(x, numbers=numbers, gated=gated, **arrays)
    if gated:
        matrix = jax.tree.map(lambda part: part.reshape(2, count // 2, -1), matrix)
    if rows > 1:
        x = x.at[1, 7].set(jnp.nan)
    got = np.asarray(cases.compiled(RUN[name], eps=1e-6, gated=gated)(x, matrix, **arrays))
    assert rows == 1 or np.isnan(got[1]).all()
    error = np.abs(got - expected)[np.arange(rows) != 1].max() / np.abs(expected).max()
    assert error < (2e-2 if name == "xla" else 2e-4)  # plain JAX rounds the norm to bfloat16, as a norm of its own does


# Of the products of Llama-3.1-8B the sizes of programs: bits, rows of a block, and words of a span.
PRODUCTS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]  # rows, width
SIZES = [(8, 8, 512), (4, 16, 256), (8, 4, 512), (8, 16, 256), (8, 8, 1024), (4, 8, 256)]


@pytest.mark.parametrize(
    ("bits", "block", "span"), [*SIZES[:2], *(pytest.param(*x, marks=cases.thorough) for x in SIZES[2:])]
)
def test_each_of_these_sizes_equals_float64_with_gates_and_a_last_program_that_is_not_full(bits, block, span):
    assert (block, span) in {tuple(few_vectors.sizes(1, bits, *x).values())[:2] for x in PRODUCTS}
    count, width = 2 * (block // 2 + 1), span * 32 // bits
    matrix, numbers, _ = draw(f"{bits} bits", count, width)
    rng, small = np.random.default_rng(1), 1 / (numbers.std() * width**0.5)  # gates are numbers of about 1
    x = jnp.asarray(rng.normal(size=(1, width)), jnp.bfloat16)
    scale = jnp.asarray(rng.normal(size=width) * small, jnp.bfloat16)
    residual = jnp.asarray(rng.normal(size=(1, count // 2)), jnp.float32)
    expected = passed(x, numbers=numbers, gated=True, scale=scale, residual=residual)
    how = {"dtype": jnp.float32, "eps": 1e-6, "gated": True, "interpret": True}
    got = cases.compiled(few_vectors.coded_product, block=block, span=span, **how)(x, matrix, scale, residual)
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())


def test_sizes_of_any_matrix_are_powers_of_two_with_halves_for_gates_and_whole_pieces():
    for vectors, bits, rows, chunks in itertools.product(
        (1, 2, 3, 4), (8, 4), (1, 2, 5119, 5120, 16384, 65536, 151936), (1, 3, 14, 24, 76, 128, 129, 140, 224)
    ):
        block, span, warps = few_vectors.sizes(vectors, bits, rows, width := chunks * CHUNK).values()
        step = math.gcd(span, width * bits // 32)
        assert block >= 2 and all(number.bit_count() == 1 for number in (block, step, warps)) and step % 4 == 0
        assert warps == 4 or warps == 8 and block * step // 4 >= 8 * 32  # a piece of four words for each thread


@pytest.mark.parametrize("kind", KINDS)
def test_codes_that_were_cast_are_refused(kind):
    cast = jax.tree.map(lambda part: part.astype(jnp.bfloat16), draw(kind)[0])
    for read in (lambda: taken(cast, jnp.arange(3)), lambda: coded_product(jnp.ones((1, 128)), cast)):
        with pytest.raises(TypeError, match="codes of a matrix must be int8 or uint8, got bfloat16: they cannot be cast"):
            read()


@pytest.mark.parametrize("kind", KINDS)
def test_codes_numbers_and_rows_are_what_was_stored(kind):
    matrix, numbers, codes = draw(kind)
    np.testing.assert_array_equal(levels(matrix.codes), codes)
    again = jnp.asarray(codes, jnp.int8) if matrix.bits == 8 else packed(jnp.asarray(codes, jnp.uint8))
    np.testing.assert_array_equal(again, matrix.codes)
    np.testing.assert_allclose(decoded(matrix), numbers, rtol=1e-6, atol=1e-5)
    rows = taken(matrix, jnp.asarray([[3, 39, 40]]))
    np.testing.assert_allclose(rows[0, :2], numbers[[3, 39]], rtol=1e-6, atol=1e-5)
    assert np.isnan(rows[0, 2]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_axes_of_rows_and_of_vectors_are_kept(kind):
    matrix, numbers, _ = draw(kind)
    both = jax.tree.map(lambda x: x.reshape(2, 20, -1), matrix)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 128)), jnp.float32)
    with jax.default_matmul_precision("highest"):  # else a GPU rounds the operands of a product in float32
        got = coded_product(x, both)
    assert got.shape == (2, 3, 2, 20) and got.dtype == x.dtype
    np.testing.assert_allclose(got.reshape(2, 3, 40), np.asarray(x, np.float64) @ numbers.T, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 64])
def test_the_compiled_program_holds_no_decoded_copy(kind, rows):
    width, count = 1024, 32768  # a tile of the loop is an eighth of it
    groups = 1 if kind == "8 bits" else width // GROUP
    scales = jax.ShapeDtypeStruct((count, groups), jnp.float16)
    if kind == "4 bits":
        matrix = CodedMatrix(codes=jax.ShapeDtypeStruct((count, width // 2), jnp.uint8), scales=scales, minima=scales)
    else:
        matrix = CodedMatrix(codes=jax.ShapeDtypeStruct((count, width), jnp.int8), scales=scales)
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    program = jax.jit(functools.partial(coded_product, implementation="xla")).lower(x, matrix).compile()
    held = program.memory_analysis().temp_size_in_bytes
    assert held < 2 * count * width, f"{held} bytes beside a matrix of {2 * count * width} bytes in bfloat16"


def test_a_derivative_goes_through_plain_jax():
    matrix, numbers, _ = draw("4 bits")
    with jax.default_matmul_precision("highest"):
        slope = jax.grad(lambda x: coded_product(x, matrix, implementation="xla").sum())(jnp.ones((2, 128)))
    np.testing.assert_allclose(slope, np.broadcast_to(numbers.sum(0), slope.shape), rtol=1e-4, atol=1e-2)


def test_jax_triton_takes_what_the_first_implementation_takes_and_names_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    matrix = draw("4 bits")[0]
    for x, error in (
        (jnp.zeros((17, 128), jnp.bfloat16), "got 17 vectors, expected 1 to 16"),
        (jnp.zeros((2, 128), jnp.float32), "got vectors of float32, expected bfloat16"),
        (jnp.zeros((2, 128), jnp.bfloat16), r"needs the package jax_triton \(pip install kvjax\[triton\]\)"),
    ):
        with pytest.raises(NotImplementedError, match=error):
            coded_product(x, matrix, implementation="jax_triton", platform="gpu")
    with pytest.raises(NotImplementedError, match=r"needs a platform in \('gpu',\)"):
        coded_product(x, matrix, implementation="jax_triton", platform="cpu")
