"""Every refusal says what it got and what it expected."""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import registry, rope
from kvjax.methods import H2O, TOVA, Full, KeyDiff, Quest, SnapKV, StreamingLLM
from kvjax.protocol.families import Retrieval
from kvjax.protocol.typing import pytree
from kvjax.testing.model import TinyModel
from kvjax.wrappers import DenseBelow, PerLayer, Stages
from tests import harness
from tests.harness import TINY, example, padded, prompts, small, tiny_params
from tests.kvjax.cases import ONE

pytestmark = pytest.mark.usefixtures("quick_compile")
read = functools.partial(harness.read, config=ONE)  # one layer, which halves the programs


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
            lambda: SnapKV(budget=31),
            "SnapKV: budget must be a whole number of at least 32 tokens .the obs_window=32.*, got 31",
        ),
        (lambda: StreamingLLM(budget=4), "StreamingLLM: budget must be .* at least 5 tokens .num_sink=4.*, got 4"),
        (lambda: H2O(budget=8, num_recent=8), "H2O: budget must be .* at least 9 tokens .num_recent=8.*, got 8"),
        (lambda: Quest(budget=15), "Quest: budget must be .* at least 16 tokens .one page of page_size=16.*, got 15"),
        (lambda: SnapKV(budget=100, capacity=64), "SnapKV: budget must be at most capacity=64, got 100"),
        (
            lambda: SnapKV(budget=np.array([40, 64])),
            "SnapKV: capacity .static. must be given when budget is an array or traced",
        ),
        (
            lambda: jax.eval_shape(lambda budget: SnapKV(budget=budget), 64),
            "SnapKV: capacity .static. must be given when budget is an array or traced",
        ),
        (lambda: StreamingLLM(budget=jnp.int32(99), capacity=16), "budget must be at most capacity=16, got 99"),
        (lambda: DenseBelow(length=9, method=SnapKV()), "SnapKV discards slots.*raise its budget to 9"),
        (lambda: DenseBelow(length=9, method="quest"), "DenseBelow: method must be .*, got the name 'quest'"),
        (lambda: Stages(evict=H2O(), retrieve=Quest()), "Stages: H2O moves slots .* index of Quest stale"),
        (lambda: Stages(evict=SnapKV(), retrieve=TOVA()), "retrieve must keep every slot .* TOVA evicts"),
        (
            lambda: Stages(evict=SnapKV(), retrieve=KeyDiff()),
            "retrieve must be a method that chooses cache slots .* got KeyDiff",
        ),
        (
            lambda: Stages(evict=StreamingLLM(), retrieve=Quest()),
            "Stages: evict must be .*SlotMethod.*, got StreamingLLM",
        ),
        (lambda: PerLayer(layers={"0": Full()}, default=Full()), "layer indices .int. to methods, got key '0'"),
        (
            lambda: prefill([[1]], PerLayer(layers={2: Full()}, default=Full()), max_new_tokens=2),
            "layer 2 does not exist, .* 2 layers",
        ),
        (lambda: kvjax.make("qwest"), "unknown method 'qwest' .did you mean 'quest'..; known methods: adakv, chess, "),
        (lambda: kvjax.make("zzz"), "unknown method 'zzz'; known methods"),
        (
            lambda: kvjax.make("quest", page_sise=4),
            "Quest has no knob 'page_sise' .did you mean 'page_size'..; it has: ",
        ),
        (
            lambda: prefill([[1]], PerLayer(layers={0: Full(), -2: Quest()}, default=Full()), max_new_tokens=2),
            r"PerLayer: layers must name each layer once, got \[-2, 0\] for a model of 2 layers",
        ),
        (lambda: PerLayer(layers=None, default=Full()), "layers must map layer indices .*, got None"),
        (lambda: PerLayer(layers={}, default=None), "PerLayer: .* default must be a kvjax method, got None"),
        (lambda: Stages(evict=None, retrieve=Quest()), "Stages: evict must be a kvjax method, got None"),
        (lambda: Stages(evict=SnapKV(), retrieve=Quest), "retrieve must be .*, got the class Quest: call it"),
        (lambda: Quest(bugdet=5), "Quest has no knob 'bugdet' .did you mean 'budget'..; it has: budget, capacity, "),
        (lambda: Full(budget=5), "Full has no knob 'budget'; it has: none"),
        (lambda: kvjax.make(3), "name must be the name of a method, got 3; known methods: adakv, chess"),
        (lambda: registry.resolve(3), "method must be a kvjax method, got 3"),
        (lambda: registry.resolve(Quest), r"method must be a kvjax method, got the class Quest: call it, Quest\(...\)"),
        (lambda: rope.inverse_frequencies(7, 1e4), "head_dim must be even for RoPE, got 7"),
    ],
)
def test_wrong_methods_are_refused(call, message):
    refuses(message, call)


def test_validation_lets_traced_numbers_and_rebuilt_pytrees_pass():
    method = SnapKV(budget=64)
    assert jax.tree.map(lambda x: None, method).budget is None
    assert jax.eval_shape(lambda m: m, method).budget.shape == ()
    assert jax.jit(lambda b: SnapKV(budget=b, capacity=64))(3).capacity == 64
    assert jax.tree.map(lambda x: object(), method).capacity == 64
    assert SnapKV(budget=jax.ShapeDtypeStruct((), jnp.int32), capacity=64).capacity == 64
    several = jax.tree.map(lambda x: jnp.array([1, 999]), method)
    assert jax.vmap(lambda m: m.budget + m.capacity)(several).tolist() == [65, 1063]
    assert jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(method)[0][0]) == ".budget"


@pytest.mark.parametrize("number", [np.int64, np.int8, jnp.int32, np.array, jnp.uint8], ids=str)
def test_scalars_of_any_library_make_the_same_method(number):
    """Static fields and what is computed from a leaf become Python's, so they key the same programs."""
    made = H2O(budget=number(12))
    assert (made.capacity, made.num_recent, type(made.capacity)) == (12, 6, int)
    size = Quest(page_size=number(8)).page_size
    assert (size, type(size)) == (8, int)


def test_a_knob_needs_its_name():
    refuses("Quest takes its knobs by name, got 5 without a name", lambda: Quest(5), TypeError)


def test_a_method_writes_check():
    def define():
        class Mine(Quest):
            def __post_init__(self):
                pass

    refuses("Mine: write `check`, not __post_init__", define, TypeError)


def test_metadata_that_no_loop_could_carry_are_refused():
    @pytree
    class Mine(Retrieval):
        def summarize(self, key, valid):
            return key.mean(axis=3)

        def join(self, summary, cache):
            return summary[:, :, 0]

        def score(self, summary, query, cursor):
            return jnp.einsum("bhgd,bhpd->bhp", query, summary)

    def step(params):
        cache = kvjax.prefill(params, [[1]], config=ONE, method=Mine(budget=16), max_new_tokens=2)
        return kvjax.decode_step(params, cache, jnp.array([1]))

    refuses(
        r"Mine.join must return the metadata .*, float32 \[1, 2, 9, 8\], got float32 \[1, 2, 8\]",
        lambda: jax.eval_shape(step, tiny_params()),
    )
    refuses("unknown method 'my_file.Mine' .did you mean my_file:Mine", lambda: kvjax.make("my_file.Mine"))


def test_a_prompt_leaves_room_for_what_the_model_has_positions_for():
    """`TinyModel` has 160 positions, fewer than the 256 tokens that have room if nothing is said."""
    sizes = [jax.eval_shape(lambda n=n: prefill([[1] * n])).layers[0].cache.num_slots for n in (9, 150)]
    assert sizes == [9 + 151, 150 + 10]
    with pytest.raises(ValueError, match="prompt of 160 . max_new_tokens=256 = 416 tokens exceeds"):
        prefill([[1] * 160])


# ---- prompts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: prefill([[1, 2], []]), "every prompt needs at least 1 token, got none in row 1"),
        (lambda: prefill([[1, 61]]), r"token ids must lie in \[0, vocab_size=61\), got 61; is this the tokenizer"),
        (lambda: prefill([[1, -2]]), "vocab_size=61.*, got -2"),
        (
            lambda: prefill([[1] * 150], max_new_tokens=11),
            "prompt of 150 . max_new_tokens=11 = 161 tokens exceeds the model's max_position_embeddings=160; shorten it, "
            "take a smaller max_new_tokens, or use a method that "
            r"re-numbers positions \(infllm, ntk, pi, selfextend, streamingllm, tokenselect\)$",
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
        (lambda: prefill(np.ones((1, 3), np.int32), lengths=[1.9]), r"lengths must be integers .*, got \[1.9\]"),
        (lambda: prefill(np.ones((1, 3), np.int32), lengths="3"), r"lengths must be integers of shape \[1\], .*, got '3'"),
        (lambda: prefill(np.ones((1, 3), np.int32), lengths=[2**40]), "lengths must be int32, got 1099511627776"),
        (lambda: prefill(np.ones((1, 3), np.int32), lengths=[None]), r"lengths must be integers .*, got \[None\]"),
        (lambda: kvjax.prefill(tiny_params(), [[1]], config=None), "config must describe a model, .* got None"),
        (lambda: kvjax.pad_tokens([[1]], multiple=0), "multiple must be a whole number of at least 1, got 0"),
        (lambda: prefill([[1]], max_new_tokens=2**40), "max_new_tokens must be .* from 1 to 2147483647, got 1099511627776"),
        (lambda: prefill([]), "list of token lists"),
        (lambda: prefill([[1]], lengths=[1]), "lengths belong to a padded array of tokens"),
        (lambda: prefill(np.ones((2, 3), np.float32)), r"integers of shape \[B, T\], got float32 \[2, 3\]"),
        (lambda: prefill(np.ones(3, np.int32)), r"shape \[B, T\] .for one prompt: tokens.None.., got int32 \[3\]"),
        (lambda: prefill(np.ones((2, 3), np.int32), lengths=[1]), r"lengths must be integers of shape \[2\].*got \[1\]"),
        (lambda: prefill(np.ones((2, 3), np.int32), lengths=[1, 4]), r"lie between 0 and T=3, got \[1, 4\]"),
        (lambda: prefill([[1]], method="ful"), "unknown method 'ful' .did you mean 'full'"),
    ],
)
def test_wrong_prompts_are_refused(call, message):
    refuses(message, call)


def run(model):
    return kvjax.prefill(TinyModel().random_params(), [[1]], config=model, max_new_tokens=4)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda q, k, v: (q[:, :, 0], k, v), r"of the shapes \(1, 2, 2, 128, 8\), .*, got \(1, 2, 128, 8\), "),
        (lambda q, k, v: (q, k.swapaxes(1, 2), v), r"got .*, \(1, 128, 2, 8\), "),
    ],
)
def test_a_model_that_attends_with_other_shapes_is_refused(spoil, message):
    class Faulty(TinyModel):
        def apply(self, params, tokens, attend, states, **options):
            return super().apply(params, tokens, lambda at, state, *qkv: attend(at, state, *spoil(*qkv)), states, **options)

    refuses("Faulty.apply must call attend .*" + message, lambda: run(Faulty()))


def test_a_model_that_returns_something_else_is_refused():
    class AllLogits(TinyModel):
        def apply(self, params, tokens, attend, states, *, last=None):
            return super().apply(params, tokens, attend, states)

    class NoStates(TinyModel):
        def apply(self, *args, **options):
            return super().apply(*args, **options)[0], ()

    message = r"AllLogits.apply must return logits of shape \(1, 61\), .*, got \(1, 128, 61\) and 2 states"
    refuses(message, lambda: run(AllLogits()))
    refuses("and 2 states, got .* and 0 states", lambda: run(NoStates()))
    half = types.SimpleNamespace(num_layers=2, vocab_size=61)
    refuses("SimpleNamespace has no num_q_heads, num_kv_heads, ", lambda: kvjax.prefill(tiny_params(), [[1]], config=half))


def test_renumbering_methods_may_run_past_the_model():
    """A method that re-numbers positions never uses a high one, so the model's limit does not apply to it."""
    cache = prefill([[1] * 200], small(StreamingLLM, budget=12, chunk=64), max_new_tokens=4)
    assert int(cache.length[0]) == 200


# ---- caches -------------------------------------------------------------------------------------------------------


def test_caches_that_do_not_fit_the_call_are_refused():
    cache = read("full", max_new_tokens=4)
    params = tiny_params()
    ids = np.zeros(3, np.int32)
    for message, call in (
        (
            "this cache was made by Full.*, got the method Quest.*prefill with the method you generate with",
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
        (r"tokens must be integers of shape \[3\].*got int32\[2\]", lambda: kvjax.decode_step(params, cache, ids[:2])),
        (r"tokens must be int32, got 4294967301", lambda: kvjax.decode_step(params, cache, np.full(3, 2**32 + 5))),
        (r"tokens must be integers of shape \[3\].*got None", lambda: kvjax.decode_step(params, cache, None)),
        (r"limits must be integers of shape \[3\].*got 'x'", lambda: kvjax.generate(params, cache, limits="x")),
        ("eos_token_ids must be whole numbers, got 'x'", lambda: kvjax.generate(params, cache, eos_token_ids="x")),
        (r"eos_token_ids must be whole numbers, got \[1.5\]", lambda: kvjax.generate(params, cache, eos_token_ids=[1.5])),
        (r"eos_token_ids must lie in .*, got 1099511627776", lambda: kvjax.generate(params, cache, eos_token_ids=[2**40])),
        (r"active must be bool of shape \[3\].*got True", lambda: kvjax.decode_step(params, cache, ids, active=True)),
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
        ("copies must be a whole number from 1 to 2147483647, got 1099511627776", lambda: kvjax.fork(cache, 2**40)),
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
        ({"temperature": -1.0, "key": 0}, "temperature must be a finite number of at least 0 or None, got -1.0"),
        ({"temperature": 1.0, "top_k": 0, "key": 0}, "top_k must be a whole number of at least 1 or None, got 0"),
        ({"temperature": 1.0, "top_p": 0.0, "key": 0}, "top_p must be .* above 0 and at most 1 or None, got 0.0"),
        ({"temperature": 1.0, "top_p": 1.5, "key": 0}, "top_p must be .*, got 1.5"),
        ({"temperature": 1.0, "top_k": np.int64(-3), "key": 0}, "top_k must be .*, got -3"),
        ({"temperature": 1.0, "top_p": np.float32(-1), "key": 0}, "top_p must be .*, got -1.0"),
        ({"temperature": jnp.float32(-1), "key": 0}, "temperature must be .*, got -1.0"),
        ({"temperature": float("nan"), "key": 0}, "temperature must be .*, got nan"),
        ({"temperature": "1", "key": 0}, "temperature must be .*, got '1'"),
        ({"top_k": 5}, "top_k=5 and top_p=None need a temperature"),
        ({"top_p": np.float32(0.5)}, "top_k=None and top_p=0.5 need a temperature"),
    ],
)
def test_wrong_sampling_options_are_refused(options, message):
    if "key" in options:
        options = {**options, "key": jax.random.key(options["key"])}
    refuses(message, lambda: kvjax.generate(tiny_params(), None, max_new_tokens=2, **options))  # before the cache is read


def test_a_consumed_cache_is_refused():
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


def test_non_finite_logits_name_their_row_and_step():
    """Row and step of the first bad logits are named, in `generate` and in `stream`."""
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), tiny_params())
    tokens, lengths = padded(prompts())

    def cache():
        return kvjax.prefill(broken, tokens, lengths=lengths, config=ONE, max_new_tokens=24, pad_multiple=1)

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


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_layers": 3}, 'params must belong to this model of 3 layers .* got other parameters: .*"/layers_2'),
        ({"hidden_size": 64}, "params must belong to this model of .* hidden_size=64, got other parameters: .*embedding"),
    ],
)
def test_parameters_of_another_model_are_refused(change, message):
    config = dataclasses.replace(TINY, **change)
    refuses(message, lambda: kvjax.prefill(tiny_params(), [[1, 2]], config=config, max_new_tokens=2))


@pytest.mark.parametrize(
    "params, message",
    [
        (None, "params must belong to this model"),
        ({}, "params must belong to this model"),
        ({"embed": np.ones(3, np.int32)}, "params must be floating-point numbers, got int32"),
        ({"embed": np.array(["a"])}, r"params must be a tree of arrays, got <U1\[1\] \['a'\] in it"),
    ],
)
def test_objects_that_are_no_parameters_are_refused(params, message):
    refuses(message, lambda: kvjax.prefill(params, [[1, 2]], config=TINY, max_new_tokens=2))


def test_lists_that_are_nested_too_deeply_are_refused():
    """Python can hold them; JAX cannot walk through them, and Python cannot show them."""
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for name, call in (
        ("Quest: budget", lambda: Quest(budget=deep)),
        ("tokens", lambda: prefill([deep])),
        ("tokens", lambda: prefill(deep)),
        ("lengths", lambda: prefill(np.ones((1, 3), np.int32), lengths=deep)),
        ("method", lambda: prefill([[1]], method=deep)),
        ("params", lambda: kvjax.prefill(deep, [[1]], config=TINY, max_new_tokens=2)),
        ("config", lambda: kvjax.prefill(tiny_params(), [[1]], config=deep)),
        ("eos_token_ids", lambda: kvjax.sweep(tiny_params(), [[1]], ["full"], config=TINY, eos_token_ids=deep)),
        ("PerLayer: layers", lambda: PerLayer(layers=deep, default=Full())),
    ):
        refuses(f"{name} must .*, got (the row )?a list that is nested too deeply to show", call)


def test_a_cache_of_another_model_is_refused():
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


def test_wrong_arguments_of_sweeps_are_refused():
    def sweep(methods=("full",), **options):
        return kvjax.sweep(tiny_params(), [[1, 2, 3], [4, 5]], methods, config=TINY, **options)

    refuses("methods must have at least one method, got none", lambda: sweep(()))
    refuses("max_new_tokens must be a whole number of at least 1, got 0", lambda: sweep(max_new_tokens=0))
    refuses("max_new_tokens must be a whole number of at least 1, got 1.5", lambda: sweep(max_new_tokens=1.5))
    refuses("chunk_size must be a whole number of at least 1, got 0", lambda: sweep(chunk_size=0))
    refuses("methods must be a list of methods or names, got 'full'", lambda: sweep("full"))
    refuses(r"methods must be a list of methods or names, got Full\(\)", lambda: sweep(Full()))
    refuses("eos_token_ids must lie in", lambda: sweep(eos_token_ids=(10_000,)))
    refuses("questions must have 2 rows like the prompts, got 1", lambda: sweep(questions=[[1]]))
