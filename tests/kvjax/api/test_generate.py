"""`generate`, `stream`, `extend`, `decode_step`: ends of rows, drawing, streaming, forks, turns, use inside jit and vmap."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.decoding.decode import padding_token
from kvjax.decoding.sampling import Sampler
from kvjax.methods import Full, SnapKV
from tests import harness
from tests.harness import TINY, TRACES, padded, prompts, tiny_params
from tests.kvjax.cases import ONE, ended

pytestmark = pytest.mark.usefixtures("quick_compile")

N = 10
LAST = 59  # a token that the model does not draw here
read = functools.partial(harness.read, config=ONE)  # one layer, which halves the programs


def evicting(budget=12):
    """A method with an array leaf, in the programs of others with another budget."""
    return SnapKV(budget=jnp.int32(budget), capacity=12, obs_window=5)


def run(ends=(), cache=None, limits=N, **options):
    """`generate` in one program: N tokens, a limit for each row, and three places for ``ends``."""
    cache = read("full") if cache is None else cache
    some = [*ends, *[LAST] * 3][:3]
    limits = [limits] * 3 if isinstance(limits, int) else limits
    return kvjax.generate(tiny_params(), cache, max_new_tokens=N, eos_token_ids=some, limits=limits, **options)


@functools.cache
def free_run():
    """Greedy tokens that nothing ends: int32 [3, N]."""
    out = run()
    assert out.num_tokens.tolist() == [N] * 3
    return np.asarray(out.tokens)


# ---- the end of a row ---------------------------------------------------------------------------------------------


def test_greedy_equals_reading_everything_again():
    """Each token is the argmax of a fresh prefill over all tokens before it."""
    rows = [list(prompt) for prompt in prompts()]
    for tokens in free_run().T[:4].tolist():
        assert read("full", rows).logits.argmax(axis=-1).tolist() == tokens
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)


def test_rows_end_at_any_of_several_eos():
    free = free_run()
    ends = [int(free[0, 3]), int(free[1, 6]), int(free[2, 8])]
    want, counts = ended(free_run(), ends)
    got = run(ends)
    np.testing.assert_array_equal(got.tokens, want)
    assert got.num_tokens.tolist() == counts and min(counts) < N
    np.testing.assert_array_equal(got.cache.length, np.array([len(p) for p in prompts()]) + counts)


def test_eos_of_the_model_is_the_default():
    assert TINY.eos_token_ids == (60,)
    want, counts = ended(free_run(), [60])
    got = kvjax.generate(tiny_params(), read("full"), max_new_tokens=N)
    np.testing.assert_array_equal(got.tokens, want)
    assert got.num_tokens.tolist() == counts


def test_all_rows_ended_at_once_leaves_the_loop():
    """Asking for many tokens costs nothing once every row has ended; what follows is padding."""
    got = run(free_run()[:, 0].tolist())
    assert got.num_tokens.tolist() == [1, 1, 1] and (got.tokens[:, 1:] == padding_token(ONE)).all()


# ---- drawing ------------------------------------------------------------------------------------------------------


def probabilities(logits, temperature, top_k=None, top_p=None, min_p=0):
    """NumPy's reading of the filters: temperature, then top-k, then top-p over what is left, then min-p."""
    p = np.exp((logits / temperature).astype(np.float64))
    order = np.argsort(-p, kind="stable")
    if top_k is not None:
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p is not None:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.3, "top_p": 0.6},
        {"temperature": 0.8, "top_k": 4, "top_p": 0.75},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.9, "top_k": 6, "min_p": 0.2},
    ],
)
def test_draws_follow_the_filtered_distribution(options):
    logits = np.array([1.2, -0.3, 0.4, 2.0, 0.9, -1.5, 0.0], np.float32)
    want = probabilities(logits, **options)
    draws = 20_000
    tokens, _ = Sampler(**options).draw(jnp.broadcast_to(jnp.asarray(logits), (draws, 7)), jax.random.key(0))
    got = np.bincount(np.asarray(tokens), minlength=7) / draws
    assert set(np.flatnonzero(got)) <= set(np.flatnonzero(want))
    np.testing.assert_allclose(got, want, atol=4 * 0.5 / np.sqrt(draws))


def test_sampling_is_a_function_of_the_key_and_traced():
    """Another temperature, k or p does not compile again, and 0 is greedy; the same key gives the same tokens."""

    def draw(seed, **options):
        return np.asarray(run(key=jax.random.key(seed), **options).tokens)

    first = draw(1, temperature=1.0, top_k=20, top_p=0.9)
    traces = len(TRACES)
    np.testing.assert_array_equal(draw(1, temperature=1.0, top_k=20, top_p=0.9), first)
    assert not np.array_equal(draw(2, temperature=1.0, top_k=20, top_p=0.9), first)
    np.testing.assert_array_equal(draw(2, temperature=1.5, top_k=1, top_p=0.5), free_run())
    np.testing.assert_array_equal(draw(2, temperature=0.0, top_k=20, top_p=0.9), free_run())
    assert len(TRACES) == traces


# ---- streaming ----------------------------------------------------------------------------------------------------


class Accents:
    """Two tokens make one character, as bytes of UTF-8 do; a single token without its pair is U+FFFD."""

    def decode(self, ids):
        return bytes(byte for at, _ in enumerate(ids) for byte in "é".encode()[at % 2 : at % 2 + 1]).decode(errors="replace")


class Names:
    def decode(self, ids):
        return "".join(f"<{token}>" for token in ids)


def test_stream_equals_generate():
    options = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "key": jax.random.key(3)}
    free = np.asarray(run(**options).tokens)
    ends = [int(free[0, 4])]
    want, counts = ended(free, ends)
    rows = [[], [], []]
    for piece in kvjax.stream(tiny_params(), read("full"), max_new_tokens=N, block=5, eos_token_ids=ends, **options):
        for row, new in zip(rows, piece, strict=True):
            assert len(new) <= 5
            row += new
    for at, row in enumerate(rows):
        assert row == want[at, : counts[at]].tolist()


def stream(tokenizer, stop):
    return list(
        kvjax.stream(tiny_params(), read("full"), max_new_tokens=N - 1, block=3, eos_token_ids=[stop], tokenizer=tokenizer)
    )


def test_stream_of_text_never_shows_half_a_character():
    pieces = stream(Accents(), LAST)
    assert [piece[0] for piece in pieces] == ["é", "éé", "é\ufffd"], "held back, then caught up; the last one has no rest"


def test_rows_and_texts_have_no_padding_and_texts_no_eos():
    free = free_run()
    stop = int(free[0, 3])
    got = run([stop])
    want, counts = ended(free_run(), [stop])
    rows = [row[:count].tolist() for row, count in zip(want, counts, strict=True)]
    assert got.rows() == rows and got.rows()[0][-1] == stop
    assert got.texts(Names()) == [Names().decode([token for token in row if token != stop]) for row in rows]
    streamed = ["".join(pieces) for pieces in zip(*stream(Names(), stop), strict=True)]
    assert streamed == [Names().decode([token for token in row[: N - 1] if token != stop]) for row in rows]
    assert run(limits=[2, 0, N]).rows() == [free[0, :2].tolist(), [], free[2].tolist()]


def test_a_stop_string_ends_its_row():
    """It may begin and end within tokens; the other rows go on."""
    free, names = free_run()[:, :-1], Names()
    stop = f"{free[0, 3]}><{free[0, 4]}"
    whole = [names.decode(row) for row in free.tolist()]
    want = [text.partition(stop)[0] for text in whole]
    options = {"max_new_tokens": N - 1, "block": 3, "eos_token_ids": [LAST], "tokenizer": names}
    pieces = list(kvjax.stream(tiny_params(), read("full"), stop=[stop, "no"], **options))
    assert ["".join(row) for row in zip(*pieces, strict=True)] == want != whole
    assert len(pieces) == 3 and pieces[2][0] == ""
    assert len(list(kvjax.stream(tiny_params(), read("full"), stop=">", **options))) == 1, "all rows have ended"
    assert run(limits=N - 1).texts(names, stop=stop) == want
    for bad in ("", 3, ["a", ""], None):
        with pytest.raises(ValueError, match="stop"):
            kvjax.stream(tiny_params(), None, stop=bad, tokenizer=names)
    with pytest.raises(ValueError, match="tokenizer"):
        kvjax.stream(tiny_params(), None, stop="a")


# ---- turns, forks, single steps -----------------------------------------------------------------------------------


def test_generating_goes_on_after_another_turn():
    """generate, extend, generate equals reading the whole conversation at once."""
    first = run(limits=5)
    turns = [list(p) + first.rows()[i] + [7, 8] for i, p in enumerate(prompts())]
    second = run(cache=kvjax.extend(tiny_params(), first.cache, [[7, 8]] * 3))
    np.testing.assert_array_equal(second.tokens, run(cache=read("full", turns)).tokens)


def test_decode_step_moves_active_rows_only():
    cache = read("full")
    before = jax.tree.map(np.asarray, (cache.layers, cache.logits, cache.length))
    after = kvjax.decode_step(tiny_params(), cache, np.array([1, 2, 3]), active=np.array([True, False, True]))
    assert (after.length - before[2]).tolist() == [1, 0, 1]
    np.testing.assert_array_equal(after.logits[1], before[1][1])
    assert not np.array_equal(after.logits[0], before[1][0])
    for one, two in zip(jax.tree.leaves(before[0]), jax.tree.leaves(after.layers), strict=True):
        np.testing.assert_array_equal(one[1], two[1])


def test_extending_by_nothing_changes_nothing():
    cache = read("full")
    same = kvjax.extend(tiny_params(), cache, [[], [], []])
    assert same.length.tolist() == [40, 23, 9]


def test_tokens_may_be_lists_or_arrays():
    tokens, lengths = padded(prompts())
    lists = kvjax.prefill(tiny_params(), [list(p) for p in prompts()], config=ONE, max_new_tokens=24, pad_multiple=16)
    array = kvjax.prefill(tiny_params(), jnp.asarray(tokens), lengths=lengths, config=ONE, max_new_tokens=24, pad_multiple=16)
    np.testing.assert_array_equal(lists.logits, array.logits)
    wide, length = kvjax.pad_tokens([[1, 2, 3], [4]], multiple=4)
    assert wide.tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]] and length.tolist() == [3, 1]


def test_padding_does_not_matter():
    """Tokens behind a prompt's end are never read."""
    tokens, lengths = padded(prompts())
    dirty = np.where(np.arange(48)[None] < lengths[:, None], tokens, 33)
    for method in (Full(), evicting()):
        clean, other = (
            kvjax.prefill(tiny_params(), x, lengths=lengths, config=ONE, method=method, pad_multiple=1, max_new_tokens=24)
            for x in (tokens, dirty)
        )
        np.testing.assert_array_equal(clean.logits, other.logits)


# ---- inside the user's transformations ----------------------------------------------------------------------------


def test_calls_inside_transformations_equal_calls_outside():
    """Mapped prompts under mapped knobs, keys and limits; a cache and tokens that a jitted function closes over."""

    def draw(budget, key, most):
        return run(cache=read(evicting(budget)), limits=[4, most, 3], temperature=1.0, key=key).tokens

    keys, most = jax.random.split(jax.random.key(5), 2), jnp.array([5, 2])
    made = jax.vmap(draw)(jnp.array([1, 12]), keys, most)  # 1 < obs_window becomes 5
    for got, *given in zip(made, (5, 12), keys, most, strict=True):
        np.testing.assert_array_equal(draw(*given), got)
    cache, asked, sizes = read("full"), jnp.array([[5, 9], [8, 1], [4, 0]]), jnp.array([2, 2, 1])

    def step(now):
        now = kvjax.extend(tiny_params(), now, asked, lengths=sizes)
        return kvjax.decode_step(tiny_params(), now, sizes, active=sizes > 1).logits

    np.testing.assert_allclose(jax.jit(lambda: step(cache))(), step(kvjax.fork(cache)), atol=1e-5)


def test_checks_see_the_values_that_a_jitted_function_closes_over():
    cache, outside, zeros = read("full"), jnp.array([1, 2, 99]), jnp.array([0, 0, 0])
    for call, told in (
        (lambda: kvjax.generate(tiny_params(), cache, max_new_tokens=33).tokens, "room for 32 more tokens"),
        (lambda: kvjax.generate(tiny_params(), cache, max_new_tokens=500).tokens, "max_position_embeddings"),
        (lambda: kvjax.decode_step(tiny_params(), cache, outside).logits, "vocab_size=61"),
        (lambda: kvjax.generate(tiny_params(), cache, limits=outside).tokens, "limits must lie between"),
        (lambda: kvjax.prefill(tiny_params(), outside[:, None], lengths=zeros, config=ONE).logits, "at least 1 token"),
        (lambda: list(kvjax.stream(tiny_params(), cache, max_new_tokens=5)), "call generate inside jit"),
    ):
        with pytest.raises(ValueError, match=told):
            jax.jit(call)()


def test_a_method_with_array_leaves_survives_generate():
    """`generate` consumes the cache, not the method object it was given."""
    method = evicting()
    for _ in range(2):
        run(cache=read(method), method=method, temperature=1.0, key=jax.random.key(0))
    assert int(method.budget) == 12


def test_a_method_may_be_named():
    cache = read("Full")
    assert cache.method == Full()
    assert run(cache=cache, method="full").tokens.shape == (3, N)


def test_a_huge_budget_costs_no_more_than_the_tokens():
    full, huge = run(), run(cache=read(kvjax.make("quest", budget=10**9)))
    np.testing.assert_array_equal(huge.tokens, full.tokens)
    assert huge.stats.resident_bytes <= 1.3 * full.stats.resident_bytes  # metadata
    assert bool(huge.stats.is_no_op.all())
    with pytest.raises(ValueError, match="room for 22 more tokens in row 0"):
        kvjax.generate(tiny_params(), huge.cache, max_new_tokens=23)
