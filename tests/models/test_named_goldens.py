"""The named models against transformers: token ids, chat prompts, weights and answers; Qwen's logits at 1,024 tokens.

Token ids and prompts are compared everywhere, by a small part of the tokenizer that gives the same ids. The whole models are
compared on machines that have them.
"""

import hashlib
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import kvjax
import models
from models.hub.named_models import NAMED_MODELS
from tests.models import gguf_writing
from tests.models.test_gguf import digest, tensors_of
from tests.models.test_parity import GOLDENS
from tests.tiny_models import run

GOLDEN = json.loads((GOLDENS / "gguf" / "qwen.json").read_text(encoding="utf-8"))
NAMES = sorted(GOLDEN["models"])
CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
TOLERANCE = 1e-4  # of the largest logit, about 30; float32 in another order of sums
SEED = 20261126  # of the vector of signs in the maker (`tests/goldens`)


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


def cached(name):
    """The directory of a model that is on this machine."""
    try:
        return models.checkpoint_directory(name, offline=True)
    except FileNotFoundError:
        pytest.skip(f"{name} is not in the cache of this machine (kvjax fetch {name})")


@pytest.fixture(scope="module")
def directory(name):
    return cached(name)


def assert_ids(tokenizer, real=None):
    """Encode all texts; ``real`` maps the tokenizer's ids to ids of the whole vocabulary."""
    assert len(GOLDEN["texts"]) == len(GOLDEN["ids"]) == 300
    for text, expected in zip(GOLDEN["texts"], GOLDEN["ids"], strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert [real[token] for token in ids] == expected if real else ids == expected, text
        assert tokenizer.encode(text).ids == ids, "nothing is put around a text"


def assert_prompts(chat, name):
    for (messages, options), prompt in zip(GOLDEN["conversations"], GOLDEN["models"][name]["prompts"], strict=True):
        assert chat.render(messages, **options) == prompt


def test_the_goldens_are_of_the_named_files(name):
    assert GOLDEN["models"][name]["sha256"] == NAMED_MODELS[name].file.sha256
    assert len(GOLDEN["models"][name]["tokens"]) == 1024 and len(GOLDEN["models"][name]["positions"]) == 32


def test_token_ids_of_300_texts_equal_transformers(tmp_path):
    """A GGUF file with the part of Qwen's tokenizer that these texts need, marked as llama.cpp marks it."""
    tokens = GOLDEN["tokens"]
    kinds = [
        CONTROL if token.startswith("<|") and token.endswith("|>") else USER_DEFINED if "tool_call>" in token else 1
        for token in tokens
    ]
    assert (kinds.count(CONTROL), kinds.count(USER_DEFINED)) == (20, 2)
    keys = gguf_writing.tokenizer_metadata(tokens, GOLDEN["merges"], "qwen2", kinds)
    path = tmp_path / "qwen.gguf"
    gguf_writing.write(path, {"general.architecture": "qwen2", **keys}, {"a": np.zeros(1, np.float32)})
    assert_ids(models.load_tokenizer(path), GOLDEN["real"])


def test_chat_prompts_equal_transformers(name):
    """Also Qwen's own system message, which its template adds, and tools."""
    pytest.importorskip("transformers", reason="transformers renders templates")
    assert_prompts(models.ChatTemplate(GOLDEN["models"][name]["template"]), name)
    assert GOLDEN["models"][name]["prompts"][0].startswith("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud.")


def test_the_whole_tokenizer_equals_transformers(name, directory):
    config = models.ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    assert not config.tie_word_embeddings, "the file has a more precise output.weight beside token_embd.weight"
    assert not GOLDEN["models"][name]["tied"] and config.eos_token_ids == (151645, 151643)
    assert_ids(models.load_tokenizer(directory, config))
    chat = models.ChatTemplate.from_directory(directory)
    assert chat.template == GOLDEN["models"][name]["template"]
    assert_prompts(chat, name)


@pytest.mark.thorough  # it reads 5 GB
def test_the_converted_weights_equal_transformers(name, directory):
    """Every tensor in every bit: what transformers reads from the GGUF file, rounded to bfloat16."""
    with safe_open(directory / "model.safetensors", framework="numpy") as opened:
        names = sorted(opened.keys())
        sums = [hashlib.sha256(opened.get_tensor(tensor).tobytes()).hexdigest()[:8] for tensor in names]
    expected = dict(zip(names, GOLDEN["models"][name]["sums"].split(" "), strict=True))
    assert dict(zip(names, sums, strict=True)) == expected


@pytest.mark.thorough  # it compiles 28 layers, and needs 9 GB
def test_logits_at_1024_tokens_equal_transformers(name, directory):
    golden = GOLDEN["models"][name]
    params, config = models.from_pretrained(directory, "float32")
    tokens = jnp.asarray([golden["tokens"]], jnp.int32)
    logits = np.asarray(run(config, params, tokens)[0, np.array(golden["positions"])], np.float64)
    expected = np.array(golden["logits"])
    tolerance = TOLERANCE * np.abs(expected).max()
    found = np.take_along_axis(logits, np.array(golden["best"]), axis=1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
    smallest = np.sort(logits, axis=1)[:, -expected.shape[1]]
    np.testing.assert_allclose(smallest, expected[:, -1], rtol=0, atol=tolerance, err_msg="another token is among the best")
    largest = logits.max(axis=1)
    total = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    signs = np.random.RandomState(SEED).randint(0, 2, logits.shape[1]) * 2.0 - 1.0
    moments = np.stack([logits.mean(axis=1), logits.std(axis=1), total, logits @ signs / len(signs)], axis=1)
    np.testing.assert_allclose(moments, golden["moments"], rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def smollm2():
    """The golden, the directory, parameters, config and tokenizer of SmolLM2-135M-Instruct."""
    directory = cached("smollm2")
    params, config = models.from_pretrained(directory, "float32")
    expected = json.loads((GOLDENS / "gguf" / "smollm2.json").read_text(encoding="utf-8"))
    return expected, directory, params, config, models.load_tokenizer(directory, config)


def test_smollm2_equals_transformers(smollm2):
    """Weights, token ids and a prompt."""
    expected, directory, params, config, tokenizer = smollm2
    assert {name: digest(tensor) for name, tensor in tensors_of(params, config)} == expected["sums"]
    for text, ids in zip(expected["texts"], expected["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
    chat = models.ChatTemplate.from_directory(directory)
    assert chat.render([{"role": "user", "content": "What is the capital of France?"}]) == expected["prompt"]


@pytest.mark.thorough  # it compiles 30 layers
def test_smollm2_answers_as_in_transformers(smollm2):
    expected, _, params, config, tokenizer = smollm2
    ids = tokenizer.encode(expected["prompt"], add_special_tokens=False).ids
    logits = np.asarray(run(config, params, jnp.asarray([ids], jnp.int32)))[0, -1]
    np.testing.assert_allclose(logits[expected["best"]], expected["logits"], rtol=0, atol=1e-3)
    cache = kvjax.prefill(params, [ids], config=config, method="full", max_new_tokens=12)
    out = kvjax.generate(params, cache, max_new_tokens=12)
    answer = out.tokens[0].tolist()[: len(expected["greedy"])]
    assert answer == expected["greedy"] and "Paris" in tokenizer.decode(answer)
