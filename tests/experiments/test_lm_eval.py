"""The harness's model: its own RULER task end to end, and every number against a plainer way to get it."""

import dataclasses
import importlib
import inspect
import json
import pathlib
import random
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import models
from experiments.answering import LoadedModel, padded_length
from experiments.lm_eval.likelihood import likelihoods
from kvjax import registry
from kvjax.decoding.sampling import Sampler
from models import ModelConfig
from tests.tiny_models import TINY, run, vivid_params

pytest.importorskip("lm_eval", reason="the harness (lm_eval) is not installed")
pytestmark = pytest.mark.usefixtures("quick_compile")

BUILTIN = models.builtin_directory()
TOKENIZER = models.load_tokenizer(BUILTIN)
CONFIG = ModelConfig(**{**TINY, "num_layers": 1, "vocab_size": TOKENIZER.get_vocab_size()}, eos_token_ids=(0,))
TEXT = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. " * 3


@pytest.fixture(scope="module")
def tiny():
    """A small random model with the built-in tokenizer."""
    return LoadedModel("tiny", vivid_params(CONFIG), CONFIG, TOKENIZER, BUILTIN)


def make(model, *args, **kwargs):
    from experiments.lm_eval.model import KvjaxLM

    return KvjaxLM(model, *args, **{"batch_size": 2, **kwargs})


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=args, idx=0) for args in arguments]


def texts_of(lm, *prompts, **wanted):
    """What the harness gets for prompts that want the same."""
    return lm.generate_until(requests("generate_until", *((prompt, wanted) for prompt in prompts)), disable_tqdm=True)


def scores_of(lm, pairs):
    return lm._loglikelihood_tokens([(None, *pair) for pair in pairs], disable_tqdm=True)


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def dense_score(model, context, text):
    """Log-probability and greediness of ``text`` in one dense pass."""
    whole = np.zeros((1, 64), np.int32)  # padding on the right changes nothing, and one length compiles once
    whole[0, : len(context) + len(text)] = [*context, *text]
    logits = np.asarray(run(model.config, model.params, jnp.asarray(whole)), np.float64)[0]
    rows = logits[len(context) - 1 : len(context) + len(text) - 1]
    logprobs = rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) - rows.max(1, keepdims=True)
    return logprobs[np.arange(len(text)), text].sum(), (rows.argmax(1) == text).all()


def stepped_score(model, context, text, method):
    """The same through kvjax's public functions: the context's last token and the text are decode steps."""
    cache = kvjax.prefill(model.params, [context[:-1]], config=model.config, method=method, max_new_tokens=8)
    total, greedy = 0.0, True
    for token, target in zip([context[-1], *text[:-1]], text):
        cache = kvjax.decode_step(model.params, cache, jnp.asarray([token], jnp.int32))
        total += float(jax.nn.log_softmax(cache.logits[0])[target])
        greedy &= int(cache.logits[0].argmax()) == target
    return total, greedy


# Ragged contexts, one of a single token, one with three texts; texts of one and of several tokens.
PAIRS = [
    (ids(TEXT)[:40], ids(TEXT)[40:47]),
    (ids(TEXT)[3:9], ids(TEXT)[9:10]),
    (ids(TEXT)[:40], [7]),
    (ids(TEXT)[5:6], ids(TEXT)[6:10]),
    (ids(TEXT)[:40], [9, 8, 7]),
]


def greedy_text(model, context, count):
    cache = kvjax.prefill(model.params, [context], config=model.config, max_new_tokens=count)
    return kvjax.generate(model.params, cache, max_new_tokens=count, eos_token_ids=()).tokens[0].tolist()


@pytest.mark.slow
def test_scores_under_full_equal_one_dense_pass(tiny):
    pairs = [*PAIRS, (PAIRS[1][0], greedy_text(tiny, PAIRS[1][0], 3))]
    lm = make(tiny, "full")
    got = scores_of(lm, pairs)
    expected = [dense_score(tiny, *pair) for pair in pairs]
    np.testing.assert_allclose([value for value, _ in got], [value for value, _ in expected], rtol=1e-4)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in expected]
    assert got[-1][1] and not got[0][1]
    # A row has read its context and all of its text but the last token.
    assert lm.last_stats["length_tokens"] == round(np.mean([len(c) + len(t) - 1 for c, t in pairs]), 1)
    assert lm.last_stats["attended_tokens"] == lm.last_stats["length_tokens"]
    assert (lm.last_stats["requests"], lm.last_stats["tokens"]) == (len(pairs), sum(len(t) for _, t in pairs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "knobs"),
    [
        ("quest", {"budget": 8, "page_size": 4, "num_dense_layers": 0}),
        pytest.param("streamingllm", {"budget": 8}, marks=pytest.mark.thorough),
    ],
)
def test_scores_go_through_the_decode_steps_of_a_method(tiny, method, knobs):
    pairs = [pair for pair in PAIRS if len(pair[0]) > 1]
    lm = make(tiny, method, **knobs)
    got = scores_of(lm, pairs)
    expected = [stepped_score(tiny, *pair, kvjax.make(method, **knobs)) for pair in pairs]
    np.testing.assert_allclose([value for value, _ in got], [value for value, _ in expected], rtol=1e-4)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in expected]
    dense = [dense_score(tiny, *pair)[0] for pair in pairs]
    assert abs(got[0][0] - dense[0]) > 1e-2  # one dense pass, as elsewhere, would not have seen the method
    assert abs(got[2][0] - dense[2]) > 1e-2  # and neither would it with a text of a single token
    assert lm.last_stats["attended_tokens"] < lm.last_stats["length_tokens"]


def test_loglikelihoods_equal_a_dense_pass(tiny):
    lm = make(tiny)
    context, text = "The sky is blue.", " The sun is yellow."
    got = lm.loglikelihood(requests("loglikelihood", (context, text), ("", text)), disable_tqdm=True)
    whole, start = ids(context + text), len(ids(context))
    assert got[0][0] == pytest.approx(dense_score(tiny, whole[:start], whole[start:])[0], rel=1e-4)
    assert got[1][0] == pytest.approx(dense_score(tiny, [0], ids(text))[0], rel=1e-4)  # the end-of-text token precedes


def test_rolling_predicts_every_token_once(tiny):
    tokens = ids(TEXT)[:21]
    text = TOKENIZER.decode(tokens)
    assert ids(text) == tokens
    lm = make(tiny, max_length=16)
    got = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (text,), ("",)), disable_tqdm=True)
    first = dense_score(tiny, [0], tokens[:16])[0]
    second = dense_score(tiny, tokens[4:16], tokens[16:])[0]  # 16 tokens in front of the last one predicted
    assert got == [pytest.approx(first + second, rel=1e-4), 0]


@pytest.mark.slow
def test_long_contexts_lose_their_beginning(tiny, caplog):
    context, text = ids(TEXT)[:30], ids(TEXT)[30:34]
    got = scores_of(make(tiny, max_length=16), [(context, text)])
    assert got[0][0] == pytest.approx(dense_score(tiny, context[-13:], text)[0], rel=1e-4)
    lm = make(tiny, max_length=16)
    long, short = texts_of(lm, TEXT, TOKENIZER.decode(ids(TEXT)[-12:]), until=[], max_gen_toks=4)
    assert long == short and lm.last_stats["truncated"] == 1
    assert "1 of 2 requests lost their beginning to make room for the answer in max_length=16" in caplog.text


NEW = 40  # tokens generated by most tests, so that they share programs: a block of 32 and one of 8


def generated(model, prompt, method="full"):
    cache = kvjax.prefill(model.params, [prompt], config=model.config, method=method, max_new_tokens=NEW)
    out = kvjax.generate(model.params, cache, max_new_tokens=NEW)
    return out.rows()[0], out.stats


@pytest.mark.slow
def test_generates_what_each_prompt_alone_generates(tiny):
    method = kvjax.make("quest", budget=8, page_size=4, num_dense_layers=0)
    prompts = [TEXT[:150], TEXT[20:60], TEXT[40:130]]
    lm = make(tiny, method)
    # A stopping text that never comes has generation proceed in blocks.
    got = texts_of(lm, *prompts, until=["\x00"], max_gen_toks=NEW, do_sample=False)
    alone = [generated(tiny, ids(prompt), method) for prompt in prompts]
    assert got == [TOKENIZER.decode([token for token in tokens if token]) for tokens, _ in alone]
    assert lm.last_stats["tokens"] == sum(len(tokens) for tokens, _ in alone)
    mean = np.mean([float(stats.attended[0]) for _, stats in alone])
    assert lm.last_stats["attended_tokens"] == pytest.approx(mean, abs=0.06)


@pytest.mark.slow
def test_accounting_of_a_row_ends_with_it(tiny):
    """A stopping text is looked for every 32 tokens: the first row ends there, the second at its limit of 40."""
    prompts = [TEXT[:100], TEXT[20:60]]
    texts = [TOKENIZER.decode(generated(tiny, ids(prompt))[0]) for prompt in prompts]
    stop = next(texts[0][at : at + 4] for at in range(20, 60) if texts[0][at : at + 4] not in texts[1])
    lm = make(tiny)
    got = texts_of(lm, *prompts, until=[stop], max_gen_toks=NEW)
    assert got == [texts[0].partition(stop)[0], texts[1]]
    assert lm.last_stats["length_tokens"] == (len(ids(prompts[0])) + 32 + len(ids(prompts[1])) + 40) / 2


@pytest.mark.slow
def test_stopping_texts_and_special_tokens(tiny):
    prompt = TEXT[:100]
    tokens, _ = generated(tiny, ids(prompt))
    whole = TOKENIZER.decode(tokens)
    middle = TOKENIZER.decode(tokens[5:6])
    lm = make(tiny)
    assert texts_of(lm, prompt, until=[], max_gen_toks=NEW) == [whole]
    assert texts_of(lm, prompt, until=middle, max_gen_toks=NEW) == [whole[: whole.index(middle)]]
    assert texts_of(lm, "", until=None, max_gen_toks=5)
    assert texts_of(lm, prompt, max_gen_toks=5) == [TOKENIZER.decode(tokens[:5])]
    # "<|pad|>" is a special token that decoded text does not show: it ends a row as an end-of-text token does.
    assert lm._special(["\n", "<|pad|>"]) == [1]


def test_stopping_texts_wait_for_the_end_of_thinking(tiny):
    """The stopping text stands among the first 32 tokens, after which the model would be stopped if it were not thinking."""
    prompt = TEXT[:100]
    tokens, _ = generated(tiny, ids(prompt))
    whole, stop, end = (TOKENIZER.decode(part) for part in (tokens, tokens[4:6], tokens[34:36]))
    assert stop in whole.partition(end)[0] and stop not in whole.partition(end)[2]
    wanted = {"until": [stop], "max_gen_toks": NEW}
    assert texts_of(make(tiny, think_end_token=end), prompt, **wanted) == [whole.split(end)[-1].lstrip()]
    assert texts_of(make(tiny), prompt, **wanted) == [whole.partition(stop)[0]]


@pytest.mark.slow
def test_sampling_repeats_with_its_seed(tiny):
    wanted = {"until": [], "max_gen_toks": NEW, "do_sample": True, "temperature": 1.0, "top_k": 50}
    lms = [make(tiny, sampling_seed=seed) for seed in (0, 0, 1)]
    first, again, other = [[texts_of(lm, TEXT[:80], **wanted)[0] for _ in range(2)] for lm in lms]
    assert first == again and first != other
    assert first[0] != first[1]  # repeats of a task are draws of their own


@pytest.mark.slow
def test_no_sequence_comes_twice_where_a_task_wants_that(tiny):
    lm = make(tiny)
    wanted = {"until": [], "max_gen_toks": NEW, "temperature": 0.0, "top_p": 0.9, "no_repeat_ngram_size": 1}
    prompt = [lm.tok_encode(TEXT[:80])]
    cache = kvjax.prefill(tiny.params, prompt, config=tiny.config, max_new_tokens=NEW)
    out = kvjax.generate(tiny.params, cache, max_new_tokens=NEW, sampler=Sampler(no_repeat_ngram=1).read(prompt))
    assert len({*out.rows()[0]}) == NEW
    assert texts_of(lm, TEXT[:80], **wanted) == [tiny.tokenizer.decode(out.rows()[0]).strip()]


def test_chat_templates_are_rendered(tiny, tmp_path):
    shutil.copy(BUILTIN / "tokenizer.json", tmp_path)
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% if enable_thinking %}hm{% endif %}{% endif %}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    lm = make(tiny, tokenizer=tmp_path, enable_thinking=True)
    user = {"role": "user", "content": "Hi"}
    assert lm.apply_chat_template([user]) == "<user>Hi</><assistant>hm"
    opened = lm.apply_chat_template([user, {"role": "assistant", "content": "It is"}], add_generation_prompt=False)
    assert opened == "<user>Hi</><assistant>It is"
    assert lm.chat_template(True) == template and lm.chat_template(False) is None
    assert lm.tokenizer_name.endswith(models.ChatTemplate(template).identity)
    with pytest.raises(ValueError, match="no chat template"):
        make(tiny).apply_chat_template([user])


def test_wrong_settings_and_requests_are_refused(tiny):
    for settings, problem in (
        ({"method": "qest"}, "did you mean 'quest'"),
        ({"method": "quest", "bugdet": 3}, "no knob 'bugdet'"),
        ({"method": kvjax.methods.Full(), "budget": 3}, "knobs belong to a method given by name"),
        ({"batch_size": "auto"}, "whole number of rows, at least 1, got 'auto'"),
        ({"max_length": 129}, "between 2 and the model's 128 positions, got 129"),
    ):
        with pytest.raises(ValueError, match=problem):
            make(tiny, **settings)
    for wanted, problem in (
        ({"num_beams": 4}, "got num_beams=4"),
        ({"penalty_alpha": 2.0}, "no_repeat_ngram_size, got penalty_alpha"),
        ({"max_gen_toks": 128}, "below max_length=128, got 128"),
    ):
        with pytest.raises(ValueError, match=problem):
            texts_of(make(tiny), "Hi", **wanted)


def test_a_request_that_cannot_be_scored_is_named_and_the_others_are_scored(tiny, caplog):
    lm = make(tiny, max_length=16)
    scorable = [(("c", " a"), [1, 2], [3]), (("c", " b"), [4], [5, 6])]
    beyond = tiny.config.vocab_size
    others = [(("c", " long"), [1], [2] * 17), (("c", ""), [1], []), (("", "x"), [], [1]), (None, [1], [beyond])]
    want = lm._loglikelihood_tokens(scorable, disable_tqdm=True)
    assert not caplog.records
    got = lm._loglikelihood_tokens([scorable[0], *others, scorable[1]], disable_tqdm=True)
    assert got == [want[0], *[(-np.inf, False)] * 4, want[1]]
    said = [record.getMessage() for record in caplog.records]
    assert "request 2 of 6, ('c', ' long'), cannot be scored" in said[0] and "tokens, got 17" in said[0]
    assert ["got 0" in line for line in said] == [False, True, True, False] and f"got {beyond}" in said[3]
    assert lm._loglikelihood_tokens(others, disable_tqdm=True) == [(-np.inf, False)] * 4


def test_texts_beyond_their_limits_are_refused(tiny):
    model = {"params": tiny.params, "config": tiny.config, "method": "full", "length": 8, "room": 8}
    with pytest.raises(ValueError, match="every context must have 1 to 8 tokens, got 0 to 0"):
        likelihoods(contexts=[[]], texts=[[[1]]], **model)
    with pytest.raises(ValueError, match="every text must have 1 to 8 tokens, got 9 to 9"):
        likelihoods(contexts=[[1]], texts=[[[1] * 9]], **model)
    factors = {"short_factor": (1.0,) * 8, "long_factor": (2.0,) * 8, "original_max_position_embeddings": 8, "factor": 1.0}
    long = dataclasses.replace(tiny.config, rope_scaling=models.LongRopeScaling(**factors))
    with pytest.raises(ValueError, match="original_max_position_embeddings=8"):  # of transformers' -33.4 it was -38.2
        likelihoods(contexts=[[1] * 6], texts=[[[1] * 4]], **{**model, "config": long})


def test_padded_lengths_are_few_and_close():
    lengths = [padded_length(tokens) for tokens in range(1, 8193)]
    assert all(tokens <= length for tokens, length in enumerate(lengths, 1))
    assert len(set(lengths)) == 8 + 3 * 4  # 128 to 1024 in steps of 128, then four per doubling
    assert [padded_length(tokens) for tokens in (1, 128, 129, 1025, 5000, 8192)] == [128, 128, 256, 1280, 5120, 8192]


def test_names_for_the_command_line():
    from lm_eval.api.registry import get_model

    from experiments.lm_eval.model import KvjaxLM, register

    register()
    register()  # twice is once
    assert get_model("kvjax") is KvjaxLM
    extra = {"batch_size": 4, "max_batch_size": None, "device": "cuda:0"}
    lm = KvjaxLM.create_from_arg_string("model=builtin,method=quest,budget=64,page_size=8", extra)
    assert (lm.method.budget, lm.method.page_size, lm.batch_size, lm.max_length) == (64, 8, 4, 32768)
    own = set(inspect.signature(KvjaxLM.__init__).parameters)
    for name, cls in registry.classes().items():
        assert not own & {knob.name for knob in registry.knobs(cls)}, name


def test_missing_harness_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "experiments.lm_eval.model", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ModuleNotFoundError, match=r"kvjax\[lm-eval\]"):
        importlib.import_module("experiments.lm_eval.model")


@pytest.fixture(scope="module")
def ruler(tmp_path_factory):
    """The harness's own niah_single_1 at 512 tokens; its module would download NLTK's data, which this task does not use."""
    nltk = pytest.importorskip("nltk", reason="the harness's RULER tasks need nltk")
    wonderwords = pytest.importorskip("wonderwords", reason="the harness's RULER tasks need wonderwords")
    pytest.importorskip("transformers", reason="the harness's RULER tasks need transformers' tokenizers")
    import lm_eval.tasks

    data = tmp_path_factory.mktemp("nltk")
    (data / "tokenizers" / "punkt_tab").mkdir(parents=True)
    nltk.data.path.append(str(data))
    folder = pathlib.Path(lm_eval.tasks.__file__).parent / "ruler"
    metadata = {"tokenizer": str(BUILTIN), "max_seq_lengths": [512]}
    manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)

    class FewWords(wonderwords.RandomWord):
        """Of all its words the harness would sort millions of pairs."""

        def __init__(self):
            super().__init__()
            self._categories = {category: words[:100] for category, words in self._categories.items()}

    random.seed(0)  # the harness draws prompts from Python's generator when it loads a task
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wonderwords, "RandomWord", FewWords)
        task = manager.load(["niah_single_1"])["tasks"]["niah_single_1"]
    yield manager, task
    nltk.data.path.remove(str(data))


@pytest.fixture(scope="module")
def builtin():
    return make("builtin").model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "knobs", "found"),
    [
        ("full", {}, 3),
        pytest.param("quest", {"budget": 128}, 3, marks=pytest.mark.thorough),
        pytest.param("streamingllm", {"budget": 64}, 0, marks=pytest.mark.thorough),
    ],
)
def test_the_harness_finds_needles_under_full_and_quest(ruler, builtin, method, knobs, found):
    """Full and Quest find every needle; none of the three stands in StreamingLLM's window of 64 tokens."""
    import lm_eval

    manager, task = ruler
    lm = make(builtin, method, batch_size=3, **knobs)
    results = lm_eval.simple_evaluate(
        model=lm, tasks=[task], limit=3, task_manager=manager, bootstrap_iters=0, gen_kwargs={"max_gen_toks": 24}
    )
    assert results["results"]["niah_single_1"]["512,none"] == found / 3
    assert results["config"]["method"].lower() == method
    stats = lm.last_stats
    assert stats["requests"] == 3
    if method == "full":
        assert stats["bytes_read_per_step"] == stats["full_bytes_read_per_step"]
    else:
        assert stats["bytes_read_per_step"] < 0.6 * stats["full_bytes_read_per_step"]
