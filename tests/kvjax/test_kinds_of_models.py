"""Models whose layers are not all alike, or attend otherwise: each is its definition, and every method holds its laws there.

The definition is one dense pass with one softmax per query (`tests.tiny_models.dense_attend`); golden outputs of transformers
are in `tests/models/test_families.py`. What is special to a kind has tests of its own: windows in `decoding/`, recurrent
layers in `decoding/`, ropes in test_layer_ropes.py, soft caps and sinks in test_attention_parts.py, latent attention in
`tests/models/test_latent.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.exact import FromJudge
from kvjax.testing import MODEL_LAWS, laws
from kvjax.testing.subject import QUESTIONS, STEPS, Subject
from models import LinearLayers, ModelConfig
from models.sizes.parts import LayerRope
from tests import tiny_models
from tests.harness import ALL, TINY, TRACES, any_example, example, generous, prompts, small, tiny_params
from tests.models.test_families import edges
from tests.models.test_latent import CONFIG as LATENT

pytestmark = pytest.mark.usefixtures("quick_compile")

LINEAR = LinearLayers(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6, conv_width=4, layers=(0,))
WIDE = tiny_models.FAMILIES["qwen2"]
CAPPED = {"attention_sinks": True, "attention_softcap": 0.7}
KINDS = {
    "window": dataclasses.replace(TINY, windows=(6, None)),  # the second layer is the method's
    # The first layer rotates no channel. The second rotates half of them, with a base of its own.
    "ropes": dataclasses.replace(TINY, ropes=(LayerRope(theta=100.0, rotated=0), LayerRope(theta=100.0, rotated=4))),
    "recurrent": dataclasses.replace(TINY, linear=LINEAR, output_gate=True, rms_norm_eps=1e-2),
    "sinks": dataclasses.replace(WIDE, attention_sinks=True, out_bias=True, num_layers=1),
    "cap": dataclasses.replace(WIDE, attention_softcap=0.7, num_layers=1),
    "window, capped": dataclasses.replace(WIDE, **CAPPED, windows=(7, None)),
    "recurrent, capped": dataclasses.replace(WIDE, **CAPPED, linear=LINEAR),
    "latent": LATENT,
    **{x: ModelConfig.from_hf(edges(x, vocab_size=64, max_position_embeddings=256)) for x in ("glm4_moe", "minimax_m2")},
}
SIZES = {  # windows that prompts are shorter than, as long as, and longer than
    f"windows {windows}": dataclasses.replace(TINY, windows=windows)
    for windows in ((6, 17), (None, 17), (1, 40), (45, None), (100, 64))
}
CAPS = ("sinks", "cap", "window, capped", "recurrent, capped")
CHOICE = ("full", "snapkv", "quest", "pariskv", "tokenselect", "chess", "verified")
# A choice for speed; all others run under --thorough.
DEFINED = {("recurrent",)}
LAWFUL = {("recurrent", "quest")}
SLOW = {("window, capped",), ("latent",), ("latent", "quest"), ("sinks", "quest")}
PAIRS = [(kind, name) for kind in KINDS for name in CHOICE]


def chosen(cases, always=(), slow=SLOW):
    """Parameters of a test; those in ``always`` run by default, those in ``slow`` as slow tests, all others thoroughly."""
    marks = {True: [pytest.mark.slow], False: [pytest.mark.thorough]}
    return [pytest.param(*case, marks=[] if case in always else marks[case in slow]) for case in cases]


def everything(kind, name):
    """`generous`, for the heads of `WIDE`, which are twice as wide."""
    return dataclasses.replace(generous(name), rank=32) if name == "shadowkv" and kind in CAPS else generous(name)


@functools.cache
def params(kind):
    """Parameters with which attention is not flat, states change with every token, and sinks matter beside tens of tokens."""
    config = {**KINDS, **SIZES}[kind]
    if kind in ("window", "ropes", *SIZES):
        return tiny_params()
    drawn = tiny_models.vivid_params(config, seed=5)
    if kind == "recurrent":
        return jax.tree.map(lambda x: x * 1.5 if x.ndim > 1 else x, drawn)
    return jax.tree.map_with_path(lambda path, x: x + 4 if jax.tree_util.DictKey("sinks") in path else x, drawn)


@functools.cache
def subject(kind, name):
    return Subject(
        any_example(name), {**KINDS, **SIZES}[kind], params(kind), full=None if name == "full" else subject(kind, "full"),
        everything=everything(kind, name), prompts=prompts(), traces=TRACES,
    )  # fmt: skip


def defined(kind, rows):
    """The logits after the last token of each row, by the definition."""
    tokens = np.zeros((len(rows), 64), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    logits = tiny_models.run({**KINDS, **SIZES}[kind], params(kind), jnp.asarray(tokens))
    return np.asarray(logits)[np.arange(len(rows)), [len(row) - 1 for row in rows]]


def check_definition(kind, **options):
    """After prompts, after several tokens at once, and after steps."""
    cache, rows = subject(kind, "full").read(**options), [list(row) for row in prompts()]
    np.testing.assert_allclose(cache.logits, defined(kind, rows), atol=2e-4, rtol=0)
    cache = subject(kind, "full").ask(cache)
    rows = [row + list(more) for row, more in zip(rows, QUESTIONS, strict=True)]
    np.testing.assert_allclose(cache.logits, defined(kind, rows), atol=2e-4, rtol=0)
    out = subject(kind, "full").go_on(cache)
    rows = [row + new for row, new in zip(rows, np.asarray(out.tokens).tolist(), strict=True)]
    np.testing.assert_allclose(out.cache.logits, defined(kind, rows), atol=2e-4, rtol=0)
    assert len(set(np.asarray(out.tokens).ravel().tolist())) > 2, "a model that repeats itself shows little"
    assert out.stats.is_no_op.all()


@pytest.mark.parametrize("kind", chosen(zip(KINDS), DEFINED))
def test_full_is_the_definition(kind):
    check_definition(kind)


@pytest.mark.parametrize("chunk_size", [16, 5])
@pytest.mark.parametrize("kind", chosen(zip([*KINDS, *SIZES])))
def test_full_in_chunks_is_the_definition(kind, chunk_size):
    """Below 16 tokens each row has passes of its own."""
    check_definition(kind, chunk_size=chunk_size)


@pytest.mark.parametrize(("kind", "name"), chosen([pair for pair in PAIRS if pair[1] != "full"], LAWFUL))
def test_a_method_that_keeps_everything_is_full(kind, name):
    laws.everything_kept_equals_full(subject(kind, name))


@pytest.mark.parametrize(("kind", "name"), chosen(PAIRS, slow=SLOW | LAWFUL))
def test_laws_hold(kind, name):
    for law in MODEL_LAWS:
        if law is not laws.setting_does_something or name not in ("full", "verified"):
            law(subject(kind, name))


@pytest.mark.thorough
@pytest.mark.parametrize("name", [x for x in ALL if x.values[0] not in CHOICE])
@pytest.mark.parametrize("kind", ["window", "ropes", "recurrent", "sinks", "cap"])
def test_every_other_method_keeps_everything_and_runs_ragged_rows_as_alone(kind, name):
    if (kind, name) in (("ropes", "ntk"), ("recurrent", "kvgrad")):
        pytest.skip("it is refused where a part of each head rotates, or where not all layers have heads")
    if kind in CAPS and "sinks" in any_example(name).lacks:
        pytest.skip("it has an attention of its own without sink logits")
    if generous(name) is not None:
        laws.everything_kept_equals_full(subject(kind, name))
    laws.ragged_rows_equal_alone(subject(kind, name), rows=2)
    laws.ragged_questions_equal_alone(subject(kind, name))


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=pytest.mark.slow if x == "recurrent" else pytest.mark.thorough) for x in KINDS]
)
def test_drafts_are_corrected_to_the_tokens_of_full(kind):
    """A draft that leaves tokens out, and one that asks for the mass of a pass, which has no sinks."""
    want = subject(kind, "full").base[1].tokens
    np.testing.assert_array_equal(subject(kind, "verified").base[1].tokens, want)
    method = kvjax.Verified(draft=small(FromJudge, budget=20, num_recent=13, obs_window=4), depth=3)
    np.testing.assert_array_equal(subject(kind, "full").go_on(subject(kind, "full").read(method)).tokens, want)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["window", "recurrent", "latent"])
def test_saved_forked_and_streamed(kind, tmp_path):
    of = subject(kind, "quest")
    want, cache = of.base[1].tokens, of.read()
    kvjax.save_cache(tmp_path / "cache", cache)
    np.testing.assert_array_equal(of.go_on(kvjax.fork(cache, 2)).tokens[::2], want)
    loaded = kvjax.load_cache(tmp_path / "cache", config=of.model, method=of.method)
    jax.tree.map(np.testing.assert_array_equal, loaded.layers, cache.layers)
    pieces = list(kvjax.stream(of.params, loaded, max_new_tokens=STEPS, eos_token_ids=()))
    np.testing.assert_array_equal([sum(rows, []) for rows in zip(*pieces, strict=True)], want)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["window", "recurrent", "ropes"])
@pytest.mark.parametrize("name", ["chess", "pariskv", "quest", "tokenselect"])
def test_offloaded_layers_beside_others_equal_resident_layers(kind, name):
    of = subject(kind, name)
    away = of.go_on(of.read(example(name, offload=True)))
    np.testing.assert_array_equal(away.tokens, of.base[1].tokens)
    assert away.stats.host_bytes > 0
