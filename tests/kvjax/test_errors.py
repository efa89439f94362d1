"""Refusals that depend on more than one value; `tests.fuzz.arguments` has the values that each argument alone refuses."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import rope
from kvjax.methods import H2O, Full, OracleEviction, Quest, SnapKV, StreamingLLM
from kvjax.protocol.families import Retrieval
from kvjax.protocol.typing import pytree
from kvjax.testing.model import TinyModel
from kvjax.wrappers import PerLayer
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


WRONG_METHODS = [  # what the message names, and calls
    ("SnapKV: budget .*31", lambda: SnapKV(budget=31)),
    ("H2O: budget .*num_recent=8", lambda: H2O(budget=8, num_recent=8)),
    ("SnapKV: budget .*capacity=64", lambda: SnapKV(budget=100, capacity=64)),
    ("SnapKV: capacity", lambda: SnapKV(budget=np.array([40, 64]))),
    ("SnapKV: capacity", lambda: jax.eval_shape(lambda budget: SnapKV(budget=budget), 64)),
    ("budget .*capacity=16", lambda: StreamingLLM(budget=jnp.int32(99), capacity=16)),
    ("'0'", lambda: PerLayer(layers={"0": Full()}, default=Full())),
    ("layer 2", lambda: prefill([[1]], PerLayer(layers={2: Full()}, default=Full()), max_new_tokens=2)),
    ("layers .*0", lambda: prefill([[1]], PerLayer(layers={0: Full(), -2: Quest()}, default=Full()), max_new_tokens=2)),
    ("'qwest' .*'quest'", lambda: kvjax.make("qwest")),
    ("'bugdet' .*'budget'", lambda: Quest(bugdet=5)),
    ("'budget'", lambda: Full(budget=5)),
    ("head_dim", lambda: rope.inverse_frequencies(7, 1e4)),
]


@pytest.mark.parametrize(("name", "call"), WRONG_METHODS)
def test_wrong_methods_are_refused(name, call):
    refuses(name, call)


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
    ("name", "call"),
    [
        ("max_new_tokens=11 .*streamingllm, tokenselect", lambda: prefill([[1] * 150], max_new_tokens=11)),
        ("on 11 more tokens .* 150 . 11 = 161 .*ahead", lambda: prefill([[1] * 150], method=OracleEviction(ahead=11))),
        ("lengths", lambda: prefill([[1]], lengths=[1])),  # which belong to an array
        ("lengths .*T=3", lambda: prefill(np.ones((2, 3), np.int32), lengths=[1, 4])),
        ("'ful' .*'full'", lambda: prefill([[1]], method="ful")),
    ],
)
def test_wrong_prompts_are_refused(name, call):
    refuses(name, call)


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


def test_a_model_that_does_not_fit_is_refused():
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
    loaded = types.SimpleNamespace(config=TINY, params=tiny_params())
    refuses("got .*; take its config$", lambda: kvjax.prefill(tiny_params(), [[1]], config=loaded))
    for call in (kvjax.prefill, functools.partial(kvjax.sweep, methods=["full"])):
        refuses("got .* in it; take its params$", lambda call=call: call(loaded, [[1]], config=TINY, max_new_tokens=1))
    refuses("of num_kv_heads=2, got 3", lambda: run(TinyModel(num_q_heads=3)))
    refuses("config must be hashable, .*unhashable type: 'list'", lambda: run(TinyModel(eos_token_ids=[60])))


def test_renumbering_methods_may_run_past_the_model():
    """A method that re-numbers positions never uses a high one, so the model's limit does not apply to it."""
    method = small(StreamingLLM, budget=12, chunk=64)
    assert jax.eval_shape(lambda: prefill([[1] * 200], method, max_new_tokens=4)).length.shape == (1,)


# ---- caches -------------------------------------------------------------------------------------------------------


def test_caches_that_do_not_fit_the_call_are_refused():
    """Room is counted per row: a short row may take more tokens than the longest row has room for."""
    cache, params = read("full", max_new_tokens=1), tiny_params()  # 49 slots, prompts of 40, 23 and 9
    for message, call in (
        ("Full.* Quest", lambda: kvjax.generate(params, cache, method=example("quest"))),
        ("9 more tokens in row 0", lambda: kvjax.generate(params, cache, max_new_tokens=10)),
        ("9 more tokens in row 0", lambda: kvjax.extend(params, cache, np.ones((3, 10), np.int32))),
        ("max_position_embeddings=160", lambda: kvjax.generate(params, cache, max_new_tokens=121)),
        ("3 rows", lambda: kvjax.extend(params, cache, [[1]])),
        ("vocab_size=61", lambda: kvjax.extend(params, cache, [[1], [99], [2]])),
        ("vocab_size=61", lambda: kvjax.decode_step(params, cache, np.full(3, 10_000))),
        ("'h20' .*'h2o'", lambda: kvjax.generate(params, cache, max_new_tokens=2, method="h20")),
    ):
        refuses(message, call)
    after = kvjax.extend(params, cache, [[1] * 9, [1] * 20, []])  # a refusal consumes nothing
    assert after.length.tolist() == [49, 43, 9]
    refuses("room for 0 more tokens in row 0", lambda: kvjax.decode_step(params, after, np.array([1, 1, 1])))


# ---- drawing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("knob", "name"), [("temperature", "key"), ("top_k", "temperature"), ("top_p", "temperature")])
def test_drawing_needs_a_key_and_a_temperature(knob, name):
    refuses(name, lambda: kvjax.generate(tiny_params(), None, max_new_tokens=2, **{knob: 1}))  # before the cache is read


def test_one_temperature_is_for_all_rows_and_zero_is_greedy():
    """Without a key, because a greedy step draws nothing."""
    for knob, value in itertools.product(("temperature", "top_k", "top_p"), (np.ones(3), [["a"], 3])):
        given = {"temperature": 1.0, "key": jax.random.key(0), knob: value}
        refuses(knob, lambda given=given: kvjax.generate(tiny_params(), None, max_new_tokens=2, **given))
    greedy = kvjax.generate(tiny_params(), read("full"), max_new_tokens=2)
    at_zero = kvjax.generate(tiny_params(), read("full"), max_new_tokens=2, temperature=0.0, top_k=3)
    np.testing.assert_array_equal(at_zero.tokens, greedy.tokens)


def test_a_consumed_cache_is_refused():
    cache = read("full")
    view = np.asarray(cache.length)  # JAX deletes no array that NumPy looks at
    waiting = kvjax.stream(tiny_params(), cache, max_new_tokens=2)
    first = kvjax.generate(tiny_params(), cache, max_new_tokens=2)
    refuses("consumed", lambda: next(waiting))
    assert view.shape == (3,) and not cache.length.is_deleted()
    kvjax.generate(tiny_params(), first.cache, max_new_tokens=2, eos_token_ids=3)  # one id needs no list
    assert "tokens attended" in first.stats.summary(), "what is known of the first turn outlives its cache"
    refuses("consumed", lambda: kvjax.fork(cache))
    refuses("Generation", lambda: kvjax.generate(tiny_params(), first, max_new_tokens=2))


def test_a_cache_of_which_any_array_is_gone_was_consumed():
    """NumPy's view of an array keeps it alive; the others tell. With views of all, nothing is consumed."""
    count = len(jax.tree.leaves(read("full")))
    for at in range(count):
        cache = read("full")
        view = np.asarray(jax.tree.leaves(cache)[at])
        kvjax.decode_step(tiny_params(), cache, [1, 2, 3])
        assert view is not None and not jax.tree.leaves(cache)[at].is_deleted()
        for call in (
            lambda cache=cache: kvjax.generate(tiny_params(), cache, max_new_tokens=2),
            lambda cache=cache: next(kvjax.stream(tiny_params(), cache, max_new_tokens=2)),
            lambda cache=cache: kvjax.extend(tiny_params(), cache, [[5], [5], [5]]),
            lambda cache=cache: kvjax.decode_step(tiny_params(), cache, [1, 2, 3]),
            lambda cache=cache: kvjax.fork(cache),
        ):
            refuses("consumed", call)


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


@pytest.mark.parametrize(("field", "size", "leaf"), [("num_layers", 3, "/layers_2"), ("hidden_size", 64, "embedding")])
def test_parameters_of_another_model_are_refused(field, size, leaf):
    config = dataclasses.replace(TINY, **{field: size})
    refuses(f"params .*{leaf}", lambda: kvjax.prefill(tiny_params(), [[1, 2]], config=config, max_new_tokens=2))


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
