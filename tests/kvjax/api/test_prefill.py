"""`prefill_each`: several methods share one prefill."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax import registry
from kvjax.accounting import memory
from kvjax.decoding.layers import shares_prefill
from kvjax.protocol.method import Reading
from kvjax.wrappers import PerLayer
from models import DynamicScaling
from tests.harness import NAMES, TINY, TRACES, example, padded, prompts, read, tiny_params
from tests.kvjax.cases import ONE, go_on

pytestmark = pytest.mark.usefixtures("quick_compile")

DENSE = [name for name in NAMES if example(name).dense_prompt]


def read_each(methods, **options):
    tokens, lengths = padded(prompts())
    options = {"config": ONE, "lengths": lengths, "max_new_tokens": 24, "pad_multiple": 1, **options}
    return kvjax.prefill_each(tiny_params(), tokens, methods=methods, **options)


@pytest.mark.parametrize(
    "names, options",
    [
        (("quest", "snapkv", "full"), {"config": ONE}),
        pytest.param(DENSE, {"config": TINY}, marks=pytest.mark.thorough),
        pytest.param(DENSE, {"config": TINY, "chunk_size": 16}, marks=pytest.mark.thorough),
    ],
)
def test_each_cache_equals_its_method_alone(names, options):
    methods = [example(name) for name in names]
    caches = read_each(methods, share_storage=True, **options)
    for method, together in zip(methods, caches, strict=True):
        alone = read(method, **options)
        assert jax.tree.structure(alone) == jax.tree.structure(together)
        for here, there in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            if here.dtype.kind in "biu":
                np.testing.assert_array_equal(here, there)
            else:
                np.testing.assert_allclose(here, there, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    ["kvzip", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("kvgrad", "attentionmatching", "oracleeviction"))],
)
def test_budgets_of_a_method_share_its_second_reading(name, monkeypatch):
    """It is traced once, and each budget keeps what it keeps alone, bit for bit."""
    found, true = [], Reading.once
    monkeypatch.setattr(Reading, "once", lambda self, *given: found.append(self.known) or true(self, *given))
    methods = [example(name), example("snapkv"), example(name, budget=example(name).budget - 2)]
    caches = read_each(methods)
    assert len(found) == 2 and found[0] is found[1] and len(found[0]) == 1
    for method, together in zip(methods[::2], caches[::2], strict=True):
        for here, there in zip(jax.tree.leaves(together), jax.tree.leaves(read(method, config=ONE)), strict=True):
            np.testing.assert_array_equal(here, there)


# Whole prompts, row by row; pieces of prompts in the storage of all rows.
@pytest.mark.parametrize("chunk_size", [64, pytest.param(16, marks=pytest.mark.thorough)])
def test_shared_storage_exists_once_and_a_fork_protects_it(chunk_size):
    """Methods that keep every token have one storage; a method that packs keys has its own."""
    methods = [example("think"), example("quest"), kvjax.methods.Full()]
    think, quest, full = read_each(methods, share_storage=True, chunk_size=chunk_size)
    sizes = {"batch": len(prompts()), "prompt_slots": len(padded(prompts())[0][0]), "max_new_tokens": 24}
    needed = [
        kvjax.memory_needed(methods[1:], ONE, **sizes, chunk_size=chunk_size, share_storage=share).device
        for share in (True, False)
    ]
    storage = sum(x.nbytes for x in jax.tree.leaves(full.layers))
    assert storage <= needed[1] - needed[0] < 2 * storage
    for at in range(ONE.num_layers):
        assert quest.layers[at].cache.key is full.layers[at].cache.key is not think.layers[at].cache.key
        assert quest.layers[at].cache.position is full.layers[at].cache.position
    before = np.asarray(full.layers[0].cache.key)
    first = kvjax.decode_step(tiny_params(), kvjax.fork(full), [1, 2, 3])
    np.testing.assert_array_equal(full.layers[0].cache.key, before)
    second = kvjax.decode_step(tiny_params(), full, [1, 2, 3])  # the last call needs no fork
    np.testing.assert_array_equal(first.logits, second.logits)
    with pytest.raises(ValueError, match="consumed .* kvjax.fork the cache before the call"):
        kvjax.decode_step(tiny_params(), quest, [1, 2, 3])


def test_methods_that_do_not_read_densely_read_alone():
    alone = {name for name in registry.builtin() if not example(name).dense_prompt}
    assert alone == {"infllm", "keydiff", "ntk", "pi", "selfextend", "streamingllm", "tokenselect"}
    wrapped = PerLayer(layers={0: example("streamingllm")}, default=kvjax.methods.Full())
    for other in (example("keydiff"), wrapped):
        with pytest.raises(ValueError, match="must attend to the prompt densely, got .*: prefill each alone"):
            read_each(["full", other])
    for wrong in ("full", 3):
        with pytest.raises(ValueError, match="methods must be a list of methods or names, got"):
            read_each(wrong)
    with pytest.raises(ValueError, match="methods must have at least one method, got none"):
        read_each([])


def test_prompts_are_not_padded_beyond_the_models_positions():
    most = max(128, ONE.max_position_embeddings)
    with pytest.raises(ValueError, match=f"pad_multiple must be at most {most}, the positions of the model, got 1000000000"):
        kvjax.prefill(tiny_params(), [[1, 2]], config=ONE, max_new_tokens=4, pad_multiple=10**9)


def test_caches_that_do_not_fit_together_are_refused(monkeypatch):
    """Each would fit alone. One sentence says what each needs, and nothing is traced."""
    methods, rows = [example("quest"), example("snapkv")], padded(prompts())[0]
    sizes = {"batch": len(rows), "prompt_slots": rows.shape[1], "max_new_tokens": 24, "chunk_size": 16}
    sizes |= {"params": tiny_params()}
    alone = [kvjax.memory_needed(method, ONE, **sizes) for method in methods]
    both = kvjax.memory_needed(methods, ONE, **sizes)
    assert max(x.device for x in alone) < both.device
    assert kvjax.memory_needed(methods[:1], ONE, **sizes) == alone[0]
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: both.peak - 1)
    TRACES.clear()
    said = r"2 methods that share one prefill need [\d.]+ MiB of .* \(Quest [\d.]+ MiB; SnapKV [\d.]+ MiB\), "
    said += r"got [\d.]+ MiB of free device memory; prefill fewer methods at once, shorten the prompt"
    with pytest.raises(MemoryError, match=said):
        read_each(methods, chunk_size=16)
    assert not TRACES
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: both.peak)
    assert len(read_each(methods, chunk_size=16)) == 2


@pytest.mark.parametrize("name", ["quest", "mosaickv"])
def test_prompts_under_vmap_refuse_host_memory(name):
    """JAX's own words would be about an operation that nobody wrote."""
    method, tokens = example(name, offload=True), np.ones((3, 2, 8), np.int32)

    def read(tokens):
        return kvjax.prefill(tiny_params(), tokens, config=ONE, method=method, max_new_tokens=4).logits

    with pytest.raises(ValueError, match="caches in host memory do not run under jax.vmap, got a mapped axis of 3"):
        jax.eval_shape(jax.vmap(read), tokens)


def test_weights_under_vmap_are_read_by_several_methods():
    """Memory is asked of a device although the weights are on none yet."""
    two, methods = jax.tree.map(lambda x: np.stack([x, x]), tiny_params()), [kvjax.methods.Full(), example("snapkv")]

    def read(params):
        each = kvjax.prefill_each(params, np.ones((1, 8), np.int32), config=ONE, methods=methods, max_new_tokens=4)
        return [cache.logits for cache in each]

    assert [x.shape[:2] for x in jax.vmap(read)(two)] == [(2, 1)] * 2


@pytest.mark.slow
def test_stretched_methods_with_a_factor_of_one_read_as_full_does():
    """They share its storage, first or last in the list, and answer with its tokens; another factor reads alone."""
    stretched, whole = [kvjax.methods.PI(factor=1), kvjax.methods.NTK(factor=1.0)], [kvjax.methods.Full(), example("quest")]
    caches = read_each([*stretched, *whole], share_storage=True, chunk_size=64)
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        assert len({id(layer.cache.key) for layer in layers}) == 1
    pi, ntk, full = (go_on(kvjax.fork(cache)).tokens for cache in caches[:3])
    np.testing.assert_array_equal(pi, full)
    np.testing.assert_array_equal(ntk, full)
    with pytest.raises(ValueError, match=r"got PI\(factor=4.0\): prefill each alone"):
        read_each([*whole, kvjax.methods.PI(factor=4.0)])
    # A long text turns by frequencies that PI does not take.
    scaling = DynamicScaling(factor=3.0, original_max_position_embeddings=16)
    changing = dataclasses.replace(TINY, rope_scaling=scaling)
    assert [shares_prefill(method, changing) for method in (*whole, *stretched)] == [True, True, False, False]
