"""`Verified`: the tokens are Full's whatever the draft guesses; what a draft is told; tokens per pass; what is refused."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import registry
from kvjax.api import programs
from kvjax.decoding.sampling import Sampler
from kvjax.exact import FromJudge
from kvjax.exact.progress import keys_of_draws
from kvjax.exact.verified import no_passes, noted
from kvjax.methods import H2O, NTK, DuoAttention, Full, HeadKV, Quest, SelfExtend, SnapKV, TokenSelect
from kvjax.protocol.families import AppendOnly
from kvjax.protocol.typing import pytree
from kvjax.testing.model import TinyModel
from kvjax.wrappers import PerLayer, Prefill
from pallas_kernels.host import on_host
from tests.harness import NAMES, any_example, example, padded, prompts, small

pytestmark = pytest.mark.usefixtures("quick_compile")

N, DEPTH = 16, 3
KINDS = registry.builtin()
DRAFTS = [
    name
    for name in NAMES
    if example(name).dense_prompt or not KINDS[name].slotted and (KINDS[name].evicts or not KINDS[name].moves_slots)
]
IN_DEFAULT = ("quest",)  # a choice for speed; the test of sampling has a draft with storage of its own
IN_SLOW = ("chess", "streamingllm", "duoattention")  # one list for a model, another prompt, heads that differ
MARKS = pytest.mark.thorough, pytest.mark.slow
many = functools.partial(pytest.param, marks=pytest.mark.thorough)
QUEST = example("quest")


@pytree
class Wrong(AppendOnly):
    """Drafts tokens that Full never agrees with: it attends to the prompt as Full, and turns its steps' outputs around."""

    def compress(self, cache, prompt, room):
        return cache, None

    def attend(self, state, inputs):
        out, new = super().attend(state, inputs)
        return (out, new) if inputs.start is not None else (-20 * out, new)


@functools.cache
def model(layers=1):
    return TinyModel(num_layers=layers)


@functools.cache
def params(layers=1):
    with jax.ensure_compile_time_eval():
        return model(layers).random_params()


def layers_of(method):
    """Two layers for methods that treat layers differently: others need fewer programs."""
    return 2 if method.spans_layers or method.needs_guess or isinstance(method, Quest | DuoAttention | HeadKV) else 1


def read(method, layers=1, rows=None, width=48, **options):
    tokens, lengths = padded(prompts() if rows is None else rows, width)
    given = {"config": model(layers), "max_new_tokens": 40, "pad_multiple": 1, **options}
    return kvjax.prefill(params(layers), tokens, lengths=lengths, method=method, **given)


def go_on(cache, layers=1, limits=N, **options):
    """N greedy tokens per row; consumes the cache."""
    given = {"max_new_tokens": N, "eos_token_ids": (), "limits": limits and [limits] * cache.batch, **options}
    return kvjax.generate(params(layers), cache, **given)


@functools.cache
def full(layers=1, **options):
    return go_on(read(Full(), layers), layers, **options)


def verified(draft, **knobs):
    """Always drafts all it may, in the program of one that is given up; ``worth=None`` has a program of its own."""
    return kvjax.Verified(draft=draft, **{"depth": DEPTH, "worth": 0.0, **knobs})


def place(out, name):
    return np.asarray(out.stats.counters[name])


@pytest.mark.parametrize("name", [x if x in IN_DEFAULT else pytest.param(x, marks=MARKS[x in IN_SLOW]) for x in DRAFTS])
def test_ragged_rows_get_fulls_tokens(name):
    """In one call, and in two calls, of which the first ends in the middle of a pass; the cache goes on as Full's does."""
    draft = example(name)
    layers = layers_of(draft)
    method, want = verified(draft), full(layers)
    cache = read(method, layers)
    first = go_on(kvjax.fork(cache), layers, limits=5)
    np.testing.assert_array_equal(first.tokens[:, :5], want.tokens[:, :5])
    np.testing.assert_array_equal(go_on(first.cache, layers).tokens[:, : N - 5], want.tokens[:, 5:])
    out = go_on(cache, layers)
    np.testing.assert_array_equal(out.tokens, want.tokens)
    np.testing.assert_allclose(out.cache.logits, want.cache.logits, atol=1e-4, rtol=0)
    assert out.cache.length.tolist() == want.cache.length.tolist()
    np.testing.assert_allclose(place(out, "passes") * place(out, "tokens_per_pass"), N, rtol=1e-5)


def test_a_draft_is_told_of_kept_tokens_alone():
    """The bounds of pages are what they are when the tokens come one by one, and empty slots are as if never written."""
    layers = layers_of(QUEST)
    method = verified(QUEST)
    out = go_on(read(method, layers), layers)
    cache = read(method, layers)
    for at in range(N):
        cache = kvjax.decode_step(params(layers), cache, out.tokens[:, at])
    for got, want in zip(out.cache.layers, cache.layers, strict=True):
        np.testing.assert_array_equal(got.cache.position, want.cache.position)
        np.testing.assert_array_equal(got.cache.cursor, want.cache.cursor)
        for one, other in zip(jax.tree.leaves(got.aux), jax.tree.leaves(want.aux), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_draft_that_is_always_right_gives_a_whole_pass():
    out = go_on(read(verified(Full())))
    np.testing.assert_array_equal(out.tokens, full().tokens)
    assert set(place(out, "passes")) == {N / (DEPTH + 1)} and set(place(out, "tokens_per_pass")) == {DEPTH + 1}


@pytest.mark.slow
def test_a_draft_that_is_always_wrong_is_given_up():
    """The depth falls, and after a few passes Full decodes alone; a later call tries one token of the draft again."""
    out = go_on(read(verified(Wrong(), worth=0.5)))
    np.testing.assert_array_equal(out.tokens, full().tokens)
    drafted = np.asarray(out.cache.shared.drafted).sum(axis=1)
    assert not np.asarray(out.cache.shared.accepted).any() and (drafted <= 12).all(), drafted
    assert (place(out, "passes") == N).all()
    again = np.asarray(go_on(out.cache).cache.shared.drafted).sum(axis=1) - drafted
    assert again.tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["quest", *(pytest.param(x, marks=pytest.mark.slow) for x in ("snapkv", "pqcache", "tova"))])
def test_a_draft_that_is_given_up_is_told_of_fulls_tokens(name):
    """Its state is what it is when the tokens come one by one, so that a later call can draft."""
    draft = example(name)
    layers = layers_of(draft)
    cache = read(verified(draft, worth=0.5), layers)
    single, poor = kvjax.fork(cache), dataclasses.replace(cache.shared, rate=jnp.zeros_like(cache.shared.rate))
    out = go_on(dataclasses.replace(cache, shared=poor), layers)
    np.testing.assert_array_equal(out.tokens, full(layers).tokens)
    for at in range(N):
        single = kvjax.decode_step(params(layers), single, out.tokens[:, at])
    for got, want in zip(jax.tree.leaves(out.cache.layers), jax.tree.leaves(single.layers), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


def test_an_unknown_draft_is_judged_by_few_tokens():
    """Two failed rounds end the drafting, and a whole round of two tokens leads to a depth of four; later it takes longer."""
    active = jnp.ones(1, bool)
    for drafted, kept, rates in (((2, 1), (0, 0), (0.5, 0.375)), ((2, 4), (2, 4), (0.875, 0.93))):
        passes = no_passes(None, 1, 4)
        for count, right, rate in zip(drafted, kept, rates, strict=True):
            passes = noted(passes, jnp.array([count]), jnp.array([right]), active)
            np.testing.assert_allclose(passes.rate[0], rate, rtol=0.05)
    for _ in range(20):
        passes = noted(passes, jnp.array([4]), jnp.array([4]), active)
    passes = noted(passes, jnp.array([4]), jnp.array([0]), active)
    np.testing.assert_allclose(passes.rate[0], 0.875, rtol=0.01)


def test_full_alone_ends_soon_after_the_last_row():
    """Its steps run four at a time, so at most three come behind the last row's end."""
    cache, want = read(verified(Wrong(), worth=0.5)), np.asarray(full().tokens)
    poor = dataclasses.replace(cache, shared=dataclasses.replace(cache.shared, rate=jnp.zeros(3)))
    eos, none = jnp.asarray(np.unique(want[:, 2])), jnp.zeros(3, bool)
    end = programs.decode_program(params(), poor, Sampler(), None, eos, none, steps=N, stop_early=True)
    assert end.done.all() and int(end.num_tokens.max()) <= 3 and int(end.step) <= 5
    for row, count in enumerate(end.num_tokens.tolist()):
        np.testing.assert_array_equal(end.tokens[row, :count], want[row, :count])


@pytest.mark.parametrize("steps", [3, 19])
def test_keys_of_draws_are_fulls(steps):
    key, want = jax.random.key(3), []
    last, draws = (jax.random.key_data(x) for x in keys_of_draws(key, steps)[::-1])
    for _ in range(steps):
        mine, key = jax.random.split(key)
        want.append(jax.random.key_data(mine))
    np.testing.assert_array_equal(draws, want)
    np.testing.assert_array_equal(last, jax.random.key_data(key))


@pytest.mark.slow
def test_sampled_tokens_are_fulls_for_the_same_key():
    drawn = {"temperature": 1.0, "top_p": 0.9, "key": jax.random.key(7)}
    want = go_on(read(Full()), **drawn)
    out = go_on(read(verified(SnapKV(budget=12, obs_window=5))), **drawn)
    np.testing.assert_array_equal(out.tokens, want.tokens)
    assert 1 < place(out, "tokens_per_pass").mean() < DEPTH + 1


@pytest.mark.slow
def test_streams_ends_sweeps_questions_and_saved_caches(tmp_path):
    method, want = verified(SnapKV(budget=12, obs_window=5), worth=0.5), np.asarray(full().tokens)
    streamed = [[], [], []]
    for block in kvjax.stream(params(), read(method), max_new_tokens=N, eos_token_ids=(), block=5):
        for row, new in zip(streamed, block, strict=True):
            row += new
    assert streamed == want.tolist()
    ends = (int(want[0, 6]), int(want[2, 2]))  # inside of passes
    stopped, out = (go_on(read(x), eos_token_ids=ends) for x in (Full(), method))
    np.testing.assert_array_equal(out.tokens, stopped.tokens)
    assert out.cache.length.tolist() == stopped.cache.length.tolist()
    kvjax.save_cache(tmp_path / "cache", read(method))
    loaded = kvjax.load_cache(tmp_path / "cache", config=model(), method=method)
    np.testing.assert_array_equal(go_on(loaded).tokens, want)
    asked = [(5, 9, 2, 7), (8,), ()]
    one, other = (kvjax.extend(params(), kvjax.fork(read(x)), asked) for x in (method, Full()))
    np.testing.assert_array_equal(go_on(one).tokens, go_on(other).tokens)
    tokens, lengths = padded(prompts())
    several = [verified(SnapKV(budget=b, capacity=16, obs_window=5), worth=0.5) for b in (8, 16)]
    for result in kvjax.sweep(params(), tokens, several, config=model(), max_new_tokens=N, eos_token_ids=(), lengths=lengths):
        np.testing.assert_array_equal(result.tokens, want)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", many("float8_e4m3fn"), many("k8v4")])
@pytest.mark.parametrize("draft", [QUEST, many(SnapKV(budget=12, obs_window=5)), many(H2O(budget=12))])
def test_tokens_are_fulls_on_codes(draft, kv_dtype):
    layers = layers_of(draft)
    want = go_on(read(Full(), layers, kv_dtype=kv_dtype), layers)
    out = go_on(read(verified(draft), layers, kv_dtype=kv_dtype), layers)
    np.testing.assert_array_equal(out.tokens, want.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [None, many("int8")])
@pytest.mark.parametrize(
    "name", ["snapkv", *(many(x) for x in ("quest", "pqcache", "h2o", "retroinfer", "streamingllm", "chess"))]
)
def test_tokens_are_fulls_from_host_memory(name, kv_dtype):
    """Rejected tokens have replaced older ones in the ring of 64 copies, and these are there again.

    The next pass with drafts would write over the rejected tokens, but Full's own step does not: the draft is soon given up.
    """
    draft = example(name)
    layers = layers_of(draft)
    rng = np.random.default_rng(5)
    options = {"rows": [rng.integers(0, 60, n).tolist() for n in (100, 71, 55)], "width": 112, "kv_dtype": kv_dtype}
    want = go_on(read(Full(), layers, **options), layers)
    cache = read(verified(draft, offload=True, worth=0.97), layers, **options)
    assert any(on_host(x) for x in jax.tree.leaves(cache.layers))
    out = go_on(cache, layers)
    np.testing.assert_array_equal(out.tokens, want.tokens)
    np.testing.assert_allclose(out.cache.logits, want.cache.logits, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["stages", "per_layer", *(many(x) for x in ("thinned", "dense_below", "periodic", "layer_budgets", "twilight"))]
)
def test_wrappers_can_draft(name):
    out = go_on(read(verified(any_example(name)), 2), 2)
    np.testing.assert_array_equal(out.tokens, full(2).tokens)


@pytest.mark.slow
def test_the_judge_chooses_the_drafts_tokens():
    """The list is renewed in each pass, and gives better drafts than the prompt's own list."""
    draft = small(FromJudge, budget=14, num_recent=8, obs_window=5)
    out = go_on(read(verified(draft)))
    np.testing.assert_array_equal(out.tokens, full().tokens)
    before, after = (x.layers[0].aux for x in (read(verified(draft)), out.cache))
    assert (np.sort(before.slots[0]) != np.sort(after.slots[0])).any() and after.used[0].all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "draft",
    [
        Quest(budget=512, num_dense_layers=0),
        many(SnapKV(budget=512)),
        many(H2O(budget=512)),
        many(TokenSelect(budget=64, num_sink=4, num_local=32, chunk=32)),
    ],
)
def test_no_pass_copies_the_cache(draft):
    """In the compiled loop no instruction copies an array of the size of a layer's keys. Full's own steps are not in it."""
    slots, room = 8192, 64
    config = dataclasses.replace(model(2), max_position_embeddings=10_000)
    sizes = {"model": config, "max_new_tokens": room, "chunk_size": slots, "plan": None, "kv_dtype": None}
    ids, length = jnp.zeros((1, slots), jnp.int32), jnp.full((1,), slots, jnp.int32)
    method = (verified(draft, worth=None),)
    (cache,) = jax.eval_shape(lambda: programs.prefill_program(params(2), ids, length, method, **sizes))
    given = Sampler(), None, jnp.zeros((0,), jnp.int32), jnp.zeros((1,), bool), None
    made = programs.generate_program.lower(params(2), cache, *given, steps=32, stop_early=False).compile()
    shape = rf"f32\[1,{config.num_kv_heads},{slots + room},{config.head_dim}\]"
    assert re.search(shape, made.as_text()) and not re.findall(rf"= {shape}\S* copy", made.as_text())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: kvjax.Verified(draft=verified(Full())), "decodes token by token, got another Verified"),
        (lambda: verified(Full(), depth=0), "depth must be a whole number of at least 1, got 0"),
        (lambda: verified(Quest(offload=True)), "Quest must have offload=False, got True"),
        (lambda: verified(Full(), offload=True), "offload must be False with Full, which reads every token"),
        (lambda: verified(SelfExtend()), "prefill densely.*SelfExtend has a prefill or positions of its own"),
        (lambda: verified(NTK(factor=2.0)), "prefill densely.*NTK"),
        (lambda: verified(NTK(factor=1.0)), "prefill densely.*NTK"),  # traced, the factor could be any
        (lambda: verified(Prefill(method=Full())), "prefill densely.*Prefill"),
        (lambda: verified("snapkv"), "must be a kvjax method, got the name 'snapkv'"),
        (lambda: PerLayer(layers={0: Full()}, default=verified(Full())), "cannot run in some only"),
        (lambda: read(verified(Full(), depth=8), max_new_tokens=8), "expected max_new_tokens of at least 9, got 8"),
        (lambda: read(verified(example("retroinfer", buffer=16, cluster_size=4), depth=16)), "depth must be below 16"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_a_text_names_it():
    made = kvjax.make("verified(snapkv(budget=64), depth=2)")
    assert made == kvjax.Verified(draft=SnapKV(budget=64), depth=2)
    assert registry.parse_method("verified(draft=quest, worth=none)")[1] == {"draft": "quest", "worth": None}


def test_memory_counts_both_storages():
    sizes = {"batch": 2, "prompt_slots": 64, "max_new_tokens": 16}
    alone, shared, beside = (
        kvjax.memory_needed(x, model(), **sizes).after
        for x in (Full(), verified(Full()), verified(SnapKV(budget=16, obs_window=5)))
    )
    row = 2 * model().num_kv_heads * (2 * model().head_dim * 4 + 4)  # key, value and position of a token in two rows
    assert 0 < shared - alone < 100, "the state that all layers share"
    assert beside - shared == 32 * row + 2 * 4  # the draft's slots and its cursors
