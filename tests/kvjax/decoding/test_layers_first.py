"""Prompts that are read layer by layer: the cache, and all that follows, is that of passes through all layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.api import programs
from kvjax.decoding.layers import layer_methods
from kvjax.decoding.one_layer import has_few_kinds
from kvjax.decoding.reading_order import Order, RowBytes, chosen_order, reading_order
from kvjax.methods import KVzip, PyramidKV, SnapKV
from kvjax.testing.model import TinyModel
from models.weights import param_shapes
from pallas_kernels.host import on_host
from tests.harness import ALL, any_example, example
from tests.kvjax.test_kinds_of_models import KINDS
from tests.kvjax.test_kinds_of_models import params as params_of_kind

pytestmark = pytest.mark.usefixtures("quick_compile")

TINY = TinyModel()
LENGTHS = (37, 5, 16, 2, 21)
SNAPKV = SnapKV(budget=12, obs_window=5)
DEFAULT = ("snapkv", "keydiff")  # a choice for speed: groups of one row, and a block of its own with groups of two rows


class Undivided(TinyModel):
    """A model that cannot run one layer alone."""

    @property
    def run_layer(self):
        raise AttributeError("run_layer")

    def apply(self, *args, **options):
        return TINY.apply(*args, **options)


@functools.cache
def params():
    return TINY.random_params()


def rows(lengths=LENGTHS):
    rng = np.random.default_rng(5)
    return [rng.integers(0, 60, n).tolist() for n in lengths]


def read(methods, order, config=TINY, weights=None, lengths=LENGTHS, **options):
    options = {"chunk_size": 8, "pad_multiple": 8, "max_new_tokens": 8} | options
    weights = params() if weights is None else weights
    return kvjax.prefill_each(weights, rows(lengths), methods=methods, config=config, order=order, **options)


def equal(one, other, tolerance=1e-5):
    """Two caches are equal, their numbers up to rounding."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for here, there in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert here.shape == there.shape and here.dtype == there.dtype
        exact = not jnp.issubdtype(here.dtype, jnp.floating)
        np.testing.assert_allclose(
            np.asarray(here, np.float64), np.asarray(there, np.float64), atol=0 if exact else tolerance, rtol=0
        )


def check_equal(methods, config=TINY, weights=None, **options):
    """The caches of both orders are equal; returns the last of those that were read layer by layer."""
    both = [read(methods, order, config, weights, **options) for order in ("layers", "chunks")]
    for one, other in zip(*both, strict=True):
        equal(one, other)
    for one, other in zip(read(methods, None, config, weights, share_storage=True, **options), both[1], strict=True):
        equal(one, other)  # by a program for each kind of layer
    return both[0][-1]


def refuses(name):
    return bool(any_example(name).reread_tokens(40))


OTHERS = [
    x for x in ALL if x.values[0] not in ("headkv", "duoattention") and not refuses(x.values[0])
]  # two are for another model
METHODS = [pytest.param(*x.values, marks=[*x.marks, *[pytest.mark.slow] * (x.values[0] not in DEFAULT)]) for x in OTHERS]


@pytest.mark.parametrize("name", METHODS)
def test_both_orders_make_the_same_cache(name):
    """Ragged rows in groups, most of a single row; and one row alone."""
    cache = check_equal([any_example(name)])
    before = jax.tree.leaves(cache.layers)
    assert np.isfinite(kvjax.generate(params(), cache, max_new_tokens=6, eos_token_ids=()).cache.logits).all()
    assert all(x.is_deleted() for x in before)


@pytest.mark.slow
@pytest.mark.parametrize("name", [x for x in OTHERS if x.values[0] not in DEFAULT])
def test_both_orders_make_the_same_cache_of_rows_together(name):
    check_equal([any_example(name)], lengths=(37,))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv", "chess", "streamingllm"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_both_orders_make_the_same_cache_of_every_kind_of_model(kind, name):
    check_equal([any_example(name)], KINDS[kind], params_of_kind(kind))


def test_methods_that_share_a_prompt_share_each_layer():
    """Full and Quest end with the same arrays; SnapKV and TOVA read the same storage."""
    names = ("full", "quest", "snapkv", "tova")
    caches = read([example(name) for name in names], "layers", share_storage=True)
    for one, other in zip(caches, read([example(name) for name in names], "chunks"), strict=True):
        equal(one, other)
    assert caches[0].layers[1].cache.key is caches[1].layers[1].cache.key


@pytest.mark.parametrize(
    ("names", "chunk"),
    [
        (("kvzip", "h2o"), 96),
        pytest.param(("quest", "pyramidkv"), 8, marks=pytest.mark.slow),
        pytest.param(("kvzip",), 8, marks=pytest.mark.slow),
    ],
)
def test_other_methods_begin_with_the_hidden_states_of_the_first(names, chunk):
    inputs = []
    read([example("full")], None, share_storage=True, inputs=inputs, chunk_size=chunk)
    assert len(inputs) == TINY.num_layers + 2
    methods = [example(name) for name in names]
    caches = read(methods, None, share_storage=True, inputs=inputs, chunk_size=chunk)
    for one, other in zip(caches, read(methods, "chunks", chunk_size=chunk), strict=True):
        equal(one, other)
    assert len(inputs) == TINY.num_layers + 2
    spoilt = [inputs[0], *(x * 0 for x in inputs[1:])]
    assert not np.allclose(
        read(methods, None, share_storage=True, inputs=spoilt, chunk_size=chunk)[0].logits, caches[0].logits
    )
    with pytest.raises(ValueError, match="inputs must have been filled by a call on the same prompts"):
        read(methods, None, share_storage=True, inputs=[inputs[0].at[0, 0].add(1), *inputs[1:]], chunk_size=chunk)


def flops_of_a_layer(model, inputs, *names):
    sizes = {"rows": 3, "length": 64, "room": 8, "max_new_tokens": 8, "num_eos": 0, "chunk_size": 128, "pad_multiple": 8}
    given = {"config": model, "methods": [example(name) for name in names], "share_storage": True, "inputs": inputs}
    lowered = list(programs.lower_programs(param_shapes(model), **given, **sizes))
    layers = [one for one in lowered if "jit_read" in one.as_text()[:200]]
    return sum(one.compile().cost_analysis()["flops"] for one in layers) / len(layers)


@pytest.mark.slow
def test_methods_behind_others_compute_a_tenth_of_the_products():
    wide, inputs = dataclasses.replace(KINDS["cap"], intermediate_size=4096), []
    assert flops_of_a_layer(wide, inputs, "full") > 10 * flops_of_a_layer(wide, inputs, "quest")


@pytest.mark.slow
def test_methods_that_store_a_prompt_differently_attend_to_it_once():
    """H2O, which evicts, and Full, which does not, have other numbers of slots."""
    model = KINDS["cap"]
    assert flops_of_a_layer(model, None, "full", "h2o") < 1.1 * flops_of_a_layer(model, None, "h2o")


def test_callers_keep_their_arrays():
    budget, lengths = jnp.int32(8), jnp.array([24, 9])
    method, prompt = SnapKV(budget=budget, capacity=12, obs_window=5), jnp.asarray(rows((24, 24)))
    sizes = {"max_new_tokens": 8, "chunk_size": 8, "pad_multiple": 8, "share_storage": True}
    (cache,) = kvjax.prefill_each(params(), prompt, methods=[method], config=TINY, lengths=lengths, **sizes)
    kvjax.generate(params(), cache, max_new_tokens=2)
    assert not any(x.is_deleted() for x in (budget, lengths, prompt))


def test_equal_layers_are_one_program():
    """Quest attends in full in two layers: a model of six layers has as many programs as one of four."""

    def count(layers):
        model = dataclasses.replace(TINY, num_layers=layers)
        sizes = {"rows": 3, "length": 32, "room": 8, "max_new_tokens": 8, "num_eos": 0, "chunk_size": 8, "pad_multiple": 8}
        methods = [example("full"), example("quest"), SNAPKV]
        lowered = programs.lower_programs(model.random_params(), config=model, methods=methods, share_storage=True, **sizes)
        return sum(1 for _ in lowered)

    assert count(4) == count(6)
    deep = dataclasses.replace(TINY, num_layers=28)
    assert has_few_kinds(example("quest"), deep) and not has_few_kinds(PyramidKV(budget=64), deep)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "k8v4"])
def test_codes_are_those_of_the_other_order(kv_dtype):
    check_equal([SNAPKV], kv_dtype=kv_dtype)


@pytest.mark.slow
def test_budgets_can_be_mapped_and_parameters_differentiated():
    prompt = jnp.asarray(rows((24, 24)))

    def loss(weights, budget, order):
        method = SnapKV(budget=budget, capacity=12, obs_window=5)
        cache = kvjax.prefill(
            weights, prompt, config=TINY, method=method, max_new_tokens=2, chunk_size=8, pad_multiple=8, order=order
        )
        return kvjax.decode_step(weights, cache, jnp.array([1, 2])).logits[:, :3].sum()

    budgets = jnp.array([6, 9, 12])
    got, want = (
        jax.vmap(functools.partial(jax.value_and_grad(loss), order=order), (None, 0))(params(), budgets)
        for order in ("layers", "chunks")
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), got, want)
    assert len(set(np.asarray(want[0]).tolist())) == 3


@pytest.mark.slow
def test_bfloat16_differs_by_rounding_and_ties():
    """A token that only one order keeps is among the next two of the other order; these weights have such tokens."""
    config = TinyModel(num_layers=3, dtype="bfloat16")
    weights = config.random_params(6)

    def kept(order, budget):
        (cache,) = read([SnapKV(budget=budget, obs_window=5)], order, config, weights)
        heads = (head for layer in cache.layers for row in np.asarray(layer.cache.position) for head in row)
        return [set(head[head >= 0].tolist()) for head in heads], cache.logits

    (one, logits), (other, same), (more, _) = kept("layers", 12), kept("chunks", 12), kept("chunks", 14)
    np.testing.assert_allclose(logits, same, atol=0.1)
    assert one != other and all(few <= most for few, most in zip(one, more, strict=True))


def test_an_order_that_cannot_be_is_refused():
    def refused(why, method, order, config=TINY):
        with pytest.raises(ValueError, match=why):
            read([method], order, config)

    refused("order must be 'chunks' or None, got 'layers': KVzip reads the prompt a second time", KVzip(budget=8), "layers")
    refused("order must be 'layers', 'chunks' or None, got 'rows'", SNAPKV, "rows")
    refused("got 'layers': Undivided cannot run one layer alone", SNAPKV, "layers", Undivided())
    (cache,) = read([SNAPKV], None, Undivided())
    np.testing.assert_allclose(cache.logits, read([SNAPKV], "layers")[0].logits, atol=1e-5)


def test_layers_come_first_where_that_takes_less_memory():
    def order(name, batch, by=None, chunk_size=1024, row=None):
        row = RowBytes(reading=(100,) * 32, kept=(10,) * 32, made=(10,) * 32, hidden=200) if row is None else row
        methods = [layer_methods(example(name), TINY)]
        return reading_order(methods, batch, 32768, chunk_size, by=by, row=lambda order: row)

    layers = Order(chunk=1024, chunks=32, rows=1, groups=1, apart=True, by="layers")
    assert order("snapkv", 1) == layers and layers.peak(1, RowBytes((1, 5), (2, 3), (2, 3), 7)) == 5 + 7 + 5
    assert order("quest", 16) == order("snapkv", 16) == dataclasses.replace(layers, groups=16)
    assert order("snapkv", 1, chunk_size=32768).by == order("snapkv", 1, by="chunks").by == "chunks"
    keeps = RowBytes(reading=(100,) * 32, kept=(100,) * 32, made=(0,) * 32, hidden=200)
    assert order("full", 1, row=keeps).by == "chunks" and order("full", 1, by="layers").by == "layers"
    offloaded = kvjax.make("quest", num_dense_layers=0, offload=True)
    assert reading_order([layer_methods(offloaded, TINY)], 4, 32768, 1024, row=lambda order: keeps).by == "layers"


def test_an_interrupted_prompt_leaves_nothing_behind():
    calls = []

    class Interrupted(TinyModel):
        def run_layer(self, params, layer, *given):
            calls.append(layer)
            if calls == [0, 1]:
                raise KeyboardInterrupt
            return super().run_layer(params, layer, *given)

    with pytest.raises(KeyboardInterrupt):
        read([SNAPKV], "layers", Interrupted())
    assert calls == [0, 1]
    equal(read([SNAPKV], "layers", Interrupted())[0].layers, read([SNAPKV], "layers")[0].layers, 0)


@pytest.mark.slow
def test_finished_layers_wait_in_host_memory_while_others_read():
    """As many as take the place of a layer's keys and values, joined too; they come back, by a caller's program as well."""
    method, config = kvjax.make("quest", num_dense_layers=0, offload=True), TinyModel(num_layers=4)
    weights, sizes = config.random_params(), {"max_new_tokens": 8, "chunk_size": 8}
    waiting = chosen_order([method], [layer_methods(method, config)], config, 1, 40, **sizes).waiting
    prompt, length = jnp.asarray(rows((40,))), jnp.full((1,), 40, jnp.int32)
    (ended,) = programs.prefill_program(weights, prompt, length, (method,), model=config, **sizes)
    hosted = [all(map(on_host, jax.tree.leaves(layer))) for layer in ended.layers]
    assert hosted == [True] * waiting + [False] * (4 - waiting) and 0 < waiting < 4
    run = functools.partial(kvjax.prefill, config=config, method=method, pad_multiple=8, **sizes)
    here, jitted = run(weights, prompt), jax.jit(run)(weights, prompt)
    by_chunks = run(weights, prompt, order="chunks")
    for cache in (here, jitted):
        equal(cache, by_chunks)
        assert list(map(on_host, jax.tree.leaves(cache))) == list(map(on_host, jax.tree.leaves(by_chunks)))


def test_only_one_layer_is_stored_while_a_prompt_is_read():

    def temporaries(order, layers):
        config = TinyModel(num_layers=layers, max_position_embeddings=5000)
        run = functools.partial(kvjax.prefill, config=config, method=SNAPKV, max_new_tokens=8, chunk_size=256, order=order)
        shapes = jax.eval_shape(config.random_params), jax.ShapeDtypeStruct((1, 4096), jnp.int32)
        return jax.jit(run).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    layer = 2 * 2 * 4096 * 8 * 4  # bytes of keys and values, and half as many of hidden states
    assert temporaries("chunks", 6) - temporaries("layers", 6) > 4 * layer
