"""The order in which the prompts of a batch are read: which passes are computed, and that they change nothing."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax.decoding.layers import layer_methods
from kvjax.decoding.reading_order import Order, reading_order
from kvjax.testing.model import TinyModel
from kvjax.wrappers import Pattern, PerLayer, Prefill
from tests.harness import NAMES, SMALL_PATTERNS, WRAPPERS, example

pytestmark = pytest.mark.usefixtures("quick_compile")

LENGTHS = (37, 5, 16, 2, 21)
OTHERS = (3, 40, 8, 9, 1)
PASSES: list[tuple[int, ...]] = []  # shape of the tokens of every pass that ran


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted(TinyModel):
    """A model that notes every pass when it is run."""

    def apply(self, params: Any, tokens: jax.Array, attend: Any, states: tuple, **options: Any) -> tuple:
        jax.debug.callback(lambda: PASSES.append(tokens.shape))
        return TinyModel.apply(self, params, tokens, attend, states, **options)


MODEL = Counted()


@functools.cache
def params():
    return MODEL.random_params()


def prompts(lengths):
    rng = np.random.default_rng(5)
    return [rng.integers(0, 60, n).tolist() for n in lengths]


def read(method, chunk_size, lengths=LENGTHS):
    """The cache, and the passes that ran, each through all layers. Every length is padded to 40."""
    PASSES.clear()
    sizes = {"max_new_tokens": 8, "chunk_size": chunk_size, "pad_multiple": 8, "order": "chunks"}
    cache = kvjax.prefill(params(), prompts(lengths), config=MODEL, method=method, **sizes)
    jax.effects_barrier()
    return cache, list(PASSES)


def check_equal(method, chunk_size, lengths=LENGTHS, go_on=False):
    """Rows read in passes of ``chunk_size`` tokens are those read together, also when they go on; returns the passes."""
    (one, passes), (other, _) = read(method, chunk_size, lengths), read(method, 8192, lengths)
    np.testing.assert_allclose(one.logits, other.logits, atol=1e-4)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for here, there in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert here.shape == there.shape and here.dtype == there.dtype
        if here.dtype == np.int32 and not go_on:
            np.testing.assert_array_equal(here, there)  # positions and cursors
    if not go_on:
        return passes
    tokens = [kvjax.generate(params(), cache, max_new_tokens=6, eos_token_ids=()).tokens for cache in (one, other)]
    np.testing.assert_array_equal(*tokens)
    return passes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "snapkv"])  # rows taken out of the storage of all, and groups with their own
def test_no_pass_holds_padding_alone(name):
    method = example(name)
    assert check_equal(method, 8) == [(1, 8)] * sum(-(-n // 8) for n in LENGTHS)
    before = len(MODEL.traces)
    assert read(method, 8, OTHERS)[1] == [(1, 8)] * sum(-(-n // 8) for n in OTHERS)
    assert len(MODEL.traces) == before, "another pattern of lengths is another program"


@pytest.mark.parametrize(
    ("name", "chunk_size", "passes"),
    [
        ("full", 80, [(2, 40)] * 3),  # prompts of one chunk; the last group shares a row with the group before
        # Blocks of 4 tokens. Rows of similar length are together: 37 and 21, 16 and 5, 5 again and 2 tokens.
        ("keydiff", 8, [(2, 4)] * (10 + 4 + 2)),
        pytest.param("quest", 80, [(2, 40)] * 3, marks=pytest.mark.thorough),
        pytest.param("streamingllm", 10, [(2, 5)] * (8 + 4 + 1), marks=pytest.mark.thorough),
        # Its blocks of 8 tokens are too few to repay copies of all that it keeps.
        pytest.param("tokenselect", 16, [(5, 8)] * 5, marks=pytest.mark.thorough),
    ],
)
def test_a_pass_has_as_many_rows_as_its_tokens_allow(name, chunk_size, passes):
    assert check_equal(example(name), chunk_size) == passes


@pytest.mark.thorough
@pytest.mark.parametrize("chunk_size", [8, 80])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("headkv", "duoattention")])
def test_the_order_changes_nothing(name, chunk_size):
    """Of every method; the scores of the other two are for another model."""
    check_equal(example(name), chunk_size, OTHERS, go_on=True)


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(WRAPPERS))
def test_the_order_changes_nothing_under_wrappers(name):
    check_equal(WRAPPERS[name], 8, OTHERS, go_on=True)


@pytest.mark.thorough
@pytest.mark.parametrize("pattern", [Pattern("xattention", share=0.6), Pattern("flexprefill", share=0.6, min_budget=2)])
def test_patterns_that_follow_the_text_are_chosen_for_each_row_alone(pattern):
    """One layer keeps its prompt and another evicts, so rows are taken out of the storage of all."""
    given = SMALL_PATTERNS | {"pattern": pattern}
    layers = {0: Prefill(method=example("snapkv"), **given)}
    method = PerLayer(layers=layers, default=Prefill(method=kvjax.methods.Full(), **given))
    assert check_equal(method, 3, OTHERS) == [(1, 16)] * sum(-(-n // 16) for n in OTHERS)


def test_passes_hold_at_most_chunk_size_tokens_in_equal_groups():
    def order(method, batch, padded, chunk_size):
        return reading_order([layer_methods(method, MODEL)], batch, padded, chunk_size)

    full, snapkv, keydiff = kvjax.make("full"), kvjax.make("snapkv"), kvjax.make("keydiff", block=128)
    together = Order(chunk=1024, chunks=32, rows=1, groups=1, apart=True)
    assert order(full, 1, 32768, 1024) == order(snapkv, 1, 32768, 1024) == together
    assert order(full, 16, 32768, 1024) == dataclasses.replace(together, groups=16, apart=False)
    assert order(snapkv, 16, 32768, 1024) == dataclasses.replace(together, groups=16)
    mixed = PerLayer(layers={0: full}, default=snapkv)
    assert not order(mixed, 16, 32768, 1024).apart
    # As many rows in a pass as have at most `chunk_size` tokens, and groups of equal size.
    assert order(full, 13, 512, 4096) == Order(chunk=512, chunks=1, rows=7, groups=2, apart=True)
    assert order(keydiff, 16, 32768, 1024) == Order(chunk=128, chunks=256, rows=8, groups=2, apart=True)
    assert order(keydiff, 16, 32768, 64).rows == 1
    offloaded = kvjax.make("quest", num_dense_layers=0, offload=True)
    assert order(offloaded, 16, 32768, 1024) == dataclasses.replace(together, rows=16, offloaded=True)


def test_a_batch_needs_one_whole_prompt_and_what_all_rows_keep():
    def needed(name, batch):
        sizes = {"prompt_slots": 4096, "max_new_tokens": 8, "chunk_size": 1024}
        return kvjax.memory_needed(example(name), MODEL, batch=batch, **sizes)

    one, eight, nine = (needed("snapkv", batch) for batch in (1, 8, 9))
    kept = nine.device - eight.device
    assert kept < one.device / 8 and one.device < eight.device <= one.device + 8 * kept, "one whole prompt, and what is kept"
    one, eight = (needed("full", batch) for batch in (1, 8))
    row = one.device // MODEL.num_layers
    assert eight.device == 8 * one.device and eight.staged - one.staged == row, "a pass takes out one row"
