"""Every refusal says what it got and what it expected."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import registry, rope
from kvjax.methods import H2O, TOVA, Full, KeyDiff, Quest, SnapKV, StreamingLLM
from tests.harness import TINY, example, padded, prompts, read, tiny_params

pytestmark = pytest.mark.usefixtures("quick_compile")


def refuses(message, call, error=ValueError):
    with pytest.raises(error, match=message):
        call()


def prefill(tokens, method="full", **options):
    return kvjax.prefill(tiny_params(), tokens, config=TINY, method=method, pad_multiple=1, **options)


# ---- methods ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: SnapKV(budget=32),
            "SnapKV: budget must be a whole number of at least 33 tokens .obs_window=32.*, got 32",
        ),
        (lambda: StreamingLLM(budget=4), "StreamingLLM: budget must be .* at least 5 tokens .num_sink=4.*, got 4"),
        (lambda: H2O(budget=8, num_recent=8), "H2O: budget must be .* at least 9 tokens .num_recent=8.*, got 8"),
        (lambda: TOVA(budget=0), "TOVA: budget must be .* at least 1 tokens .*, got 0"),
        (lambda: KeyDiff(budget=0), "KeyDiff: budget must be .* at least 1 tokens .*, got 0"),
        (lambda: Quest(budget=15), "Quest: budget must be .* at least 16 tokens .one page of page_size=16.*, got 15"),
        (lambda: Quest(budget=32.5), "Quest: budget must be a whole number of .*, got 32.5"),
        (lambda: SnapKV(budget=100, capacity=64), "SnapKV: budget must be at most capacity=64, got 100"),
        (
            lambda: SnapKV(budget=jnp.int32(64)),
            "SnapKV: capacity .static. must be given when budget is an array or traced",
        ),
        (lambda: StreamingLLM(num_sink=0), "num_sink must be at least 1 token, got 0"),
        (lambda: StreamingLLM(chunk=0), "chunk must be at least 1 token, got 0"),
        (lambda: SnapKV(obs_window=0), "obs_window must be at least 1 token, got 0"),
        (lambda: SnapKV(kernel=4), "kernel must be a positive odd number of tokens, got 4"),
        (lambda: SnapKV(pooling="mean"), "pooling must be 'avg' or 'max', got 'mean'"),
        (lambda: H2O(num_recent=0), "num_recent must be at least 1 token, got 0"),
        (lambda: KeyDiff(block=0), "block must be at least 1 token, got 0"),
        (lambda: Quest(page_size=0), "page_size must be at least 1 token, got 0"),
        (lambda: kvjax.DenseBelow(length=0, method=Quest()), "DenseBelow: length must be at least 1 token, got 0"),
        (lambda: kvjax.DenseBelow(length=9, method=SnapKV()), "SnapKV discards slots.*raise its budget to 9"),
        (lambda: kvjax.DenseBelow(length=9, method="quest"), "DenseBelow: method must be a method .* got 'quest'"),
        (lambda: kvjax.Stages(evict=H2O(), retrieve=Quest()), "Stages: H2O moves slots .* index of Quest stale"),
        (lambda: kvjax.Stages(evict=SnapKV(), retrieve=TOVA()), "retrieve must keep every slot .* TOVA evicts"),
        (
            lambda: kvjax.Stages(evict=SnapKV(), retrieve=KeyDiff()),
            "retrieve must be a method that chooses cache slots .* got KeyDiff",
        ),
        (
            lambda: kvjax.Stages(evict=StreamingLLM(), retrieve=Quest()),
            "Stages: evict must be .*SlotMethod.*, got StreamingLLM",
        ),
        (lambda: kvjax.PerLayer(layers={"0": Full()}, default=Full()), "layer indices .int. to methods, got key '0'"),
        (
            lambda: prefill([[1]], kvjax.PerLayer(layers={2: Full()}, default=Full()), max_new_tokens=2),
            "layer 2 does not exist, .* 2 layers",
        ),
        (lambda: kvjax.make("qwest"), "unknown method 'qwest' .did you mean 'quest'..; known methods: chess, full, "),
        (lambda: kvjax.make("zzz"), "unknown method 'zzz'; known methods"),
        (
            lambda: kvjax.make("quest", page_sise=4),
            "Quest has no knob 'page_sise' .did you mean 'page_size'..; it has: ",
        ),
        (lambda: registry.resolve(3), "method must be a kvjax method or its name, got 3"),
        (lambda: rope.inverse_frequencies(7, 1e4), "head_dim must be even for RoPE, got 7"),
    ],
)
def test_methods(call, message):
    refuses(message, call)


def test_validation_lets_traced_numbers_and_rebuilt_pytrees_pass():
    method = SnapKV(budget=64)
    assert jax.tree.map(lambda x: None, method).budget is None
    assert jax.eval_shape(lambda m: m, method).budget.shape == ()
    assert jax.jit(lambda b: SnapKV(budget=b, capacity=64))(3).capacity == 64


# ---- prompts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: prefill([[1, 2], []]), "every prompt needs at least 1 token, got none in row 1"),
        (lambda: prefill([[1, 61]]), r"token ids must lie in \[0, vocab_size=61\), got 61; is this the tokenizer"),
        (lambda: prefill([[1, -2]]), "vocab_size=61.*, got -2"),
        (
            lambda: prefill([[1] * 150], max_new_tokens=11),
            "prompt of 150 . max_new_tokens=11 = 161 tokens exceeds the model's max_position_embeddings=160; shorten it, or "
            r"use a method that re-numbers positions \(streamingllm, tokenselect\)$",
        ),
        (lambda: prefill([[1]], max_new_tokens=0), "max_new_tokens must be a whole number of at least 1, got 0"),
        (lambda: prefill([[1]], max_new_tokens=2.5), "max_new_tokens must be a whole number of at least 1, got 2.5"),
        (lambda: prefill([[1]], chunk_size=None), "chunk_size must be a whole number of at least 1, got None"),
        (lambda: prefill([1, 2, 3]), "list of integers per row .for one prompt: .prompt.., got the row 1"),
        (lambda: prefill("123"), "list of token lists, one per row .*, got '123'"),
        (lambda: prefill(["12"]), "got the row '12'"),
        (lambda: prefill([[1.7, 2.2]]), r"got the row \[1.7, 2.2\]"),
        (lambda: prefill([[[1, 2]]]), r"got the row \[\[1, 2\]\]"),
        (lambda: prefill([[3_000_000_000]]), "token ids must be int32, got 3000000000"),
        (lambda: prefill(np.full((1, 2), 2**32 + 5)), "token ids must be int32, got 4294967301"),
        (lambda: prefill(np.zeros((0, 3), np.int32)), r"integers of shape \[B, T\], got int32 \[0, 3\]"),
        (lambda: prefill(np.ones((1, 3), np.int32), lengths=[1.9]), "lengths must be integers, got float32"),
        (lambda: prefill([]), "list of token lists"),
        (lambda: prefill([[1]], lengths=[1]), "lengths belong to a padded array of tokens"),
        (lambda: prefill(np.ones((2, 3), np.float32)), r"integers of shape \[B, T\], got float32 \[2, 3\]"),
        (lambda: prefill(np.ones(3, np.int32)), r"integers of shape \[B, T\], got int32 \[3\]"),
        (lambda: prefill(np.ones((2, 3), np.int32), lengths=[1]), r"lengths must have shape \[2\].*got \[1\]"),
        (lambda: prefill(np.ones((2, 3), np.int32), lengths=[1, 4]), r"lie between 0 and T=3, got \[1, 4\]"),
        (lambda: prefill([[1]], method="ful"), "unknown method 'ful' .did you mean 'full'"),
    ],
)
def test_prompts(call, message):
    refuses(message, call)


def test_renumbering_methods_may_run_past_the_model():
    """A method that re-numbers positions never uses a high one, so the model's limit does not apply to it."""
    cache = prefill([[1] * 200], StreamingLLM(budget=12, chunk=64), max_new_tokens=4)
    assert int(cache.length[0]) == 200


# ---- caches -------------------------------------------------------------------------------------------------------


def test_caches():
    cache = read("full", max_new_tokens=4)
    params = tiny_params()
    ids = np.zeros(3, np.int32)
    for message, call in (
        (
            "this cache was made by Full.* cannot be read as Quest.*prefill with the method you generate with",
            lambda: kvjax.generate(params, cache, method=example("quest")),
        ),
        (
            "room for 12 more tokens in row 0 .layer 0., got 13; prefill with a larger max_new_tokens",
            lambda: kvjax.generate(params, cache, max_new_tokens=13),
        ),
        ("room for 12 more tokens in row 0", lambda: kvjax.extend(params, cache, np.ones((3, 13), np.int32))),
        ("max_new_tokens must be .* at least 1, got 0", lambda: kvjax.generate(params, cache, max_new_tokens=0)),
        ("max_new_tokens must be .* at least 1, got True", lambda: kvjax.generate(params, cache, max_new_tokens=True)),
        (
            "40 tokens and 121 more exceed the model's max_position_embeddings=160",
            lambda: kvjax.generate(params, cache, max_new_tokens=121),
        ),
        (r"tokens must be integers of shape \[3\].*got int32 \[2\]", lambda: kvjax.decode_step(params, cache, ids[:2])),
        (r"active must be bool of shape \[3\].*got bool \[\]", lambda: kvjax.decode_step(params, cache, ids, active=True)),
        ("expected a Cache.*got str", lambda: kvjax.generate(params, "cache")),
        ("key must be a PRNG key.*got 3", lambda: kvjax.generate(params, cache, max_new_tokens=2, temperature=1.0, key=3)),
        ("tokens must have 3 rows like the cache, got 1", lambda: kvjax.extend(params, cache, [[1]])),
        (r"vocab_size=61\), got 99", lambda: kvjax.extend(params, cache, [[1], [99], [2]])),
        (
            r"eos_token_ids must lie in \[0, vocab_size=61\), got 61",
            lambda: kvjax.generate(params, cache, max_new_tokens=2, eos_token_ids=[61]),
        ),
        (
            r"eos_token_ids must be whole numbers, got \[1.5\]",
            lambda: kvjax.generate(params, cache, max_new_tokens=2, eos_token_ids=[1.5]),
        ),
        (
            "eos_token_ids must be whole numbers, got '3'",
            lambda: kvjax.generate(params, cache, max_new_tokens=2, eos_token_ids="3"),
        ),
        ("block must be a whole number of at least 1, got 0", lambda: kvjax.stream(params, cache, block=0)),
        ("copies must be a whole number of at least 1, got 0", lambda: kvjax.fork(cache, 0)),
        ("unknown method 'h20' .did you mean 'h2o'", lambda: kvjax.generate(params, cache, method="h20")),
    ):
        refuses(message, call)
    assert kvjax.generate(params, cache, max_new_tokens=2).tokens.shape == (3, 2), "a refusal consumes nothing"


def test_a_full_row_refuses_a_step():
    cache = prefill([[1, 2, 3]], max_new_tokens=1)
    cache = kvjax.decode_step(tiny_params(), cache, np.array([1]))
    refuses("room for 0 more tokens in row 0", lambda: kvjax.decode_step(tiny_params(), cache, np.array([1])))


def test_room_is_counted_per_row():
    """A short row may take more tokens than the longest row has room for."""
    cache = read("full", max_new_tokens=1)  # 49 slots, prompts of 40, 23 and 9
    question = padded([[], [1] * 20, []], 20)
    assert kvjax.extend(tiny_params(), cache, question[0], lengths=question[1]).length.tolist() == [40, 43, 9]


# ---- drawing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": 1.0}, "temperature=1.0 needs a PRNG key"),
        ({"temperature": -1.0, "key": 0}, "temperature must be at least 0, got -1.0"),
        ({"temperature": 1.0, "top_k": 0, "key": 0}, "top_k must be at least 1, got 0"),
        ({"temperature": 1.0, "top_p": 0.0, "key": 0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"temperature": 1.0, "top_p": 1.5, "key": 0}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"top_k": 5}, "top_k=5 and top_p=None need a temperature"),
    ],
)
def test_sampling(options, message):
    if "key" in options:
        options = {**options, "key": jax.random.key(options["key"])}
    cache = read("full")
    refuses(message, lambda: kvjax.generate(tiny_params(), cache, max_new_tokens=2, **options))


def test_a_consumed_cache():
    cache = read("full")
    first = kvjax.generate(tiny_params(), cache, max_new_tokens=2)
    kvjax.generate(tiny_params(), first.cache, max_new_tokens=2)
    assert "tokens attended" in first.stats.summary(), "what is known of the first turn outlives its cache"
    for call in (
        lambda: kvjax.generate(tiny_params(), cache, max_new_tokens=2),
        lambda: kvjax.extend(tiny_params(), cache, [[1], [2], [3]]),
        lambda: kvjax.fork(cache),
    ):
        refuses("this cache was consumed by an earlier", call)
    refuses("expected a Cache, .* got Generation", lambda: kvjax.generate(tiny_params(), first, max_new_tokens=2))


def test_one_end_of_sequence_token_needs_no_list():
    assert kvjax.generate(tiny_params(), read("full"), max_new_tokens=2, eos_token_ids=3).tokens.shape == (3, 2)


# ---- numbers and platforms ----------------------------------------------------------------------------------------


def test_non_finite_logits():
    """Row and step of the first bad logits are named, in `generate` and in `stream`."""
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), tiny_params())
    tokens, lengths = padded(prompts())

    def cache():
        return kvjax.prefill(broken, tokens, lengths=lengths, config=TINY, max_new_tokens=24, pad_multiple=1)

    refuses(
        "logits of row 0 are not finite at generated token 0; check the parameters and the dtype",
        lambda: kvjax.generate(broken, cache(), max_new_tokens=2),
        FloatingPointError,
    )
    refuses("not finite", lambda: list(kvjax.stream(broken, cache(), max_new_tokens=2)), FloatingPointError)
    # Sound prompt, then broken parameters: the first token is still good.
    refuses(
        "row 0 are not finite at generated token 1",
        lambda: kvjax.generate(broken, read("full"), max_new_tokens=2),
        FloatingPointError,
    )


def test_an_implementation_that_cannot_run_here():
    if jax.default_backend() != "cpu":
        pytest.skip("this machine can run it")
    method = example("quest", implementation="pallas_triton")
    refuses(
        r"'pallas_triton' cannot run: needs a platform in \('gpu',\) .got platform='cpu'",
        lambda: kvjax.generate(tiny_params(), read(method), max_new_tokens=2),
        NotImplementedError,
    )


def test_an_implementation_that_does_not_exist():
    method = example("quest", implementation="cuda")
    refuses(
        r"gather_attention: implementation='cuda' is unknown, expected one of \[.*'xla'\]",
        lambda: kvjax.generate(tiny_params(), read(method), max_new_tokens=2),
    )


def test_a_cache_of_another_model():
    from models import random_params

    other = random_params(dataclasses.replace(TINY, num_kv_heads=4), jax.random.key(0))
    for call in (
        lambda: kvjax.generate(other, read("full"), max_new_tokens=2),
        lambda: next(kvjax.stream(other, read("full"), max_new_tokens=2)),
        lambda: kvjax.extend(other, read("full"), [[1], [2], [3]]),
        lambda: kvjax.decode_step(other, read("full"), jnp.zeros((3,), jnp.int32)),
    ):
        refuses("this cache was made with other parameters .names and shapes .*, got .*; it belongs to", call)


def test_a_token_of_another_vocabulary_is_refused_while_decoding():
    refuses("token ids must lie in", lambda: kvjax.decode_step(tiny_params(), read("full"), jnp.full((3,), 10_000)))


def test_sweeps():
    def sweep(methods=("full",), **options):
        return kvjax.sweep(tiny_params(), [[1, 2, 3], [4, 5]], methods, config=TINY, **options)

    refuses("sweep needs at least one method, got none", lambda: sweep(()))
    refuses("max_new_tokens must be at least 1, got 0", lambda: sweep(max_new_tokens=0))
    refuses("eos_token_ids must lie in", lambda: sweep(eos_token_ids=(10_000,)))
    refuses("questions must have 2 rows like the prompts, got 1", lambda: sweep(questions=[[1]]))
