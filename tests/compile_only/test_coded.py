"""Products with weights in 8 and 4 bits for accelerators that need not be here; see `tests.compile_only.test_methods`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from kvjax import memory_needed, registry
from kvjax.decoding.decode import run_step
from kvjax.decoding.prefill import run_prefill
from models import param_shapes, shapes
from pallas_kernels.formats.coded_matrix import CodedMatrix, taken
from pallas_kernels.layer.coded_product import coded_product, few_vectors
from tests.compile_only.compiling import launches
from tests.compile_only.test_methods import needs

pytestmark = pytest.mark.xdist_group("compile_only")  # one worker has the compilers and their memory

COUNT, WIDTH = 14336, 4096
TABLE = CodedMatrix(
    codes=jax.ShapeDtypeStruct((128256, WIDTH), jnp.int8), scales=jax.ShapeDtypeStruct((128256, 1), jnp.float32)
)
GIB = 2**30


def matrix(bits):
    if bits == 8:
        scales = jax.ShapeDtypeStruct((COUNT, 1), jnp.float32)
        return CodedMatrix(codes=jax.ShapeDtypeStruct((COUNT, WIDTH), jnp.int8), scales=scales)
    scales = jax.ShapeDtypeStruct((COUNT, WIDTH // 32), jnp.float16)
    return CodedMatrix(codes=jax.ShapeDtypeStruct((COUNT, WIDTH // 2), jnp.uint8), scales=scales, minima=scales)


def held(machine, run, *args):
    return machine.compile(run, *args).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, *(pytest.param(rows, marks=pytest.mark.thorough) for rows in (4, 16))])
def test_a_few_rows_on_an_h100_are_one_kernel_that_spills_nothing(bits, rows):
    compiled = needs("h100").compile(coded_product, jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16), matrix(bits))
    held = 0 if rows <= few_vectors.MOST_VECTORS else 2 * rows * WIDTH  # the vectors in another order
    assert f"coded_product_{bits}" in compiled.as_text() and compiled.memory_analysis().temp_size_in_bytes == held


@pytest.mark.parametrize("weight_dtype", ["int8", pytest.param("int4", marks=pytest.mark.thorough)])
def test_a_layer_of_a_step_launches_four_products_and_three_kernels_of_attention(weight_dtype):
    """A launch takes more than a microsecond: see `docs/notebook/weights.md`."""
    machine, config = needs("h100"), dataclasses.replace(shapes.llama31_8b(), num_layers=2)
    params, one = param_shapes(config, weight_dtype), jax.ShapeDtypeStruct((1, 1), jnp.int32)
    prompt = jax.ShapeDtypeStruct((1, 32768), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    run = functools.partial(run_prefill, method=registry.make("snapkv"), model=config, max_new_tokens=64, chunk_size=4096)
    with machine.assumed():
        cache = jax.eval_shape(run, params, *prompt)
    step = machine.compile(run_step, params, cache, one, jax.ShapeDtypeStruct((1, 1), bool), donate_argnums=1)
    product = f"coded_product_{weight_dtype[-1]}"
    attention = [product, "store_token", "dense_decode", "merge_splits", product]
    assert [name.split("/")[-2] for _, name in launches(step) if "layers_1" in name] == [*attention, product, product]


@pytest.mark.parametrize("name", ["h100", "t4", "tpu_v5e"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 64])
def test_plain_products_hold_no_decoded_copy(name, bits, rows):
    x = jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16)
    run = functools.partial(coded_product, implementation="xla")
    assert held(needs(name), run, x, matrix(bits)) < 2 * COUNT * WIDTH / 3


@pytest.mark.parametrize("name", ["h100", "t4", "tpu_v5e"])
def test_a_table_of_codes_is_neither_copied_nor_decoded(name):
    head = functools.partial(coded_product, dtype=jnp.float32)
    assert held(needs(name), head, jax.ShapeDtypeStruct((1, WIDTH), jnp.bfloat16), TABLE) < 2**24
    assert held(needs(name), taken, TABLE, jax.ShapeDtypeStruct((1, 1), jnp.int32)) < 2**24


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method", "kv_dtype"),
    [("t4", "snapkv", None), ("t4", "pariskv", None), ("tpu_v5e", "snapkv", None), ("tpu_v5e", "pariskv", "int8")],
)
def test_an_8b_model_in_8_bits_reads_32k_tokens_in_14_gib(name, method, kv_dtype):
    machine, config = needs(name), shapes.llama31_8b()
    params = param_shapes(config, "int8")
    sizes = {"max_new_tokens": 64, "chunk_size": 2048, "kv_dtype": kv_dtype}
    run = functools.partial(run_prefill, method=registry.make(method), model=config, **sizes)
    prompt = jax.ShapeDtypeStruct((1, 32768), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    memory = machine.compile(run, params, *prompt).memory_analysis()
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes < 14 * GIB
    with machine.assumed():
        cache = jax.eval_shape(run, params, *prompt)
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1, 1), bool)
    memory = machine.compile(run_step, params, cache, *token, donate_argnums=1).memory_analysis()
    # In place of a kernel, plain JAX decodes a layer's codes where a step reads them.
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < 14 * GIB
    assert memory.temp_size_in_bytes < GIB / 8 or kv_dtype
    needed = memory_needed(method, config, batch=1, prompt_slots=32768, **sizes)
    assert needed.device + needed.staged + config.weight_bytes(params, 1) < 14 * GIB
