"""InfiniGen in a model: the guess on its way from the layer before to the method, and who asks for one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.api.measure import measure
from kvjax.decoding.checks import check_sizes
from kvjax.decoding.decode import run_step
from kvjax.decoding.layers import guessing_layers, layer_methods
from kvjax.decoding.prefill import run_prefill
from kvjax.methods import Full, InfiniGen, Quest, SnapKV
from kvjax.testing.model import TinyModel
from kvjax.wrappers import DenseBelow, PerLayer, Stages, Twilight
from models import YarnScaling
from tests import tape
from tests.harness import example, random_tokens, small
from tests.oracles import infinigen as oracle

pytestmark = pytest.mark.usefixtures("quick_compile")
LENGTHS, STEPS = (21, 3, 10), 6
STRETCHED = YarnScaling(factor=1.0, attention_factor=1.2, original_max_position_embeddings=8)


def tokens_attended(cache):
    return measure(cache).attended


@pytest.mark.thorough
def test_a_layer_searches_by_the_guess_and_attends_by_its_query():
    """Layer 1 behind a dense layer 0, under a rule of RoPE that makes queries and keys longer."""
    rows = [random_tokens(seed, len(LENGTHS), 2, 2, max(LENGTHS) + STEPS, 16) for seed in (1, 2)]
    q, k, v = (np.stack(x) for x in zip(*rows, strict=True))
    guess = np.random.default_rng(3).normal(size=q.shape).astype(np.float32) * 1.5
    logits = np.zeros((len(LENGTHS), q.shape[-2], q.shape[-2]), np.float32)
    player, params = tape.record(q, k, v, logits, guess, rope_scaling=STRETCHED)
    cache = tape.read(player, params, LENGTHS, example("infinigen", num_dense_layers=1), STEPS)
    _, outputs, counted = tape.decode(params, cache, np.ones((STEPS, len(LENGTHS)), bool), True, watch=tokens_attended)
    for row, length in enumerate(LENGTHS):
        queries, keys, guesses = (1.2 * x[1, row, ..., : length + STEPS, :] for x in (q, k, guess))
        values = v[1, row, :, : length + STEPS]
        want = oracle.run(queries, keys, values, length, player.inv_freq, guess=guesses, **oracle.KNOBS)
        np.testing.assert_allclose(outputs[:, 1, row], want.outputs, atol=1e-4, rtol=0)
        # The accounting before the last step is of the step before; layer 0 attends to all.
        found = np.mean([len(x) for x in want.attended[-2]])
        np.testing.assert_allclose(counted[-1, row], (length + STEPS - 1 + found) / 2, rtol=1e-6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strict(TinyModel):
    """A model that does not know of guesses."""

    can_guess = False

    def apply(self, params, tokens, attend, states, *, last=None):
        return TinyModel.apply(self, params, tokens, attend, states, last=last)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spy(TinyModel):
    """A model that says in `traces` for which layers it was asked to guess."""

    def apply(self, params, tokens, attend, states, *, last=None, guess=()):
        self.traces.append(tuple(guess))
        return TinyModel.apply(self, params, tokens, attend, states, last=last, guess=guess)


def asked(model, method):
    """The layers in which the model had to guess in a prompt, a step and a question; nothing is run."""

    def turns():
        params, tokens = model.random_params(), jnp.zeros((1, 4), jnp.int32)
        options = {"model": model, "max_new_tokens": 8, "chunk_size": 8}
        cache = run_prefill(params, tokens, jnp.full((1,), 4, jnp.int32), method, **options)
        for count in (1, 2):
            cache = run_step(params, cache, tokens[:, :count], jnp.ones((1, count), bool))

    jax.eval_shape(turns)
    return model.traces[::2]  # `TinyModel` adds the shape of the tokens behind each


def test_only_steps_of_layers_that_search_ask_for_a_guess():
    search = small(InfiniGen, num_dense_layers=0)
    some = PerLayer(layers={0: search, 2: search}, default=Full())
    model, methods = TinyModel(num_layers=4), (InfiniGen(), search, some, Full())
    assert [guessing_layers(layer_methods(method, model)) for method in methods] == [(2, 3), (1, 2, 3), (2,), ()]
    assert asked(Spy(num_layers=2), search) == [(), (1,), ()]
    asked(Strict(num_layers=1), search)  # which does not know the argument


def test_wrappers_ask_for_what_they_wrap():
    for made in (
        Stages(evict=SnapKV(), retrieve=InfiniGen()),
        DenseBelow(length=9, method=InfiniGen()),
        Twilight(method=InfiniGen()),
    ):
        assert made.for_layer(2, 3).needs_guess
        assert not made.for_layer(1, 3).needs_guess, "layer 1 is dense"


def test_a_model_that_cannot_guess_is_refused():
    told = r"InfiniGen\(.*\) guesses a layer's query from the attention input of the layer before, which Strict does not give"
    with pytest.raises(ValueError, match=told):
        kvjax.prefill({}, [[1, 2]], config=Strict(num_layers=3), method=InfiniGen(), max_new_tokens=2)
    check_sizes(InfiniGen(), Strict(num_layers=2))  # whose layers are dense
    check_sizes(Quest(), Strict(num_layers=3))
