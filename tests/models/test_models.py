"""The model description and the decoder: validation, Hugging Face keys, presets, shapes, no dead fields."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models import LinearLayers, ModelConfig
from models.files.tables.checkpoint import checkpoint_table
from models.layers.modules import multiplied
from models.sizes.experts import Experts
from models.sizes.latent import Latent
from models.sizes.parts import LayerRope
from pallas_kernels.machine import Machine, assume_machine
from tests.tiny_models import FAMILIES, SCALING, TINY, dense_attend, run, vivid_params

pytestmark = pytest.mark.usefixtures("quick_compile")  # tests/models/test_parity.py compiles as users do

TOKENS = jax.random.randint(jax.random.key(1), (2, 24), 0, TINY["vocab_size"], jnp.int32)


# Fields whose effect is elsewhere: the cache's capacity check and the end of generation.
READ_BY_KVJAX = {"max_position_embeddings", "eos_token_ids"}
CHANGES = {
    "vocab_size": 80, "hidden_size": 48, "intermediate_size": 64, "num_layers": 3, "num_q_heads": 8,
    "num_kv_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-2, "rope_theta": 50.0, "rope_scaling": SCALING,
    "tie_word_embeddings": True, "qkv_bias": True, "qk_norm": True, "dtype": "bfloat16",
    "ropes": (LayerRope(theta=1e4), LayerRope(theta=1e4, rotated=0)),
    "experts": Experts(
        num_experts=4, num_experts_per_tok=2, intermediate_size=48, norm_topk_prob=True, layers=(0, 1)
    ),
    "windows": (None, 5), "output_gate": True, "attention_sinks": True, "out_bias": True, "mlp_gate": False,
    "latent": Latent(rank=10, rotated=6, key_dim=8, value_dim=12),
    "linear": LinearLayers(
        num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6, conv_width=4, layers=(0,)
    ),
    "wide_qk_norm": True, "norm_place": "after", "norm": "layer", "activation": "gelu", "query_scale": 0.3,
    "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_softcap": 2.0,
    "logits_multiplier": 0.5, "logit_softcap": 2.0, "family": "olmo2",
}  # fmt: skip
PARTS = tuple(CHANGES)[-11:]
WITH = {  # what else a field needs
    "latent": {"num_kv_heads": 1, "query_scale": 0.3, "ropes": (LayerRope(theta=1e4, rotated=6),) * 2}
}


@functools.cache
def program(config):
    return str(jax.make_jaxpr(functools.partial(run, config))(models.param_shapes(config), TOKENS))


@functools.cache
def plain_logits(config, family="llama"):
    """Of a family's parameters, one operation after the other: nothing compiles but operations, which configs share."""
    with jax.disable_jit():
        return run(config, vivid_params(FAMILIES[family]), TOKENS)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ModelConfig) if f.name not in READ_BY_KVJAX])
def test_no_field_is_dead(field):
    """A field changes either the parameters (and then every one of them is used: next test) or the logits."""
    base = FAMILIES["llama"]
    changed = dataclasses.replace(base, **{field: CHANGES[field], **WITH.get(field, {})})
    if field == "family":  # the names of the files' tensors
        assert checkpoint_table(base) != checkpoint_table(changed)
    elif field in PARTS:  # their values are compared with transformers' (test_families.py)
        assert program(base) != program(changed)
    elif field in ("rms_norm_eps", "rope_theta", "rope_scaling", "ropes", "dtype", "windows"):
        assert jnp.abs(plain_logits(base) - plain_logits(changed)).max() > 1e-3
    else:
        shapes = [{leaf.path: leaf.shape for leaf in checkpoint_table(c)} for c in (base, changed)]
        assert shapes[0] != shapes[1]
        logits = jax.eval_shape(functools.partial(run, changed), models.param_shapes(changed), TOKENS)
        assert logits.shape == (2, 24, changed.vocab_size)


TRAINED = {
    "qwen2": dataclasses.replace(FAMILIES["qwen2"], dtype="bfloat16", num_layers=1),
    "qwen3_tied": dataclasses.replace(FAMILIES["qwen3_tied"], dtype="bfloat16"),
    "linear": dataclasses.replace(FAMILIES["llama"], linear=CHANGES["linear"], output_gate=True),
    "experts": dataclasses.replace(FAMILIES["llama"], experts=CHANGES["experts"]),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.thorough] * (x != "qwen2")) for x in TRAINED])
def test_every_parameter_has_a_gradient_in_float32(name):
    """In computations in bfloat16, and over more than one chunk of linear attention."""
    config, tokens = TRAINED[name], jnp.resize(TOKENS, (2, 70 if name == "linear" else 24))

    @jax.jit
    def gradient(params):
        return jax.grad(lambda p: -jax.nn.log_softmax(run(config, p, tokens))[..., 0].mean())(params)

    for leaf in jax.tree.leaves(gradient(vivid_params(dataclasses.replace(config, dtype="float32")))):
        assert leaf.dtype == jnp.float32 and jnp.isfinite(leaf).all() and jnp.abs(leaf).max() > 0


@pytest.mark.parametrize("family", ["untiled_heads", pytest.param("qwen3_tied", marks=pytest.mark.thorough)])
def test_last_is_a_slice_of_all_positions(family):
    config = FAMILIES[family]
    params = vivid_params(config)
    every = run(config, params, TOKENS)
    last = jnp.array([5, 23], jnp.int32)
    assert every.shape == (2, 24, config.vocab_size) and every.dtype == jnp.float32
    picked = run(config, params, TOKENS, last)
    np.testing.assert_allclose(picked, every[jnp.arange(2), last], rtol=1e-5, atol=1e-5)


def test_head_runs_on_one_position_only():
    config = dataclasses.replace(FAMILIES["llama"], vocab_size=4096)
    arguments = (models.param_shapes(config), jax.ShapeDtypeStruct((1, 512), jnp.int32))
    last = jax.ShapeDtypeStruct((1,), jnp.int32)
    lowered = run.lower(config, *arguments, last)
    assert "512x4096" not in lowered.as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attend_sees_grouped_heads_in_the_compute_dtype_and_states_are_threaded(dtype):
    config = dataclasses.replace(FAMILIES["qwen3"], dtype=dtype)
    params = models.param_shapes(FAMILIES["qwen3"])  # stored in float32 either way
    seen = []

    def attend(layer, state, q, k, v):
        seen.append((layer, state, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype))
        return q, state + 10

    def apply(params):
        logits, states = config.apply(params, TOKENS, attend, (1, 2), last=jnp.array([0, 3], jnp.int32))
        assert states == (11, 12)
        return logits

    logits = jax.eval_shape(apply, params)
    shapes = (2, 2, 2, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16)
    assert seen == [(i, i + 1, *shapes, *(jnp.dtype(dtype),) * 3) for i in range(2)]
    assert logits.dtype == jnp.float32 and logits.shape == (2, config.vocab_size)


@pytest.mark.parametrize("parts", [{}, {"qk_norm": False, "wide_qk_norm": True, "query_scale": 0.3, "norm_place": "after"}])
def test_a_guess_is_what_the_layer_makes_of_the_input_of_the_layer_before(parts):
    """With bias, norm and scale: it is the query of layer 0 if that has the projections of layer 1."""
    config = dataclasses.replace(FAMILIES["qwen3"], qkv_bias=True, **parts)
    params = vivid_params(config)
    seen = []

    def attend(layer, state, q, k, v, *guess):
        seen.append((q, *guess))
        return q, state

    swapped = {**params, "layers_0": {**params["layers_0"], "attention": params["layers_1"]["attention"]}}
    for given, guess in ((params, (1,)), (swapped, ())):
        config.apply(given, TOKENS, attend, (None, None), guess=guess)
    assert [len(given) for given in seen] == [1, 2, 1, 1]
    np.testing.assert_allclose(seen[1][1], seen[2][0], atol=1e-5, rtol=0)
    assert not np.allclose(seen[1][1], seen[1][0], atol=0.1)


def test_bfloat16_stays_near_float32():
    config = FAMILIES["qwen3"]
    exact, rounded = (plain_logits(dataclasses.replace(config, dtype=dtype), "qwen3") for dtype in ("float32", "bfloat16"))
    assert 1e-4 < jnp.abs(exact - rounded).mean() < 0.05 * jnp.abs(exact).mean()


def test_a_single_row_is_two_equal_rows_where_xla_would_multiply_and_reduce():
    """On a GPU, in 16 bits, and by a small matrix; the product is the same either way."""
    seen = []

    def product(x):
        seen.append(x.shape[1])
        return x @ jnp.ones((4, width), x.dtype) + x.sum(axis=2, keepdims=True)

    x = jnp.arange(4, dtype=jnp.bfloat16)[None, None]
    for machine, rows, width, expected in (
        (Machine("gpu", (9, 0)), x, 8, 2),
        (Machine("gpu", (9, 0)), x.astype(jnp.float32), 8, 1),
        (Machine("gpu", (9, 0)), x, 2_500_000, 1),
        (Machine("gpu", (9, 0)), jnp.tile(x, (1, 3, 1)), 8, 3),
        (Machine("cpu"), x, 8, 1),
    ):
        with assume_machine(machine.platform, machine.capability):
            out = jax.eval_shape(functools.partial(multiplied, product, width=width), rows)
            assert seen[-1] == expected
            assert out.shape == (1, rows.shape[1], width)
            if width == 8:
                np.testing.assert_array_equal(multiplied(product, rows, width), product(rows))


def test_token_past_the_vocabulary_gives_nan_not_another_row():
    config = FAMILIES["untiled_heads"]
    tokens = TOKENS.at[1, 4].set(config.vocab_size)
    logits = run(config, vivid_params(config), tokens)
    assert jnp.isfinite(logits[0]).all() and jnp.isnan(logits[1, 4]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": TOKENS[0]}, "tokens must be integers of shape [B, T], got int32 (24,)"),
        ({"tokens": TOKENS.astype(jnp.float32)}, "tokens must be integers of shape [B, T], got float32 (2, 24)"),
        ({"states": (None,)}, "expected one state for each of 2 layers, got 1"),
        ({"last": jnp.zeros((3,), jnp.int32)}, "last must have shape (2,), one index per row, got (3,)"),
        ({"attend": lambda layer, state, q, k, v: (k, state)}, "attend returned shape (2, 2, 24, 16) at layer 0, expected"),
    ],
)
def test_wrong_arguments_of_apply_are_refused(change, message):
    config = FAMILIES["llama"]
    call = {"tokens": TOKENS, "attend": dense_attend(config), "states": (None, None), "last": None, **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        config.apply(vivid_params(config), **call)


PLAIN = {  # operations of one layer of Llama, with an attention that computes nothing
    "dot_general": 4, "custom_jvp_call": 2, "jit": 1, "mul": 1, "reshape": 2, "slice": 5, "squeeze": 4, "transpose": 4,
}  # fmt: skip


def operations(config, layers):
    """How often each operation stands in the program of ``layers`` layers of the decoder, the ends of the model included."""
    config = dataclasses.replace(config, num_layers=layers)

    def run(params, tokens):
        return config.apply(params, tokens, lambda layer, state, q, k, v: (q, state), (None,) * layers)

    program = jax.make_jaxpr(run)(models.param_shapes(config), jax.ShapeDtypeStruct((1, 3), jnp.int32))
    return collections.Counter(equation.primitive.name for equation in program.jaxpr.eqns)


def test_parts_at_their_defaults_add_no_operation():
    """A layer of Llama has four products, two norms with their additions, a gate, and reshapes; Qwen2 adds its bias."""
    two, three = operations(FAMILIES["llama"], 2), operations(FAMILIES["llama"], 3)
    assert three - two == PLAIN
    ends = two - collections.Counter({name: 2 * count for name, count in PLAIN.items()})
    assert sum(ends.values()) <= 12 and not {"tanh", "erf", "concatenate"} & set(two), ends
    bias = operations(FAMILIES["qwen2"], 3) - operations(FAMILIES["qwen2"], 2)
    assert bias - collections.Counter(PLAIN) == {"add": 1, "reshape": 1}
