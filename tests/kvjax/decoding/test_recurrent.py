"""Recurrent layers: their state is a part of the cache, under every method, and the method runs in the other layers.

Their logits and laws are in `tests/kvjax/test_kinds_of_models.py`.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax.accounting.stats import step_cost
from kvjax.decoding.layers import layer_methods
from kvjax.decoding.recurrent import Memory, Recurrent, row_bytes
from kvjax.decoding.sliding_window import SlidingWindow
from kvjax.protocol.typing import layer_recurrence, method_layers
from kvjax.testing.subject import STEPS
from tests.harness import example, padded, prompts
from tests.kvjax.test_kinds_of_models import KINDS, LINEAR
from tests.kvjax.test_kinds_of_models import params as params_of
from tests.kvjax.test_kinds_of_models import subject as of_kind

pytestmark = pytest.mark.usefixtures("quick_compile")
CONFIG = KINDS["recurrent"]
KEPT = LINEAR.memory("float32")
subject = functools.partial(of_kind, "recurrent")
params = functools.partial(params_of, "recurrent")


def memories(cache):
    return [state for state in cache.layers if isinstance(state, Memory)]


# ---- which layers are recurrent -----------------------------------------------------------------------------------


def test_a_method_runs_in_the_layers_with_attention_only():
    quest = example("quest", num_dense_layers=0)
    recurrent = Recurrent(keeps_of_row=KEPT)
    assert method_layers(CONFIG) == (1,) and layer_methods(quest, CONFIG) == (recurrent, quest)
    mixed = dataclasses.replace(CONFIG, num_layers=3, windows=(None, 6, None))
    assert layer_methods(quest, mixed) == (recurrent, SlidingWindow(window=6), quest)


def test_a_model_need_not_know_of_recurrent_layers():
    @dataclasses.dataclass(frozen=True)
    class Silent:
        num_layers: int = 2

    assert layer_recurrence(Silent()) == (None, None)

    @dataclasses.dataclass(frozen=True)
    class Wrong(Silent):
        recurrent: tuple = ((((2,), "float32"),),)

    with pytest.raises(ValueError, match="recurrent must be shapes or None for each of 2 layers, got"):
        layer_recurrence(Wrong())


def test_a_layer_that_breaks_the_protocol_is_refused():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Broken(type(CONFIG)):
        def apply(self, params, tokens, attend, states, **options):
            def spoil(layer, state, *given):
                if layer == 0 and self.rope_theta == 5.0:
                    return attend(layer, state, *given, None)
                if layer == 0:
                    return attend(layer, state, lambda arrays, real: (None, arrays[::-1]))
                return attend(layer, state, *given)

            return super().apply(params, tokens, spoil, states, **options)

    fields = {**vars(CONFIG), "rope_theta": 5.0}
    with pytest.raises(ValueError, match=r"must call attend\(layer, state, advance\), got 2 values after state"):
        kvjax.prefill(params(), [[1, 2]], config=Broken(**fields), method="full", max_new_tokens=1)
    with pytest.raises(ValueError, match="`advance` of a recurrent layer must return arrays like its own"):
        kvjax.prefill(params(), [[1, 2]], config=Broken(**vars(CONFIG)), method="full", max_new_tokens=1)


# ---- accounting ---------------------------------------------------------------------------------------------------


def test_memory_and_bytes_count_both_kinds_of_layers():
    sizes = {"batch": 3, "prompt_slots": 64, "max_new_tokens": 8}
    plain = kvjax.memory_needed("full", dataclasses.replace(CONFIG, num_layers=1, linear=None), **sizes)
    state = 3 * row_bytes(KEPT)
    assert row_bytes(KEPT) == 4 * (2 * 3 * 28 + 4 * 8 * 6)
    assert kvjax.memory_needed("full", CONFIG, **sizes).device == plain.device + state
    cache = subject("full").read()
    stats = jax.jit(step_cost)(cache)
    np.testing.assert_array_equal(stats.full_bytes_read, stats.length * 2 * 2 * 8 * 4 + row_bytes(KEPT))
    np.testing.assert_array_equal(stats.visible, stats.length)
    np.testing.assert_array_equal(stats.attended, stats.length)
    assert stats.is_no_op.all()


# ---- the whole model ----------------------------------------------------------------------------------------------


def test_chunks_of_a_prompt_change_nothing():
    """Below 16 tokens each row has passes of its own, and its state is taken out of the states of all rows."""
    cache, whole = (subject("full").read(chunk_size=size) for size in (5, 512))
    np.testing.assert_allclose(cache.logits, whole.logits, atol=1e-4)
    for got, want in zip(memories(cache), memories(whole), strict=True):
        for one, other in zip(got.arrays, want.arrays, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_padding_and_inactive_rows_change_no_state():
    """A row that has ended keeps its state bit by bit, while the other rows go on."""
    cache = subject("full").read()
    before = [np.asarray(x) for state in memories(cache) for x in state.arrays]
    out = kvjax.generate(params(), cache, max_new_tokens=STEPS, eos_token_ids=(), limits=[STEPS, 0, 3])
    for old, new in zip(before, [x for state in memories(out.cache) for x in state.arrays], strict=True):
        np.testing.assert_array_equal(new[1], old[1])
        assert not np.array_equal(new[0], old[0]) and not np.array_equal(new[2], old[2])


@pytest.mark.slow
def test_methods_that_share_a_prefill_have_the_same_state():
    methods = [example("snapkv"), kvjax.methods.Full()]
    tokens, lengths = padded(prompts())
    caches = kvjax.prefill_each(
        params(), tokens, methods=methods, lengths=lengths, config=CONFIG, max_new_tokens=24, pad_multiple=1,
        share_storage=True,
    )  # fmt: skip
    alone = subject("full").read()
    for cache in caches:
        for got, want in zip(memories(cache), memories(alone), strict=True):
            for x, y in zip(got.arrays, want.arrays, strict=True):
                np.testing.assert_allclose(x, y, atol=1e-5)
