"""Models of other packages: under Full they draw the tokens that their own decoding draws. nnx always runs."""

import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.protocol.typing import layered
from models.foreign.bonsai import qwen3
from models.foreign.gemma import GemmaModel
from models.foreign.nnx import NNXModel

PROMPTS = np.random.default_rng(0).integers(3, 61, (2, 9)).astype(np.int32)
NEW = 12
STREAM = kvjax.methods.StreamingLLM(budget=8)


@pytest.fixture(autouse=True)
def numerics():
    """Of other people's code, which promotes dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def package(name, command):
    """The module ``name``, or else a skipped test."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name.partition('.')[0]} is not installed: {command}, see docs/other_models.md")
    return importlib.import_module(name)


def decoded(model, params, method, prompts=PROMPTS, new=NEW):
    cache = kvjax.prefill(params, prompts, config=model, method=method, max_new_tokens=new)
    return kvjax.generate(params, cache, max_new_tokens=new, eos_token_ids=())


def check_tokens(model, params, own):
    """Full draws the tokens ``own``, behind chunks of the prompt and an `extend` too."""
    assert len({*own.ravel()}) > 5, "the tokens must differ, or nothing is shown"
    sizes = {"config": model, "method": "full", "max_new_tokens": NEW + 5, "chunk_size": 3}
    for order in ("chunks", *["layers"] * (layered(model) is not None)):
        cache = kvjax.prefill(params, PROMPTS[:, :4], order=order, **sizes)
        cache = kvjax.extend(params, cache, PROMPTS[:, 4:])
        np.testing.assert_array_equal(kvjax.generate(params, cache, max_new_tokens=NEW, eos_token_ids=()).tokens, own)


def check_more(model, params, own):
    """A row beside a shorter one draws the same, `Verified` and a prompt that is read again too; an eviction runs."""
    ragged = [PROMPTS[0], PROMPTS[1, :5]]
    np.testing.assert_array_equal(decoded(model, params, "full", ragged).tokens[0], own[0])
    np.testing.assert_array_equal(decoded(model, params, kvjax.Verified(draft=STREAM, depth=3)).tokens, own)
    whole = kvjax.methods.KVzip(budget=16, chunk=4)  # here it keeps all of the prompt
    np.testing.assert_array_equal(decoded(model, params, whole).tokens, own)
    assert decoded(model, params, kvjax.methods.SnapKV(budget=6, obs_window=2)).tokens.shape == own.shape


@functools.cache
def page():
    """What the page's block about nnx makes: its ``Decoder``, and the description and parameters of one."""
    scope: dict = {}
    text = (pathlib.Path(__file__).parents[2] / "docs" / "other_models.md").read_text(encoding="utf-8")
    (block,) = (x for x in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class Decoder" in x)
    exec(compile(block, "other_models.md", "exec"), scope)
    return scope


def own_tokens(module, prompts, new):
    """The greedy tokens of nnx's own cache, which takes a token at a time and holds a fixed number."""
    for _, part in nnx.iter_graph(module):
        if isinstance(part, nnx.MultiHeadAttention):
            part.decode = True
            part.init_cache((len(prompts), prompts.shape[1] + new, 32))
    step, drawn = nnx.jit(lambda module, token, at: module(token, at)[:, 0].argmax(-1)), []
    for at in range(prompts.shape[1] + new - 1):
        token = prompts[:, at] if at < prompts.shape[1] else drawn[-1]
        following = step(module, jnp.asarray(token)[:, None], jnp.full((len(prompts), 1), at))
        drawn += [following] if at >= prompts.shape[1] - 1 else []
    return np.stack(drawn, axis=1)


def test_nnx():
    own = own_tokens(page()["Decoder"](nnx.Rngs(1)), PROMPTS, NEW)
    check_tokens(page()["model"], page()["params"], own)


@pytest.mark.slow
def test_nnx_under_more():
    own = own_tokens(page()["Decoder"](nnx.Rngs(1)), PROMPTS, NEW)
    check_more(page()["model"], page()["params"], own)
    without_head = dataclasses.replace(page()["model"], head=None)
    np.testing.assert_array_equal(decoded(without_head, page()["params"], "full").tokens, own)


def test_nnx_refuses_what_it_cannot_run():
    module = page()["Decoder"](nnx.Rngs(1))
    sizes = {"run": type(module).__call__, "vocab_size": 61, "max_position_embeddings": 40}
    with pytest.raises(ValueError, match="attention"):
        NNXModel.of(module, attention=nnx.GRUCell, **sizes)
    model, params = NNXModel.of(module, num_layers=3, **sizes)
    with pytest.raises(ValueError, match="num_layers"):
        decoded(model, params, "full")
    model, params = NNXModel.of(module, num_layers=1, **sizes)
    with pytest.raises(ValueError, match="num_layers"):
        decoded(model, params, "full")
    model, params = NNXModel.of(module, **sizes)
    with pytest.raises(ValueError, match="max_position_embeddings"):  # renumbered positions are not the model's own
        decoded(model, params, STREAM, new=40)
    with pytest.raises(ValueError, match=r"max_new_tokens$"):  # no other method has more positions
        decoded(model, params, "full", new=40)


@functools.cache
def gemma_case():
    """A small Gemma with windows and caps, its parameters, and `own(prompts, new, length)`: its sampler's tokens, state."""
    gm = package("gemma.gm", "pip install gemma==4.0.1")
    sizes = importlib.import_module("gemma.gm.nn.config")
    near, far = sizes.AttentionType.LOCAL_SLIDING, sizes.AttentionType.GLOBAL
    config = sizes.TransformerConfig(
        num_embed=64, embed_dim=32, hidden_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, final_logit_softcap=30.0,
        attn_logits_soft_cap=50.0, attention_types=(near, far, near), sliding_window_size=6, use_qk_norm=True,
        use_post_attn_norm=True, use_post_ffw_norm=True, local_base_frequency=100, global_base_frequency=1000,
        global_scale_factor=8.0,
    )  # fmt: skip
    transformer = gm.testing.DummyGemma(config=config, dtype=jnp.float32)
    drawn = transformer.init(jax.random.key(2), jnp.zeros((5,), jnp.int32))["params"]
    louder = jax.tree.map(lambda x: x * 30 if x.ndim > 1 else x, drawn)  # or each token would be the one before
    params = {**louder, "embedder": drawn["embedder"]}

    def own(prompts, new, length=64):
        """Without end tokens, which random weights would draw."""
        sampler = gm.text.Sampler(
            model=transformer, params=params, tokenizer=gm.testing.DummyTokenizer(), cache_length=length, max_out_length=64,
            pad_length=None,
        )  # fmt: skip
        endless = dataclasses.replace(sampler._initialize_sampler_loop(gm.text.Greedy()), end_tokens=(-1,))
        object.__setattr__(sampler, "_initialize_sampler_loop", lambda *args: endless)
        object.__setattr__(sampler, "_tokenize_prompts", lambda *args, **kwargs: jnp.asarray(prompts))
        object.__setattr__(sampler, "_decode_state", lambda state, **kwargs: state)
        state = sampler.sample(["x"] * len(prompts), max_new_tokens=new)
        return np.asarray(state.predicted_tokens), state

    return GemmaModel(transformer, max_position_embeddings=128, dtype="float32"), params, own


def test_gemma():
    model, params, own = gemma_case()
    tokens = own(PROMPTS, NEW)[0][:, :NEW]
    check_tokens(model, params, tokens)
    check_more(model, params, tokens)
    with pytest.raises(ValueError, match="dtype"):
        decoded(dataclasses.replace(model, dtype="bfloat16"), params, "full")


def test_the_gemma_of_the_page_is_described():
    gm = package("gemma.gm", "pip install gemma==4.0.1")
    text = (pathlib.Path(__file__).parents[2] / "docs" / "other_models.md").read_text(encoding="utf-8")
    (made,) = re.findall(r"^transformer = ([^#\n]+)", text, re.MULTILINE)
    model = GemmaModel(eval(made, {"gm": gm}))
    assert len(model.windows) == model.num_layers == model.config.num_layers and {*model.windows} == {512, None}


def test_gemma_goes_on_where_its_sampler_stops():
    """The sampler ends at cache_length tokens, prompt and answer together; with StreamingLLM or SnapKV a row goes on."""
    model, params, own = gemma_case()
    tokens, state = own(PROMPTS, 50, length=24)
    stopped = int(state.step)
    assert stopped < 50 and not state.done.any()
    for method in (STREAM, kvjax.methods.SnapKV(budget=8, obs_window=2)):
        assert (decoded(model, params, method, new=50).num_tokens == 50).all(), method
    np.testing.assert_array_equal(decoded(model, params, "full", new=50).tokens[:, :stopped], tokens[:, :stopped])
    np.testing.assert_array_equal(decoded(model, params, "full", new=50).tokens, own(PROMPTS, 50)[0][:, :50])


def test_bonsai():
    modeling = package("bonsai.models.qwen3.modeling", "a checkout of jax-ml/bonsai on the path")
    config = modeling.ModelConfig(
        num_layers=2, vocab_size=64, emb_dim=32, mlp_dim=64, num_heads=4, head_dim=16, num_kv_heads=2, rope_theta=1_000_000,
        rope_scaling_factor=8.0, local_rope_theta=1e4, norm_eps=1e-6, tie_word_embeddings=False,
    )  # fmt: skip
    module = modeling.Qwen3(config, rngs=nnx.Rngs(0))
    cache = modeling.init_cache(config, len(PROMPTS), PROMPTS.shape[1], NEW, jnp.float32)
    logits, cache = modeling.forward(module, cache, jnp.asarray(PROMPTS), 0)
    own = [logits.argmax(-1)]
    while len(own) < NEW:
        logits, cache = modeling.forward(module, cache, own[-1][:, None], 0)
        own.append(logits.argmax(-1))
    own = np.stack(own, axis=1)
    check_tokens(*qwen3(module), own)
    check_more(*qwen3(module), own)
