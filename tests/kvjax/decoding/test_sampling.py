"""`Sampler`: each field against NumPy and transformers; in `generate`, `stream` and `Verified`; in batches, jit and vmap."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.decoding import Sampler
from kvjax.exact.progress import keys_of_draws
from kvjax.methods import SnapKV
from tests import goldens, harness
from tests.harness import prompts, tiny_params
from tests.kvjax.cases import ONE

pytestmark = pytest.mark.usefixtures("quick_compile")

N, B, V, STEPS = 8, 3, 11, 6
read = functools.partial(harness.read, config=ONE)
PROMPTS = [np.asarray(row).tolist() for row in prompts()]


@jax.jit
def scores(sampler, drawn, logits):
    """The filtered logits [N, B, V] before each of the drawn tokens [B, N], of which the model gives ``logits``."""
    sampler, memory = sampler.remembered(len(drawn), drawn.shape[1])
    memory = memory if memory is None else sampler.recall(memory, logits.shape[-1])

    def step(memory, each):
        processed, state = sampler.process(each[0], memory)
        memory = memory if memory is None else memory.add(each[1], jnp.ones(len(drawn), bool), state)
        return memory, sampler.filtered(processed)

    return jax.lax.scan(step, memory, (logits, drawn.T))[1]


# ---- what is drawn from -------------------------------------------------------------------------------------------


def test_scores_equal_the_goldens_of_transformers():
    made = json.loads((goldens.FOLDER / "kvjax" / "samplers.json").read_text())
    drawn, logits = jnp.asarray(made["drawn"]), jnp.asarray(made["logits"], jnp.float32)
    assert len(made["cases"]) == 9
    for case in made["cases"]:
        options = dict(case["options"])
        options |= {"logit_bias": {int(i): x for i, x in options["logit_bias"].items()}} if "logit_bias" in options else {}
        want = np.array(case["scores"], np.float32)  # null is nan
        got = scores(Sampler(**options).read(made["prompt"]), drawn, logits)
        np.testing.assert_allclose(got, np.where(np.isnan(want), -np.inf, want), rtol=1e-4, atol=1e-4, err_msg=str(options))


def plain(options, prompt, drawn, logits):
    """NumPy's reading of one row: scores float64 [V] before the token behind ``drawn``."""
    seen, x = prompt + drawn, logits.astype(np.float64)
    for token, bias in options.get("logit_bias", {}).items():
        x[token] += bias
    for token in {*seen} if "repetition_penalty" in options else ():
        x[token] = x[token] * options["repetition_penalty"] if x[token] < 0 else x[token] / options["repetition_penalty"]
    for token in drawn:
        x[token] -= options.get("frequency_penalty", 0)
    for token in {*drawn}:
        x[token] -= options.get("presence_penalty", 0)
    if n := options.get("no_repeat_ngram"):
        grams = {tuple(seen[i : i + n]) for i in range(len(seen) - n + 1)}
        x[[token for token in range(len(x)) if (*seen[len(seen) - n + 1 :], token) in grams]] = -np.inf
    return x / options.get("temperature", 1)


@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": 0.4, "presence_penalty": -0.3, "repetition_penalty": 1.4},
        {"no_repeat_ngram": 4},
        {"logit_bias": {2: -np.inf, 5: 3.0}, "frequency_penalty": 1.5, "repetition_penalty": 0.5, "no_repeat_ngram": 3,
         "temperature": 0.6},
    ],
)  # fmt: skip
def test_scores_equal_a_loop(options):
    """Over rows of several lengths, one of them empty, with tokens that come again."""
    rng = np.random.default_rng(0)
    before = [rng.integers(0, 4, size).tolist() for size in (9, 0, 3)]
    drawn, logits = rng.integers(0, 4, (B, STEPS)), rng.normal(0, 2, (STEPS, B, V)).astype(np.float32)
    got = scores(Sampler(**options).read(before), jnp.asarray(drawn), jnp.asarray(logits))
    for step, row in np.ndindex(STEPS, B):
        want = plain(options, before[row], drawn[row, :step].tolist(), logits[step, row])
        np.testing.assert_allclose(got[step, row], want, rtol=1e-5, atol=1e-5)


def test_a_mapped_sweep_equals_its_samplers():
    rng = np.random.default_rng(1)
    drawn, logits = jnp.asarray(rng.integers(0, V, (B, STEPS))), jnp.asarray(rng.normal(size=(STEPS, B, V)), jnp.float32)

    def made(penalty, temperature, bias):
        sampler = Sampler(repetition_penalty=penalty, frequency_penalty=penalty, temperature=temperature, logit_bias=bias)
        return scores(sampler.read([[1, 2], [3], []]), drawn, logits)

    knobs = jnp.array([1.1, 2.0]), jnp.array([0.5, 1.5]), jnp.asarray(rng.normal(size=(2, V)), jnp.float32)
    for got, *one in zip(jax.vmap(made)(*knobs), *knobs, strict=True):
        np.testing.assert_allclose(got, made(*one), rtol=1e-6)


# ---- in the decoding loop -----------------------------------------------------------------------------------------


def at_most_twice(logits, state, history):
    """A processor: no token is drawn three times, and the state counts the steps of a row."""
    return jnp.where(state["drawn"] >= 2, -jnp.inf, logits), {
        "drawn": state["drawn"].at[jnp.arange(len(logits)), last(history)].add((history.length > state["start"]).astype(int)),
        "start": state["start"],
    }


def last(history):
    return jnp.take_along_axis(history.tokens, jnp.maximum(history.length - 1, 0)[:, None], axis=1)[:, 0]


def sampler_of(rows, **options):
    """A sampler with every kind of memory, for some rows of the prompts."""
    before = [PROMPTS[row] for row in rows]
    state = {"drawn": jnp.zeros((len(rows), 61), int), "start": jnp.array([len(row) for row in before])}
    options = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "no_repeat_ngram": 2, **options}
    return Sampler(logit_bias={3: 1.0}, processor=at_most_twice, state=state, **options).read(before)


def run(sampler, cache, steps=N, key=None):
    return kvjax.generate(tiny_params(), cache, max_new_tokens=steps, eos_token_ids=(), sampler=sampler, key=key)


DRAW = {"temperature": 1.0, "min_p": 0.01}
KEYS = jax.random.split(jax.random.key(3), 3)


@functools.cache
def whole():
    return run(sampler_of(range(3), **DRAW), read("full"), key=KEYS)


def test_going_on_and_streaming_equal_one_call():
    """The state goes on: with the generation's sampler, and between the blocks of a stream."""
    first = run(sampler_of(range(3), **DRAW), read("full"), N // 2, KEYS)
    second = run(first.sampler, first.cache, N // 2, keys_of_draws(KEYS, N // 2)[1])
    np.testing.assert_array_equal(np.concatenate([first.tokens, second.tokens], axis=1), whole().tokens)
    assert second.sampler.history.length.tolist() == [len(row) + N for row in PROMPTS]
    rows = [[], [], []]
    options = {
        "max_new_tokens": N,
        "eos_token_ids": (),
        "block": N // 2,
        "sampler": sampler_of(range(3), **DRAW),
        "key": KEYS,
    }
    for piece in kvjax.stream(tiny_params(), read("full"), **options):
        rows = [row + new for row, new in zip(rows, piece, strict=True)]
    assert rows == whole().tokens.tolist()


def test_a_row_with_its_own_key_draws_the_same_at_another_place():
    order = [2, 0, 1]
    moved = run(sampler_of(order, **DRAW), read("full", [PROMPTS[row] for row in order]), key=KEYS[jnp.array(order)])
    np.testing.assert_array_equal(moved.tokens, whole().tokens[np.array(order)])
    logits, sampler = jnp.asarray(np.random.default_rng(0).normal(size=(3, V)), jnp.float32), Sampler(temperature=1.0)
    np.testing.assert_array_equal(sampler.draw(logits, jax.random.key_data(KEYS))[0], sampler.draw(logits, KEYS)[0])


@pytest.mark.slow
def test_a_row_with_its_own_key_is_the_row_alone():
    alone = run(sampler_of([1], **DRAW), read("full", PROMPTS[1:2]), key=KEYS[1:2])
    np.testing.assert_array_equal(alone.tokens, whole().tokens[1:2])


def test_without_a_temperature_the_largest_processed_logit_is_taken():
    """In the program of draws at a temperature of 0, beside a loop over fresh prefills."""
    options = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "no_repeat_ngram": 2, "logit_bias": {3: 1.0}}
    free = run(sampler_of(range(3), temperature=0.0, min_p=0.01), read("full"), key=KEYS).tokens.tolist()
    rows = [[*prompt, *tokens[:2]] for prompt, tokens in zip(PROMPTS, free, strict=True)]
    logits = np.asarray(read("full", rows).logits)
    want = [plain(options, PROMPTS[row], free[row][:2], logits[row]).argmax() for row in range(3)]
    assert [tokens[2] for tokens in free] == want


@pytest.mark.slow
@pytest.mark.parametrize("worth", [None, 0.5])
def test_verified_tokens_are_those_of_full(worth):
    """Drafted tokens count for the draws behind them, and rejected ones do not count at all."""
    method = kvjax.Verified(draft=SnapKV(budget=12, capacity=12, obs_window=5), depth=2, worth=worth)
    out = run(sampler_of(range(3), **DRAW), read(method), key=KEYS)
    np.testing.assert_array_equal(out.tokens, whole().tokens)
    for got, want in zip(jax.tree.leaves(out.sampler), jax.tree.leaves(whole().sampler), strict=True):
        np.testing.assert_array_equal(got, want)
    assert int(out.cache.shared.accepted.sum()) > 0


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("read", lambda: run(Sampler(repetition_penalty=1.1), read("full"))),
        ("read", lambda: run(Sampler(no_repeat_ngram=2), read("full"))),
        ("rows", lambda: run(Sampler(repetition_penalty=1.1).read([[1]]), read("full"))),
        ("vocab", lambda: run(Sampler(repetition_penalty=1.1).read([[99], [], []]), read("full"))),
        ("rows", lambda: Sampler().read([[1]]).read([[1], [2]])),
        ("state", lambda: run(Sampler(processor=at_most_twice, state=jnp.zeros(2)), read("full"))),
        ("state", lambda: Sampler(state=jnp.zeros(2))),
        ("processor", lambda: Sampler(processor=3)),
        ("processor", lambda: run(Sampler(processor=lambda logits, state, history: logits), read("full"))),
        ("processor", lambda: run(Sampler(processor=lambda logits, *rest: (logits[:, 1:], None)), read("full"))),
        ("processor", lambda: run(Sampler(processor=lambda logits, *rest: (logits, logits)), read("full"))),
        ("logit_bias", lambda: Sampler(logit_bias={-1: 1.0})),
        ("logit_bias", lambda: Sampler(logit_bias={1: "a"})),
        ("logit_bias", lambda: Sampler(logit_bias={1: np.inf})),
        ("logit_bias", lambda: Sampler(logit_bias=[1.0])),
        ("logit_bias", lambda: Sampler(logit_bias=np.array([np.nan], np.float32))),
        ("logit_bias", lambda: run(Sampler(logit_bias={61: 1.0}), read("full"))),
        ("logit_bias", lambda: run(Sampler(logit_bias=np.ones(5)), read("full"))),
        ("min_p", lambda: Sampler(min_p=0.1)),
        ("repetition_penalty", lambda: Sampler(repetition_penalty=0)),
        ("presence_penalty", lambda: run(Sampler(presence_penalty=jnp.ones(3)), read("full"))),
        ("sampler", lambda: run({"temperature": 1}, read("full"))),
        ("sampler", lambda: kvjax.generate(tiny_params(), None, sampler=Sampler(), temperature=0.0)),
        ("key", lambda: run(Sampler(temperature=1.0), read("full"), key=KEYS[:2])),
    ],
)
def test_refusals_name_the_field(name, make):
    with pytest.raises(ValueError, match=name):
        make()


@pytest.mark.parametrize("value", [np.nan, pytest.param(-np.inf, marks=pytest.mark.slow)])
def test_a_processor_must_leave_a_token(value):
    sampler = Sampler(processor=lambda logits, state, history: (jnp.full_like(logits, value), state))
    with pytest.raises(FloatingPointError, match="row 0 .*a sampler that leaves a token to draw"):
        run(sampler, read("full"), steps=2)
