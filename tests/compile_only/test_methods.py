"""Every method's program compiles for an H100 and for a TPU v5e, which need not be here: only their compilers.

``JAX_PLATFORMS=cpu python -m pytest tests/compile_only/test_methods.py`` where ``jax[cuda13]`` or ``jax[tpu]`` is installed;
skipped, saying so, elsewhere. Nothing is run.
"""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.speed import uneven_scores
from kvjax import registry
from kvjax.attention.patterns import KINDS
from kvjax.cache.quantised import KV_DTYPES, has_groups
from kvjax.decoding.decode import run_decode, run_extend, run_step
from kvjax.decoding.prefill import run_prefill
from kvjax.decoding.sampling import Sampler
from kvjax.methods import Full
from kvjax.wrappers import Pattern, Prefill
from models import ModelConfig
from models.layers.modules import MLP
from models.weights import param_shapes
from pallas_kernels._triton.call import triton_call
from pallas_kernels.attend.gather_attention import gather_attention
from pallas_kernels.formats.quantised import zeros
from pallas_kernels.host import Rows
from pallas_kernels.store.store_token import store_token
from tests.compile_only.compiling import launches, target
from tests.harness import ELSEWHERE, small

pytestmark = pytest.mark.xdist_group("compile_only")  # one worker has the compilers and their memory

# Heads as in Llama-3.1-8B; the rest is small, since it is not what is looked at.
CONFIG = ModelConfig(
    vocab_size=512, hidden_size=512, intermediate_size=1024, num_layers=2, num_q_heads=32, num_kv_heads=8, head_dim=128,
    max_position_embeddings=1 << 20, dtype="bfloat16",
)  # fmt: skip
PROMPT = 32 * 1024  # tokens of the cache that is decoded from
STORE = PROMPT * CONFIG.num_kv_heads * CONFIG.head_dim * 2  # bytes of all keys of one layer: 64 MiB
NAMES = sorted(registry.classes())
BY_DEFAULT = [pytest.param(name, marks=[pytest.mark.thorough] * (name in ELSEWHERE)) for name in NAMES]
OFFLOADED = [name for name in NAMES if any(knob.name == "offload" for knob in registry.knobs(registry.classes()[name]))]


KNOBS = {  # of methods that need to be told something; the others are as they come
    "chess": {"trigger": "fixed", "interval": 6},
    "duoattention": {"scores": uneven_scores(CONFIG)},
    "freekv": {"num_dense_layers": 0},
    "headkv": {"scores": uneven_scores(CONFIG)},
    "infinigen": {"num_dense_layers": 0},
    "magicpig": {"capacity": 2048, "dense_every": 0},
    "quest": {"num_dense_layers": 0},
    "sentencekv": {"boundary": jnp.asarray(np.arange(CONFIG.vocab_size) % 20 == 0)},
    "shadowkv": {"budget": 1024},  # a step has keys and values of so many tokens at once
}


def needs(name):
    found = target(name)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def prefill(name, chunk_size, kv_dtype=None, **knobs):
    return functools.partial(
        run_prefill,
        method=small(registry.classes()[name], **KNOBS.get(name, {}), **knobs),
        model=CONFIG,
        max_new_tokens=64,
        chunk_size=chunk_size,
        kv_dtype=kv_dtype,
    )


def arguments(tokens, batch=1):
    shape = jax.ShapeDtypeStruct((batch, tokens), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    return param_shapes(CONFIG), *shape


def decode_step(machine, name, tokens, kv_dtype=None):
    """One compiled decode step after a prompt of ``tokens``."""
    with machine.assumed():
        cache = jax.eval_shape(prefill(name, tokens, kv_dtype), *arguments(tokens))
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1, 1), bool)
    return machine.compile(run_step, param_shapes(CONFIG), cache, *one, donate_argnums=1)


def test_a_kernel_that_spills_registers_is_refused():
    machine = needs("h100")

    def kernel(x_ref, out_ref):
        x = x_ref[...]
        out_ref[...] = x * jnp.sum(jnp.exp(x), axis=1)[:, None] * jnp.sum(x * x, axis=0)[None] * jnp.sum(x)

    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    run = triton_call(kernel, grid=(1,), out_shape=square, name="too_much_for_a_warp", num_warps=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="register spilling"):
        machine.compile(run, square)


OTHER_CARDS = [
    pytest.param(card, name, marks=[pytest.mark.thorough] * (name != "full")) for card in ("a100", "l4") for name in NAMES
]


@pytest.mark.parametrize(
    ("card", "name"), [*(pytest.param("h100", *x.values, marks=x.marks) for x in BY_DEFAULT), *OTHER_CARDS]
)
def test_a_decode_step_uses_kernels_copies_no_cache_and_spills_nothing(card, name):
    compiled = decode_step(needs(card), name, PROMPT)
    assert "triton" in compiled.as_text(), "no kernel of ours"
    share = 2 if name == "retrievalattention" else 4  # its query heads have scores of all tokens each
    assert compiled.memory_analysis().temp_size_in_bytes < STORE / share


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.thorough] * (x != "full")) for x in NAMES])
def test_before_ampere_everything_is_plain_jax(name):
    """Prompt and decode step, under every method."""
    machine = needs("t4")
    texts = decode_step(machine, name, 1024).as_text(), machine.compile(prefill(name, 512), *arguments(1024)).as_text()
    assert not any("triton" in text or "__cudnn$fmha" in text for text in texts)


def test_no_kernel_finishes_the_layers_of_a_prompt_together():
    """XLA would make the page bounds of several layers in one kernel, and compile it for minutes if there are 32 of them."""
    config = dataclasses.replace(CONFIG, num_layers=6, windows=(None,) * 6)
    read = functools.partial(run_prefill, method=registry.make("quest"), model=config, max_new_tokens=64, chunk_size=1024)
    text = needs("h100").compile(read, param_shapes(config), *arguments(1024)[1:]).as_text()
    assert max(part.count(" reduce(") for part in re.split(r"\n(?=%|ENTRY)", text)) == 2  # least and greatest of a page


@pytest.mark.parametrize(("name", "most"), [("chess", 23), ("tokenselect", 18)])
def test_a_step_of_two_rows_launches_no_more_fusions_of_xla(name, most):
    """Of products, norms, the token and the method's own arrays; a page that is complete adds those of its condition."""
    machine, one = needs("h100"), (jax.ShapeDtypeStruct((2, 1), jnp.int32), jax.ShapeDtypeStruct((2, 1), bool))
    with machine.assumed():
        cache = jax.eval_shape(prefill(name, 4096), *arguments(4096, 2))
    step = machine.compile(run_step, param_shapes(CONFIG), cache, *one, donate_argnums=1)
    assert [kind for kind, _ in launches(step)].count("fusion") <= most


def test_a_ring_of_queries_is_never_turned_round():
    """What an eviction does with the queries decides how XLA keeps them, and a step would pay for a change of layout."""
    found = re.findall(r"bf16\[1,8,4,255,128\](\{[\d,]+\})", decode_step(needs("h100"), "triattention", PROMPT).as_text())
    assert set(found) == {"{4,3,2,1,0}"}


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [(name, "float8_e4m3fn") for name in ("full", "quest")]
    + [(name, "int8") for name in ("full", "h2o", "snapkv", "quest", "pariskv", "sentencekv")]
    + [(name, "k8v4") for name in ("full", "quest")]
    + [("full", "int4")],
)
def test_decode_step_on_codes_for_an_h100_reads_the_codes(name, kv_dtype):
    """Keys that are read back as a whole would be arrays as large as a cache."""
    compiled = decode_step(needs("h100"), name, PROMPT, kv_dtype)
    assert "triton" in compiled.as_text(), "no kernel of ours"
    assert compiled.memory_analysis().temp_size_in_bytes < STORE / 4


@pytest.mark.parametrize("kv_dtype", [None, pytest.param("int8", marks=pytest.mark.thorough)])
def test_an_extend_of_few_tokens_for_an_h100_uses_the_decode_kernel_and_copies_no_cache(kv_dtype):
    machine, tokens = needs("h100"), 6
    with machine.assumed():
        cache = jax.eval_shape(prefill("full", PROMPT, kv_dtype), *arguments(PROMPT))
    given = jax.ShapeDtypeStruct((1, tokens), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    compiled = machine.compile(run_extend, param_shapes(CONFIG), cache, *given, donate_argnums=1)
    assert "dense_decode/pallas_call" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < STORE / 4


@pytest.mark.parametrize("kind", KV_DTYPES)
def test_kernels_of_offloaded_codes_compile_for_an_h100(kind):
    """Attention to listed slots and pages, and storing a token. The rows of host memory are stand-ins in device memory."""
    machine, shape = needs("h100"), jax.ShapeDtypeStruct
    heads, dim = CONFIG.num_kv_heads, CONFIG.head_dim
    kinds, mixed = KV_DTYPES[kind]
    sizes = (1, heads, 128, dim), "bfloat16"
    made = jax.eval_shape(lambda: [zeros(*sizes, one, mixed, has_groups(kinds, i)) for i, one in enumerate(kinds)])
    copies = [dataclasses.replace(x, scale=shape((1, heads, PROMPT, *x.scale.shape[3:]), "bfloat16")) for x in made]
    width = sum(x.codes.shape[3] for x in copies)
    host, newest = shape((1, heads, PROMPT, width), copies[0].codes.dtype), shape((1,), "int32")
    query, position = shape((1, heads, 4, dim), "bfloat16"), shape((1, heads, PROMPT), "int32")

    def attend(page, name, query, key, value, slots, mask, host, newest, position):
        rows, held = Rows(host=host, newest=newest, sinks=64), position if page > 1 else None
        options = {"scale": 0.1, "page_size": page, "position": held, "implementation": f"pallas_{name}"}
        return gather_attention(query, key, value, slots, mask, rows=rows, **options)

    names = ("triton", "mosaic_gpu") if kind in ("int8", "float8") else ("triton",)
    for page, name in itertools.product((1, 16), names):
        lists = shape((1, heads, 2048 // page), "int32"), shape((1, heads, 2048 // page), bool)
        compiled = machine.compile(functools.partial(attend, page, name), query, *copies, *lists, host, newest, position)
        assert name in compiled.as_text() and compiled.memory_analysis().temp_size_in_bytes < STORE / 4

    def store(key, query, inv_freq, place, copies, position, cursor, host):
        caches = {"cache_key": copies[0], "cache_value": copies[1], "cache_position": position, "cursor": cursor}
        rows, rotation = Rows(host=host, newest=cursor, sinks=64), {"query": query, "inv_freq": inv_freq}
        stored = store_token(key, key, place, **caches, **rotation, rows=rows, implementation="pallas_triton")
        return stored.key, stored.query

    new, inv_freq = shape((1, heads, dim), "bfloat16"), shape((dim // 2,), "float32")
    assert "triton" in machine.compile(store, new, query, inv_freq, newest, copies, position, newest, host).as_text()


def test_chunked_prefill_for_an_h100_attends_in_a_kernel_and_copies_no_cache():
    machine = needs("h100")
    chunk = 2048
    compiled = machine.compile(prefill("full", chunk), *arguments(PROMPT))
    assert "mosaic_gpu" in compiled.as_text()
    widest = CONFIG.num_q_heads * CONFIG.head_dim  # of a token's activations
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * chunk * widest


@pytest.mark.parametrize(("name", "stores"), [("infllm", 2), ("keydiff", 2), ("streamingllm", 2), ("selfextend", 3)])
def test_a_chunk_over_bounded_slots_for_an_h100_attends_through_cudnn_and_waits_for_nothing(name, stores):
    """No logits are in memory. A loop within the loop over chunks would wait for the device in each layer."""
    compiled = needs("h100").compile(prefill(name, 8192), *arguments(PROMPT))
    text = compiled.as_text()
    assert "__cudnn$fmhaScaleBiasSoftmax" in text and text.count(" while(") == 1
    assert compiled.memory_analysis().temp_size_in_bytes < stores * STORE  # SelfExtend rotates a copy of all keys


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["full", "snapkv"])
def test_a_batch_is_read_in_the_memory_of_a_row(name):
    """Beside the result there is at most one row: taken out of one layer, or of all layers until it is compressed."""
    chunk, tokens, batch = 2048, 8192, 8
    compiled = needs("h100").compile(prefill(name, chunk), *arguments(tokens, batch))
    row = 2 * tokens * CONFIG.num_kv_heads * CONFIG.head_dim * 2
    layers = 1 if name == "full" else CONFIG.num_layers
    widest = CONFIG.num_q_heads * CONFIG.head_dim  # of a token's activations
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * chunk * widest + layers * row


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_sparse_prompt_for_an_h100_uses_its_kernel_and_takes_no_more_memory_than_a_dense_one(kind):
    machine, sizes = needs("h100"), {"model": CONFIG, "max_new_tokens": 64, "chunk_size": 8192}
    method = Prefill(method=Full(), pattern=Pattern(kind), chunk=8192)
    dense, compiled = (
        machine.compile(functools.partial(run_prefill, method=x, **sizes), *arguments(PROMPT)) for x in (Full(), method)
    )
    assert ("sparse_attention" in compiled.as_text()) == (kind != "blasst") and "__cudnn$fmha" not in compiled.as_text()
    used, usual = (x.memory_analysis().temp_size_in_bytes for x in (compiled, dense))
    assert used < 1.25 * usual


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_prefill_and_decode_step_compile_for_a_tpu(name):
    machine = needs("tpu_v5e")
    machine.compile(prefill(name, 512), *arguments(1024))
    decode_step(machine, name, 1024)


def test_small_projections_of_a_single_row_are_matrix_products_on_a_gpu():
    """XLA would multiply and reduce, in bfloat16, without `models.layers.modules.multiplied`."""
    params, x = param_shapes(CONFIG)["layers_0"]["mlp"], jax.ShapeDtypeStruct((1, 1, CONFIG.hidden_size), jnp.bfloat16)
    compiled = needs("h100").compile(lambda params, x: MLP(CONFIG).apply({"params": params}, x), params, x)
    assert compiled.as_text().count(" dot(") == 2
    plain = needs("h100").compile(lambda x, kernel: x @ kernel, x, params["down"]["kernel"].update(shape=(512, 1024)))
    assert plain.as_text().count(" dot(") == 0


def test_a_step_on_a_tpu_reads_gate_and_up_where_they_are():
    """There an array [d, 2, F] is laid out in other tiles than [d, 2F]: a reshape would copy the weights in every step."""
    params, x = param_shapes(CONFIG)["layers_0"]["mlp"], jax.ShapeDtypeStruct((1, 1, CONFIG.hidden_size), jnp.bfloat16)
    compiled = needs("tpu_v5e").compile(lambda params, x: MLP(CONFIG).apply({"params": params}, x), params, x)
    assert " copy(" not in compiled.as_text()


@pytest.mark.parametrize("name", [x for x in BY_DEFAULT if x.values[0] in OFFLOADED])
def test_offloaded_programs_compile_for_a_tpu(name):
    """Prompt, one step, and the token loop with its syncs of host memory."""
    machine = needs("tpu_v5e")
    knobs = {"strategy": "dynamic", "buffer": 32} if name == "mosaickv" else {}
    read = prefill(name, 512, offload=True, **knobs)
    machine.compile(read, *arguments(1024))
    with machine.assumed():
        jaxpr, shapes = jax.make_jaxpr(read, return_shape=True)(*arguments(1024))
    cache = jax.tree.unflatten(jax.tree.structure(shapes), jaxpr.out_avals)
    assert any(x.memory_space == jax.memory.Space.Host for x in jaxpr.out_avals)
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1, 1), bool)
    machine.compile(run_step, param_shapes(CONFIG), cache, *one, donate_argnums=1)

    def loop(params, cache, eos, done):
        return run_decode(params, cache, Sampler(), None, eos, done, steps=40, stop_early=True)

    ends, done = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1,), bool)
    machine.compile(loop, param_shapes(CONFIG), cache, ends, done, donate_argnums=1)
