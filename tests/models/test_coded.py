"""Weights in 8 and 4 bits: rounding, loading, GGUF's own codes, meshes, saving, and what stays as it was."""

import dataclasses
import functools

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from experiments.speed.roofline import of_device
from kvjax import memory_needed
from models import ModelConfig, from_pretrained, load, param_shapes, random_params, save_pretrained
from models.files.coded import coded, in_floats, rounded
from models.files.gguf import codes as gguf_codes
from models.files.tables.checkpoint import checkpoint_table
from models.layers.modules import product
from pallas_kernels.formats.coded_matrix import CodedMatrix, decoded
from tests.models import gguf_writing
from tests.models.test_latent import CONFIG as WITH_LATENT
from tests.models.test_weights import CONFIGS
from tests.tiny_models import run

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=128, intermediate_size=256, num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=32,
    max_position_embeddings=128, qkv_bias=True,
)  # fmt: skip
TOKENS = jnp.arange(12, dtype=jnp.int32)[None]
every_dtype = pytest.mark.parametrize("weight_dtype", ["int8", "int4"])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_pretrained(path, random_params(CONFIG, jax.random.key(0)), CONFIG)
    return path


@functools.cache
def loaded(directory, weight_dtype):
    return from_pretrained(directory, weight_dtype=weight_dtype)[0]


@jax.jit
def floats(params):
    flat = flatten_dict(params, sep="/")
    return unflatten_dict({path: in_floats(path, leaf, jnp.float32) for path, leaf in flat.items()}, sep="/")


def equal(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(x, y)


def test_eight_bits_are_within_half_a_step_of_the_largest_number():
    rows = np.random.default_rng(0).normal(size=(5, 128)).astype(np.float32)
    rows[3] = 0
    step = np.abs(rows).max(axis=1, keepdims=True) / 127
    assert (np.abs(decoded(rounded(jnp.asarray(rows), 8)) - rows) <= step * 0.501).all()


def test_four_bits_find_sixteen_levels_again_and_lose_less_than_equal_steps():
    rng = np.random.default_rng(0)
    scale = rng.uniform(0.5, 1, (6, 4, 1)).astype(np.float16).astype(np.float32)
    levels = rng.integers(0, 16, (6, 4, 32))
    levels[..., 0] = 15
    levels[..., 1] = rng.integers(0, 8, (6, 4))  # not every group reaches both ends
    rows = (scale * (levels - 8)).reshape(6, 128).astype(np.float32)
    np.testing.assert_allclose(decoded(rounded(jnp.asarray(rows), 4)), rows, atol=2e-3)
    rows = rng.normal(size=(6, 4, 32)).astype(np.float32)
    low, high = rows.min(-1, keepdims=True), rows.max(-1, keepdims=True)
    steps = np.rint((rows - low) / (high - low) * 15) * (high - low) / 15 + low
    found = decoded(rounded(jnp.asarray(rows.reshape(6, 128)), 4)).reshape(rows.shape)
    assert ((found - rows) ** 2).sum() < 0.95 * ((steps - rows) ** 2).sum()


@every_dtype
def test_a_model_in_codes_computes_what_its_numbers_compute(directory, weight_dtype):
    params = loaded(directory, weight_dtype)
    shapes = param_shapes(CONFIG, weight_dtype)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    logits, expected = (run(CONFIG, given, TOKENS) for given in (params, floats(params)))
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    few = TOKENS[:, :3]  # of few tokens products compute norms, gates and sums in passing
    np.testing.assert_allclose(run(CONFIG, params, few), expected[:, :3], atol=2e-5)
    whole = from_pretrained(directory)[0]
    off = np.abs(logits - run(CONFIG, whole, TOKENS)).max()
    assert 0 < off < {"int8": 0.02, "int4": 0.12}[weight_dtype]
    assert CONFIG.weight_bytes(params, 1) < {"int8": 0.27, "int4": 0.17}[weight_dtype] * CONFIG.weight_bytes(whole, 1)


@pytest.mark.parametrize("guess", [(), (1,)])
def test_layers_of_few_tokens_in_passing_ask_and_guess_as_layers_of_many(directory, guess):
    """The queries, keys, values and guessed queries of each layer."""

    @jax.jit
    def seen(params, tokens):
        def attend(layer, state, q, *rest):
            return q, (q, *rest)

        return CONFIG.apply(params, tokens, attend, (None, None), guess=guess)[1]

    few, many = (seen(loaded(directory, "int8"), TOKENS[:, :count]) for count in (3, 5))
    assert [len(arrays) for arrays in many] == [3, 3 + len(guess)]
    for one, other in zip(*map(jax.tree.leaves, (few, many)), strict=True):
        np.testing.assert_allclose(one, other[..., :3, :], atol=1e-6)


@pytest.mark.parametrize("weight_dtype", ["int4", pytest.param("int8", marks=pytest.mark.thorough)])
def test_memory_cost_and_floor_count_codes(weight_dtype):
    params = random_params(CONFIG, jax.random.key(0), weight_dtype=weight_dtype)
    held = sum(x.nbytes for x in jax.tree.leaves(params))
    table = params["embed"]["embedding"]
    two_rows = 2 * (table.width + 4)  # with their scales
    read = held - sum(x.nbytes for x in jax.tree.leaves(table)) + two_rows
    sizes = {"batch": 2, "prompt_slots": 16, "max_new_tokens": 4}
    needed = memory_needed("full", CONFIG, **sizes, params=param_shapes(CONFIG, weight_dtype))
    assert needed.weights == held and CONFIG.weight_bytes(of_device(params), 2) == read


@every_dtype
def test_random_codes_have_the_spread_of_random_numbers(weight_dtype):
    params = floats(random_params(CONFIG, jax.random.key(0), weight_dtype=weight_dtype))
    kernel = params["layers_0"]["mlp"]["gate_up"]["kernel"]
    assert kernel.shape == (128, 2, 256) and 0.018 < kernel.std() < 0.022 and abs(kernel.mean()) < 1e-3


@every_dtype
def test_codes_are_saved_as_their_numbers(directory, weight_dtype, tmp_path):
    params = loaded(directory, weight_dtype)
    save_pretrained(tmp_path, params, CONFIG)
    equal(from_pretrained(tmp_path)[0], floats(params))


def test_products_with_arrays_are_traced_as_without_codes():
    x, kernel = jnp.zeros((1, 3, 8), jnp.bfloat16), jnp.zeros((8, 4), jnp.bfloat16)

    def dense(x, kernel):
        return jax.lax.dot_general(x, kernel, (((2,), (0,)), ((), ())))

    assert str(jax.make_jaxpr(lambda x, k: product(x, k, dense))(x, kernel)) == str(jax.make_jaxpr(dense)(x, kernel))


def test_a_model_by_name_is_adapted_before_it_is_rounded():
    found = load("builtin", weight_dtype="int8", offline=True)
    assert repr(found).startswith("Loaded('builtin', 15M parameters in codes and float32, 16 MB, ")


def test_unknown_names_experts_and_latents_are_refused(directory):
    with pytest.raises(ValueError, match="weight_dtype must be one of int8, int4 or None, got 'int3'"):
        from_pretrained(directory, weight_dtype="int3")
    for config, part in ((CONFIGS["mixtral"], "experts, got Experts"), (WITH_LATENT, "latent attention, got Latent")):
        with pytest.raises(ValueError, match=f"weight_dtype='int8' needs a model without {part}"):
            param_shapes(config, "int8")
    short = {"embedding": coded("embed/embedding", np.zeros((8, 128), np.float32), "int8")}
    with pytest.raises(ValueError, match="params must belong to this model"):
        run(CONFIG, {**loaded(directory, "int8"), "embed": short}, TOKENS)


@pytest.mark.parametrize("kind", list(gguf_codes._READ))
def test_blocks_of_a_file_keep_their_numbers(kind):
    rng = np.random.default_rng(0)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (4 * 512 // gguf.GGML_QUANT_SIZES[kind][0], size), dtype=np.uint8)
    factors = (1, 2)[kind in (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q4_K)]
    blocks[:, : 2 * factors] = rng.uniform(0.01, 0.02, (len(blocks), factors)).astype(np.float16).view(np.uint8)
    parts = [None if x is None else jnp.asarray(x.reshape(4, -1)) for x in gguf_codes._READ[kind](blocks)]
    found = decoded(CodedMatrix(codes=parts[0], scales=parts[1], minima=parts[2]))
    expected = gguf.dequantize(blocks.reshape(4, -1), kind)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=6e-3 if kind.name == "Q4_K" else 1e-6)


def gguf_of(path, kinds):
    """Write CONFIG without biases as a file of the architecture llama, whose rows are re-ordered; kinds by part of a name."""
    config = dataclasses.replace(CONFIG, qkv_bias=False, num_layers=1)
    flat = flatten_dict(random_params(config, jax.random.key(1)), sep="/")
    weights = {}
    for leaf in checkpoint_table(config):
        weights |= leaf.split(np.asarray(flat[leaf.path]))
    hf = config.to_hf() | {"model_type": "llama"}
    tensors = gguf_writing.stored(hf, weights)
    chosen = {name: kind for name in tensors for part, kind in kinds.items() if part in name}
    gguf_writing.write(path, gguf_writing.metadata(hf), tensors, chosen)


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_codes_of_a_file_are_kept_and_other_types_get_their_bits(weight_dtype, tmp_path):
    path, kinds = tmp_path / "x.gguf", gguf.GGMLQuantizationType
    four, eight = dict.fromkeys(("attn_", "attn_output"), kinds.Q4_0), dict.fromkeys(("ffn_down", "token_embd"), kinds.Q8_0)
    one = dict.fromkeys(("ffn_gate", "ffn_up"), kinds.Q4_1)
    gguf_of(path, {**four, **eight, **one, "attn_v": kinds.Q8_0, "attn_norm": kinds.F32})
    params, _ = from_pretrained(path, weight_dtype=weight_dtype)
    whole, _ = from_pretrained(path)
    layer, numbers = params["layers_0"], floats(params)
    kernels = {name: layer[name.split("/")[0]][name.split("/")[1]]["kernel"] for name in
               ("attention/qkv", "attention/out", "mlp/gate_up", "mlp/down")}  # fmt: skip
    few = 4 if weight_dtype == "int4" else 8
    # Of the fused kernel one part has 8 bits.
    assert [kernel.bits for kernel in kernels.values()] == [8, few, few, 8]
    groups = [kernel.scales.shape[-1] for kernel in (*kernels.values(), params["embed"]["embedding"])]
    assert groups == [1, 4 if few == 4 else 1, 4 if few == 4 else 1, 8, 4]
    kept = [("mlp", "down"), *([("mlp", "gate_up"), ("attention", "out")] if few == 4 else [])]
    for block, name in kept:
        found, expected = (tree["layers_0"][block][name]["kernel"] for tree in (numbers, whole))
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    found, expected = (tree["layers_0"]["attention"]["qkv"]["kernel"] for tree in (numbers, whole))
    assert np.abs(found - expected).max() < np.abs(expected).max() / 250
