"""`kvjax.answer` gives the texts of the calls that it makes; budgets may be shares of the prompt."""

import dataclasses
import importlib
import time

import jax
import numpy as np
import pytest

import kvjax
from kvjax.decoding import Sampler
from kvjax.methods import H2O, Full, PQCache, Quest, SentenceKV, SnapKV
from kvjax.protocol.fields import at_length
from kvjax.testing import TinyModel
from kvjax.wrappers import PerLayer, Stages
from tests.tiny_models import SHIPPED, write_model

pytestmark = pytest.mark.usefixtures("quick_compile")
CONTEXT, QUESTIONS = "One of the special magic numbers for blue-whale is: 4711042. " * 9, ["\nWhich?", "\nWhat is green?"]
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}<assistant>"
MODEL = TinyModel()
api_answer = importlib.import_module("kvjax.api.answer")  # `kvjax.api.answer` may be the function
METHOD = Quest(budget=kvjax.share(1 / 4), num_dense_layers=0)


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    """A tiny random model with the tokenizer that ships and a chat template."""
    directory = write_model(tmp_path_factory.mktemp("speaker"), dataclasses.replace(SHIPPED, eos_token_ids=()))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return kvjax.models.load(directory)


def by_hand(speaker, before, after, method, special, new=8):
    ids = speaker.tokenizer.encode(before + CONTEXT, add_special_tokens=special).ids
    for question in QUESTIONS:
        cache = kvjax.prefill(speaker.params, [ids], config=speaker.config, method=method, max_new_tokens=32 + new)
        asked = speaker.tokenizer.encode(question + after, add_special_tokens=False).ids
        row = np.array([asked + [7] * (32 - len(asked))])  # in the programs of `kvjax.answer`, with other padding
        cache = kvjax.extend(speaker.params, cache, row, lengths=[len(asked)])
        out = kvjax.generate(speaker.params, cache, max_new_tokens=new)
        yield speaker.tokenizer.decode(np.asarray(out.tokens[0]).tolist())


def test_answers_are_those_of_the_calls_by_hand(speaker):
    made = kvjax.answer(speaker, CONTEXT, QUESTIONS, method=METHOD, max_new_tokens=8)
    tokens = len(speaker.encode(CONTEXT)[0])
    plain = at_length(METHOD, tokens, -(-tokens // 128) * 128)
    assert made == [*by_hand(speaker, "<user>", "</><assistant>", plain, special=False)] and len(made) == 2
    assert [len(ids) for ids in made.tokens] == [8, 8] and made[0] == made.texts[0] and list(made) == made[:]
    assert float(made.stats[0].attended[0]) < tokens / 2 and repr(made.texts[0]) in repr(made)
    plain = at_length(METHOD, len(speaker.encode(CONTEXT, template=False)[0]), plain.capacity * 4)
    untold = kvjax.answer(speaker, CONTEXT, QUESTIONS, method=METHOD, max_new_tokens=8, template=False)
    assert untold == [*by_hand(speaker, "", "", plain, special=True)] != made
    one = kvjax.answer(speaker, CONTEXT, QUESTIONS[1], method=METHOD, max_new_tokens=8, logprobs=True, top_logprobs=2)
    assert one == [made[1]] and made.scored is None
    assert [scored.token for scored in one.scored[0]] == one.tokens[0] == [scored.top[0][0] for scored in one.scored[0]]


def test_the_cache_of_an_answer_is_gone_before_the_next_copy(speaker, monkeypatch):
    """And the last question gets the cache of the context itself."""
    held, sizes = [], []

    def counted(cache):
        held.append(sum(x.nbytes for x in jax.live_arrays()))
        sizes.append(sum(x.nbytes for x in jax.tree.leaves(cache)))
        return kvjax.fork(cache)

    monkeypatch.setattr("kvjax.api.answer.fork", counted)
    kvjax.answer(speaker, CONTEXT, [*QUESTIONS, QUESTIONS[0]], method=METHOD, max_new_tokens=8)
    assert len(held) == 2 and held[1] - held[0] < sizes[0] / 2


def test_the_end_of_an_answer_is_not_in_its_text(speaker):
    plain = kvjax.answer(speaker, CONTEXT, QUESTIONS[0], method=METHOD, max_new_tokens=8)
    ended = dataclasses.replace(speaker, config=dataclasses.replace(speaker.config, eos_token_ids=(plain.tokens[0][2],)))
    made = kvjax.answer(ended, CONTEXT, QUESTIONS[0], method=METHOD, max_new_tokens=8)
    stop = plain.tokens[0].index(plain.tokens[0][2]) + 1
    assert made.tokens[0] == plain.tokens[0][:stop]
    assert made[0] == speaker.tokenizer.decode(plain.tokens[0][: stop - 1])


@pytest.mark.parametrize("drawn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_answer_ends_before_a_stop_string(speaker, monkeypatch, drawn):
    """Pieces have the tokens of one call, with a temperature and penalties that count context and question, too."""
    sampler, key = (Sampler(temperature=1.0, repetition_penalty=1.5), jax.random.key(0)) if drawn else (None, None)
    options = {"method": METHOD, "max_new_tokens": 8, "sampler": sampler, "key": key}
    plain = kvjax.answer(speaker, CONTEXT, QUESTIONS[:1], **options)
    monkeypatch.setattr(api_answer, "_BLOCK", 4)
    same = kvjax.answer(speaker, CONTEXT, QUESTIONS[:1], stop="\0", **options)
    assert same == plain and same.tokens == plain.tokens
    stop = plain[0][1:3]
    made = kvjax.answer(speaker, CONTEXT, QUESTIONS[:1], stop=stop, **options)
    assert made[0] == plain[0].partition(stop)[0] and made.tokens[0] == plain.tokens[0][: len(made.tokens[0])]
    texts = [speaker.tokenizer.decode(made.tokens[0][:size]) for size in (None, -1)]
    assert [stop in text for text in texts] == [True, False]


def test_a_call_that_takes_long_says_what_it_does(speaker, monkeypatch, capsys):
    kvjax.answer(speaker, CONTEXT, QUESTIONS, method=METHOD, max_new_tokens=8)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(api_answer, "_PATIENCE", 0.0)
    monkeypatch.setattr(api_answer, "prefill", lambda *args, **more: time.sleep(0.2) or kvjax.prefill(*args, **more))
    kvjax.answer(speaker, CONTEXT, QUESTIONS, method=METHOD, max_new_tokens=8)
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith(f"kvjax.answer: reads {len(speaker.encode(CONTEXT)[0])} tokens under Quest")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"questions": []}, "questions must be a text, or a list of at least one text, got"),
        ({"questions": None}, "questions must be a text"),
        ({"questions": ["Who?", 3]}, "questions must be a text"),
        ({"questions": ""}, "questions must be a text"),
        ({"context": ""}, "context must be a text, got ''"),
        ({"model": 3}, "model must be what kvjax.models.load returns, or a name of a model, got 3"),
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"method": "qest"}, "unknown method 'qest'"),
        ({"system": "Be brief.", "template": False}, "a system message needs a chat template"),
        ({"top_logprobs": 2}, "top_logprobs=2 needs logprobs=True"),
        ({"temperature": 1.0, "key": 0}, "key must be a PRNG key such as jax.random.key"),
    ],
)
def test_what_cannot_be_asked_is_refused(given, told, speaker):
    with pytest.raises(ValueError, match=told):
        kvjax.answer(**{"model": speaker, "context": CONTEXT, "questions": QUESTIONS, **given})


# ---- budgets as shares ----------------------------------------------------------------------------------------------


def test_a_share_is_of_the_longest_prompt_and_its_room_of_the_padded_one():
    params, prompts = MODEL.random_params(0), [list(range(2, 42)), list(range(3, 13))]
    (given, plain) = (
        kvjax.prefill(params, prompts, config=MODEL, method=method, max_new_tokens=4)
        for method in (SnapKV(budget=kvjax.share(1 / 2), obs_window=4), SnapKV(budget=20, capacity=64, obs_window=4))
    )
    assert jax.tree.structure(given) == jax.tree.structure(plain)
    for one, other in zip(jax.tree.leaves(given), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_share_is_found_in_wrappers_and_texts():
    made = kvjax.make("stages(snapkv(budget=1/4), quest(budget=.125))")
    assert made == Stages(evict=SnapKV(budget=kvjax.share(0.25)), retrieve=Quest(budget=kvjax.share(1 / 8)))
    told = Stages(evict=SnapKV(budget=200, capacity=256), retrieve=Quest(budget=100, capacity=128))
    assert at_length(made, 800, 1024) == told and at_length(told, 800) is told
    layers = PerLayer(layers={0: Full()}, default=H2O(budget=kvjax.share(0.5), capacity=70))
    assert at_length(layers, 100).default == H2O(budget=50, capacity=70) and at_length(layers, 100).layers == {0: Full()}
    assert repr(kvjax.share(1 / 8)) == "share(0.125)" and "budget=share(0.125)" in repr(made)
    assert kvjax.memory_needed(made, MODEL, batch=1, prompt_slots=1024, max_new_tokens=8) == kvjax.memory_needed(
        at_length(made, 1024), MODEL, batch=1, prompt_slots=1024, max_new_tokens=8
    )


@pytest.mark.parametrize("part", [0, -1, 1.5, "1/8", None, float("nan"), True])
def test_a_part_that_is_no_share_is_refused(part):
    with pytest.raises(ValueError, match="share must be a finite number above 0 and at most 1"):
        kvjax.share(part)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda x: SnapKV(obs_window=x), "obs_window must be a whole number .*got share"),
        (lambda x: Quest(capacity=x), "capacity must be a whole number .*got share"),
        (lambda x: PQCache(fraction=x), "fraction must be a finite number .*got share"),
        (lambda x: at_length(SentenceKV(budget=x), 16), "SentenceKV: budget must"),
        (lambda x: at_length(H2O(budget=x, capacity=3), 400), "budget must be at most capacity=3"),
    ],
)
def test_a_share_is_a_budget_that_the_method_can_have(make, told):
    with pytest.raises(ValueError, match=told):
        make(kvjax.share(1 / 8))


def test_a_share_needs_a_prompt():
    params = MODEL.random_params(0)
    cache = kvjax.prefill(params, [[3, 4]], config=MODEL, method="quest", max_new_tokens=4)
    with pytest.raises(ValueError, match="give budgets in tokens, got Quest.budget=share"):
        kvjax.generate(params, cache, method=Quest(budget=kvjax.share(0.5)))
