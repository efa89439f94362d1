"""`largest_budget`, `longest_prompt`, `most_rows`: what is found fits, and one more does not."""

import pytest
from jax.sharding import AbstractMesh

import kvjax
from kvjax.accounting import largest_budget, longest_prompt, most_rows
from kvjax.accounting.fits import with_budget
from kvjax.methods import AdaKV, Full, KeyDiff, PyramidKV, Quest, RetroInfer, SnapKV
from kvjax.protocol.fields import share
from kvjax.wrappers import Periodic, Stages
from models import ModelConfig, param_shapes

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=4, num_q_heads=8, num_kv_heads=4, head_dim=16,
    max_position_embeddings=4096, dtype="bfloat16",
)  # fmt: skip
NEW = {"max_new_tokens": 32, "chunk_size": 512}


def needs(method, mesh=None, **sizes):
    needed = kvjax.memory_needed(method, CONFIG, mesh=mesh, params=param_shapes(CONFIG), **NEW, **sizes)
    return needed.device + needed.staged + needed.weights


@pytest.mark.parametrize(
    "method", [SnapKV(), pytest.param(PyramidKV(), marks=pytest.mark.slow), Periodic(evict=AdaKV(), interval=16)], ids=str
)
def test_the_largest_budget_fits_and_one_more_does_not(method):
    sizes = {"batch": 8, "prompt_slots": 1000}
    given = {"spare": 5000, "params": param_shapes(CONFIG), **NEW, **sizes}
    have = needs(with_budget(method, 400), **sizes) + 5000
    found = largest_budget(method, CONFIG, device_bytes=have, **given)
    assert 400 <= found < 1032 and needs(with_budget(method, found), **sizes) <= have - 5000
    assert needs(with_budget(method, found + 1), **sizes) > have - 5000
    assert largest_budget(method, CONFIG, device_bytes=10 * have, **given) == 1032
    with pytest.raises(MemoryError, match="not even the smallest budget of .* fits, 32 tokens"):
        largest_budget(method, CONFIG, device_bytes=have // 4, **given)


def test_a_budget_is_found_where_one_is():
    sizes = {"batch": 1, "prompt_slots": 100, "device_bytes": 1 << 30, "spare": 0, **NEW}
    assert largest_budget("quest", CONFIG, **sizes) == largest_budget(
        Stages(evict=SnapKV(), retrieve=Quest()), CONFIG, **sizes
    )
    assert with_budget(Stages(evict=SnapKV(), retrieve=Quest(budget=64)), 50).retrieve.budget == 64
    for method in (Full(), RetroInfer()):
        with pytest.raises(ValueError, match="expected a method with a field budget"):
            largest_budget(method, CONFIG, **sizes)
    with pytest.raises(ValueError, match="device_bytes"):  # a CPU reports no memory
        largest_budget("quest", CONFIG, **{**sizes, "device_bytes": None})
    for wrong in ("24GB", float("nan"), float("inf")):
        with pytest.raises(ValueError, match="device_bytes"):
            largest_budget("quest", CONFIG, **{**sizes, "device_bytes": wrong})
        with pytest.raises(ValueError, match="spare must be a number of bytes"):
            largest_budget("quest", CONFIG, **{**sizes, "spare": wrong})
    assert largest_budget("quest", CONFIG, **{**sizes, "device_bytes": 2.0**30}) == largest_budget("quest", CONFIG, **sizes)
    with pytest.raises(ValueError, match="num_slots|prompt_slots"):
        largest_budget("quest", CONFIG, **{**sizes, "prompt_slots": 0})


@pytest.mark.parametrize(
    "method, mesh",
    [
        (SnapKV(budget=share(1 / 4)), None),
        (Full(), AbstractMesh((2, 2), ("data", "model"))),
        pytest.param(SnapKV(budget=share(1 / 4)), AbstractMesh((2, 2), ("data", "model")), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_longest_prompt_and_the_most_rows_fit(method, mesh):
    have = needs(method, mesh, batch=6, prompt_slots=700)
    given = {"device_bytes": have, "spare": 0, "mesh": mesh, "params": param_shapes(CONFIG), **NEW}
    longest = longest_prompt(method, CONFIG, batch=6, **given)
    assert longest >= 700 and needs(method, mesh, batch=6, prompt_slots=longest) <= have
    assert needs(method, mesh, batch=6, prompt_slots=longest + 1) > have
    assert 0 <= longest - longest_prompt(method, CONFIG, batch=6, step=64, **given) < 64
    rows, more = most_rows(method, CONFIG, prompt_slots=700, **given), 1 if mesh is None else 2
    assert rows >= 6 and rows % more == 0 and needs(method, mesh, batch=rows, prompt_slots=700) <= have
    assert needs(method, mesh, batch=rows + more, prompt_slots=700) > have
    assert longest_prompt(method, CONFIG, batch=6, **{**given, "device_bytes": 1000}) == 0


def test_a_longer_prompt_needs_no_less():
    """Else the longest that fits might lie beyond one that does not."""
    found = [needs(Full(), batch=1, prompt_slots=tokens) for tokens in (1, 511, 512, 513, 1024, 2047, 2048, 2049, 4096, 4097)]
    assert found == sorted(found)


def test_a_bounded_cache_takes_any_prompt():
    given = {"device_bytes": 1 << 22, "spare": 0, **NEW}
    assert longest_prompt(KeyDiff(budget=64), CONFIG, batch=1, **given) is None
    with pytest.raises(ValueError, match="step must .* at least 1, got 0"):
        longest_prompt("full", CONFIG, batch=1, step=0, **given)
