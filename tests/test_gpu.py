"""What only a GPU can show; skipped elsewhere, saying so: ``pytest -n 0 tests/test_gpu.py tests/pallas_kernels``."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import models
from kvjax.decoding import decode as step
from kvjax.methods import Quest
from models.layers.experts import all_experts, grouped
from pallas_kernels.attend.causal_attention import causal_attention

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU: this backend is not one")

NEEDLE = "One of the special magic numbers for blue-whale is: 4711042. "
QUESTION = (
    "\nWhat is the special magic number for blue-whale mentioned in the provided text? The special magic number for "
    "blue-whale mentioned in the provided text is"
)


@pytest.fixture(scope="module")
def builtin():
    """The shipped model in bfloat16, with its tokenizer."""
    params, config = models.from_pretrained(models.builtin_directory(), dtype="bfloat16")
    return params, config, models.load_tokenizer(models.builtin_directory(), config)


def prompt(tokenizer, sentences: int) -> list[int]:
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    return tokenizer.encode(noise * (sentences // 10) + NEEDLE + noise * (sentences // 10) + QUESTION).ids


def first_layers(params, config, count):
    """Drop the other layers: programs of a model are long to compile."""
    dropped = {f"layers_{layer}" for layer in range(count, config.num_layers)}
    return {k: x for k, x in params.items() if k not in dropped}, dataclasses.replace(config, num_layers=count)


@pytest.mark.parametrize("name", ["snapkv", "quest"])
def test_parameters_on_the_cpu_of_this_machine_run_there(builtin, name):
    params, config, tokenizer = builtin
    params, config = first_layers(params, dataclasses.replace(config, dtype="float32"), 2)
    placed = jax.device_put(jax.tree.map(lambda x: x.astype("float32"), params), jax.devices("cpu")[0])
    cache = kvjax.prefill(placed, [prompt(tokenizer, 100)], config=config, method=kvjax.make(name), max_new_tokens=4)
    out = kvjax.generate(placed, cache, max_new_tokens=4)
    assert {x.platform for x in out.tokens.devices()} == {"cpu"}


# Attention over chunks, and in one pass.
@pytest.mark.parametrize(("method", "chunk_size"), [("full", 16384), ("snapkv", 16384), ("quest", 2048)])
def test_finds_a_needle_in_bfloat16(builtin, method, chunk_size):
    params, config, tokenizer = builtin
    knobs = {} if method == "full" else {"budget": 1024}
    cache = kvjax.prefill(
        params,
        [prompt(tokenizer, 3000)],
        config=config,
        method=kvjax.make(method, **knobs),
        max_new_tokens=16,
        chunk_size=chunk_size,
    )
    out = kvjax.generate(params, cache, max_new_tokens=12)
    assert out.texts(tokenizer)[0].strip().startswith("4711042")


# Settings under which the small model must find a needle in noise; docs/notebook/quality_toy.md has the papers' budgets.
FIVE = {
    "chess": {"ratios": "conservative", "trigger": "fixed"},
    "sentencekv": {"budget": 2048},
    "tokenselect": {"chunk": 128},
    "mosaickv": {"channels": 0.5, "fraction": 0.5},
    "pariskv": {},
}
SCANNED = {  # other methods that can decode from host memory
    "freekv": {"budget": 256, "num_sink": 64, "num_local": 64},
    "magicpig": {"capacity": 512},
    "pqcache": {"fraction": 0.25},
    "retrievalattention": {"budget": 128, "num_local": 64},
    "retroinfer": {"fraction": 0.1, "buffer": 32, "num_local": 64},
    "socket": {"budget": 256},
}


@pytest.mark.parametrize("name", FIVE)
def test_the_five_methods_decode_on_a_gpu(builtin, name):
    """In bfloat16; its kernels agree with plain JAX."""
    params, config, tokenizer = builtin
    method = kvjax.make(name, tokenizer, config.vocab_size, **FIVE[name])
    ids = prompt(tokenizer, 1200)
    cache = kvjax.prefill(params, [ids], config=config, method=method, max_new_tokens=16, chunk_size=16384)
    once = kvjax.fork(cache)
    out = kvjax.generate(params, cache, max_new_tokens=12)
    assert out.texts(tokenizer)[0].strip().startswith("4711042")
    assert float(out.stats.attended[0]) < len(ids)
    with kvjax.default_implementation("xla"):
        slow = kvjax.decode_step(params, kvjax.fork(once), jnp.zeros((1,), jnp.int32)).logits
    fast = kvjax.decode_step(params, once, jnp.zeros((1,), jnp.int32)).logits
    error = float(jnp.linalg.norm(fast - slow) / jnp.linalg.norm(slow))
    assert error < 0.02, f"relative error {error:.4f}"  # eight layers in bfloat16


@pytest.mark.parametrize("name", [*FIVE, "quest", *SCANNED])
def test_offloaded_equals_resident(builtin, name):
    """A prompt in chunks, more steps than one sync writes; selected rows are read over the bus.

    Resident rows are read one after the other, offloaded ones together, and the GPU rounds the two otherwise. So ragged rows
    are compared with half of the layers offloaded, and a row alone with none. Four layers of the model are enough, because
    its programs are long to compile.
    """
    params, config, tokenizer = builtin
    params, config = first_layers(params, config, 4)
    knobs = {"quest": {"budget": 512}, **FIVE, **SCANNED}[name]
    knobs = knobs | ({"strategy": "dynamic", "buffer": 32} if name == "mosaickv" else {})
    rows = [prompt(tokenizer, 900), prompt(tokenizer, 500)]

    def tokens(rows, offload):
        method = kvjax.make(name, tokenizer, config.vocab_size, **knobs, offload=offload)
        cache = kvjax.prefill(params, rows, config=config, method=method, max_new_tokens=96, chunk_size=2048)
        first = kvjax.generate(params, cache, max_new_tokens=40, eos_token_ids=())
        again = kvjax.generate(params, first.cache, max_new_tokens=40, eos_token_ids=())
        return np.concatenate([first.tokens, again.tokens], axis=1)

    np.testing.assert_array_equal(tokens(rows[:1], True), tokens(rows[:1], False))
    np.testing.assert_array_equal(tokens(rows, 0.5), tokens(rows, True))


@pytest.mark.parametrize("name", ["quest", "pariskv"])
def test_two_offloaded_caches_decoded_in_turn(builtin, name):
    """For 200 rounds, a token of each in turn; each gets the tokens that it gets alone."""
    params, config, tokenizer = builtin
    params, config = first_layers(params, config, 3)
    one = prompt(tokenizer, 900)
    other = one[len(one) // 2 :] + one[: len(one) // 2]
    options = {"config": config, "method": kvjax.make(name, offload=True), "max_new_tokens": 200, "chunk_size": 2048}

    def tokens(*texts):
        caches = [kvjax.prefill(params, [text], **options) for text in texts]
        found = []
        for _ in range(200):
            found.append([jnp.argmax(cache.logits, axis=1).astype(jnp.int32) for cache in caches])
            caches = [kvjax.decode_step(params, cache, x) for cache, x in zip(caches, found[-1], strict=True)]
        return np.asarray(found).swapaxes(0, 1)

    np.testing.assert_array_equal(tokens(one, other), [*tokens(one), *tokens(other)])


def test_a_prompt_whose_cache_is_larger_than_the_free_memory(builtin):
    """All but a little of the device is taken: what does not fit there is refused or, offloaded, found a needle in.

    Needs the GPU for itself: run this file with ``-n 0``. The allocator tries 10 s for what it has no room for: two minutes.
    """
    params, config, tokenizer = builtin
    rows = [prompt(tokenizer, 2400 - 100 * row) for row in range(8)]
    per_token = 4 * config.num_layers * config.num_kv_heads * config.head_dim  # of bfloat16 keys and values
    whole = per_token * len(rows) * len(rows[0])
    stats = jax.devices()[0].memory_stats()
    free = int(0.6 * whole)
    taken = jax.block_until_ready(jnp.zeros((stats["bytes_limit"] - stats["bytes_in_use"] - free,), jnp.uint8))
    read = {"config": config, "max_new_tokens": 16, "chunk_size": 512}
    try:
        method = kvjax.make("pariskv", offload=True)
        cache = kvjax.prefill(params, rows, method=method, **read)
        out = kvjax.generate(params, cache, max_new_tokens=12)
        said = [text.strip() for text in out.texts(tokenizer)]
        assert all(text.startswith("4711042") for text in said), said
        with pytest.raises(MemoryError, match="of free device memory; shorten the prompt"):
            kvjax.prefill(params, rows * 16, method=method, **read)
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            jax.block_until_ready(kvjax.prefill(params, rows, method="full", **read))  # errors arrive with the arrays
    finally:
        taken.delete()


def test_quest_decodes_through_the_kernel_and_agrees_with_xla(builtin):
    params, config, tokenizer = builtin
    once = kvjax.prefill(
        params, [prompt(tokenizer, 1500)], config=config, method=Quest(budget=512), max_new_tokens=8, chunk_size=16384
    )
    token = jnp.zeros((1,), jnp.int32)
    logits, calls = {}, {}
    ways = {"kernels": contextlib.nullcontext(), "xla": kvjax.default_implementation("xla")}
    for name, way in ways.items():
        cache = kvjax.fork(once)
        with way:
            text = jax.jit(step.run_step).lower(params, cache, token[None], token[None] == 0).compile().as_text()
            calls[name] = len(re.findall(r'custom_call_target="(?:__gpu\$xla\.gpu\.triton|mosaic_gpu)', text))
            logits[name] = np.asarray(kvjax.decode_step(params, cache, token).logits)
    assert calls["kernels"] > calls["xla"]
    error = np.linalg.norm(logits["kernels"] - logits["xla"]) / np.linalg.norm(logits["xla"])
    assert error < 0.02, f"relative error {error:.4f}"  # eight layers in bfloat16


def test_random_8b_fits_and_decodes():
    device = jax.devices()[0]
    limit = device.memory_stats()["bytes_limit"]
    config = dataclasses.replace(models.shapes.llama31_8b(), dtype="bfloat16")
    size = sum(np.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(models.param_shapes(config)))
    if limit < 1.5 * size:
        pytest.skip(f"needs {1.5 * size / 2**30:.0f} GiB of device memory, this one lends {limit / 2**30:.0f}")
    before = device.memory_stats()["peak_bytes_in_use"]
    params = jax.block_until_ready(models.random_params(config, jax.random.key(0)))
    peak = device.memory_stats()["peak_bytes_in_use"]
    assert peak <= max(before, 1.15 * size), f"peak {peak / 2**30:.1f} GiB for {size / 2**30:.1f} GiB of parameters"
    tokens = np.asarray(jax.random.randint(jax.random.key(1), (1, 4096), 0, config.vocab_size))
    cache = kvjax.prefill(params, tokens, config=config, method=Quest(budget=1024), max_new_tokens=16, chunk_size=4096)
    out = kvjax.generate(params, cache, max_new_tokens=16, eos_token_ids=())
    assert int(out.num_tokens[0]) == 16


@pytest.mark.parametrize("window", [1, 100, 512])
def test_a_window_through_cudnn_equals_plain_jax(window):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (2, 2, 4, 1000, 64), (2, 2, 1000, 64), (2, 2, 1000, 64)
    query, key, value = (jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True))
    got, want = (
        causal_attention(query, key, value, window=window, implementation=name).astype(jnp.float32)
        for name in ("cudnn", "xla")
    )
    np.testing.assert_allclose(got, want, atol=2e-2)


def test_experts_in_groups_are_those_one_by_one():
    """`jax.lax.ragged_dot` on this device, with an expert that nobody chose."""
    shapes = (300, 64), (8, 64, 2, 96), (8, 96, 64)
    keys = jax.random.split(jax.random.key(1), 4)
    x, gate_up, down = (jax.random.normal(k, s, jnp.bfloat16) / 8 for k, s in zip(keys, shapes, strict=False))
    chosen = jnp.stack([jnp.arange(300) % 3, 3 + jnp.arange(300) % 4], axis=1).astype(jnp.int32)
    weight = jax.random.uniform(keys[3], (300, 2))
    got, want = (way(x, chosen, weight, gate_up, down).astype(jnp.float32) for way in (grouped, all_experts))
    np.testing.assert_allclose(got, want, atol=2e-2)
