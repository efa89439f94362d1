"""MosaicKV's dynamic strategy against its oracle: plans of heads and segments, and when they are finalised."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from tests.harness import random_tokens
from tests.kvjax.cases import against_oracle

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("mosaickv_dynamic")]


DYNAMIC = {
    "strategy": "dynamic",
    "fraction": 0.3,
    "segment": 128,
    "buffer": 16,
    "max_loss": 0.12,
    "max_variance": 0.5,
    "lifetime": 60.0,
}
DYNAMIC_STEPS = 150


@functools.cache
def uneven():
    """Rows whose KV heads want different strategies, and whose decoded tokens lie in other directions than the prompt.

    Keys of head 0 drift slowly and lie in few directions; keys of head 1 jump and are nearly isotropic.
    """
    lengths, dim = (150, 40), 32
    total = max(lengths) + DYNAMIC_STEPS
    q, k, v = random_tokens(12, 2, 2, 2, total, dim)
    rng = np.random.default_rng(5)
    for row, length in enumerate(lengths):
        for h, (decay, slow) in enumerate([(1.2, 0.97), (0.35, 0.0)]):
            spectrum = np.arange(1, dim + 1.0) ** -decay * 3
            for first, stop in ((0, length), (length, length + 60), (length + 60, total)):
                for x, keep in ((k, slow), (v, 0.0)):
                    axes = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
                    noise = rng.normal(size=(stop - first, dim)) * spectrum
                    for t in range(1, stop - first):
                        noise[t] = keep * noise[t - 1] + math.sqrt(1 - keep**2) * noise[t]
                    x[row, h, first:stop] = noise @ axes
    return (q, k, v), lengths


def still(dim):
    """No rotation, so that slow keys stay slow."""
    return np.zeros(dim // 2, np.float32)


@pytest.mark.slow
def test_dynamic_strategy_follows_the_oracle():
    """Plans differ between heads and segments, output segments are finalised, and every step attends as it should."""
    data, lengths = uneven()
    _, traces = against_oracle("mosaickv", data, lengths, still(32), **DYNAMIC)
    for trace in traces:
        assert len(trace.finalised) >= 2
        assert any(plans[0] != plans[1] for plans in trace.plans)
    seen = {plan for trace in traces for plans in trace.plans for plan in plans}
    assert len({rank for rank, _, _ in seen}) >= 2 and len({block for _, _, block in seen}) >= 2
    assert len({group for _, group, _ in seen}) >= 2


@pytest.mark.parametrize(
    "changed",
    [
        {"max_loss": 0.0},
        {"max_loss": 1.0, "max_variance": 0.0},
        {"max_variance": 10.0, "max_loss": 0.2},
        {"segment": 32, "lifetime": 1e6},
        {"lifetime": 10.0},
    ],
    ids=str,
)
@pytest.mark.thorough
def test_every_dynamic_knob_equals_the_oracle(changed):
    data, lengths = uneven()
    steps = 70
    q, k, v = (x[..., : max(lengths) + steps, :] for x in data)
    _, traces = against_oracle("mosaickv", (q, k, v), lengths, still(32), **{**DYNAMIC, **changed})
    plans = {plan for trace in traces for plans in trace.plans for plan in plans}
    if changed.get("max_loss") == 0.0:
        assert {(rank, group) for rank, group, _ in plans} == {(12, 1)}
    if changed.get("max_loss") == 1.0:
        assert plans == {(4, 4, 4)}
    if changed.get("max_variance") == 10.0:
        assert {block for _, _, block in plans} == {16}
