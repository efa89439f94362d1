"""Both of ParisKV's stages in one kernel against NumPy loops of each."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.choose.pariskv.choice import choice
from pallas_kernels.choose.pariskv.choice import pallas_mosaic_gpu as kernel
from pallas_kernels.formats.key_codes import rows as rows_of
from tests.pallas_kernels.cases import MOSAIC, compiled, every_body, implementations, on_hopper, thorough
from tests.pallas_kernels.choose import test_collision as votes
from tests.pallas_kernels.choose import test_rerank as best

RUN = implementations("choice") | on_hopper(choice)
FIRST, ENOUGH, CAPACITY = best.REGIONS.sinks, 60, 40


def problem(seed, ties=False, whole=True, **sizes):
    """Keys with ids and codes, and the candidates of each head by loops; queries of ``whole`` numbers, whose scores tie."""
    (query, signs, counts, ids, position, stop, shares), zone = votes.problem(seed, first=FIRST, **sizes)
    slots, dim = position.shape[2], query.shape[3]
    rng = np.random.default_rng(seed)
    query = query if whole else query + jnp.asarray(rng.normal(size=query.shape), jnp.float32)
    codes = rng.integers(0, 256, (*position.shape, dim // 2))
    weight = np.ones((*position.shape, dim // 8)) if ties else np.abs(rng.normal(size=(*position.shape, dim // 8)))
    codes = codes[:, :, rng.integers(0, 3, slots)] if ties else codes
    rows = rows_of(jnp.asarray(codes, jnp.uint8), jnp.asarray(weight, jnp.bfloat16))
    rows = jnp.where((position >= 0)[..., None], rows, 255)  # a weight that is NaN
    cursor = jnp.asarray([slots, int(stop[1]) + 30], jnp.int32)
    means, candidates = np.zeros((*zone.shape[:2], dim), np.float32), np.full((*zone.shape[:2], CAPACITY), -1, np.int32)
    for b, h in np.ndindex(zone.shape[:2]):
        means[b, h] = votes.rotated(query[b, h], signs)
        found = votes.oracle(means[b, h], np.asarray(ids[b, h]), zone[b, h], CAPACITY)
        candidates[b, h, : len(found)] = found
    stages = means, candidates, (candidates >= 0).sum(axis=2), rows, position, cursor, stop
    return (query, signs, counts, ids, rows, position, cursor, stop, shares), stages


def compare(name, arrays, stages, budget=10):
    run = compiled(RUN[name], first=FIRST, capacity=CAPACITY, regions=best.REGIONS, scale=best.SCALE)
    best.compare(stages, run(*arrays, jnp.int32(budget), jnp.int32(ENOUGH)), budget, ENOUGH)


@every_body
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        pytest.param({"holes": True, "stop": (200, 3)}, marks=thorough),  # an empty zone
        pytest.param({"ties": True}, marks=thorough),
        pytest.param({"dim": 128, "stop": (170, 25), "whole": False}, marks=thorough),  # a row with few tokens
    ],
    ids=["two rows", "holes", "ties", "all channels"],
)
def test_lists_equal_loops(name, sizes):
    compare(name, *problem(1, **sizes))


@pytest.mark.thorough
@pytest.mark.parametrize("name", [MOSAIC])
@pytest.mark.parametrize(("parts", "groups"), [(1, 2), (2, 2), (4, 1)])
def test_programs_of_any_number_agree(name, parts, groups, monkeypatch):
    """Programs of a cluster estimate candidates that another one has listed."""
    share = kernel.share_of
    monkeypatch.setattr(kernel, "share_of", lambda *given: share(*given, parts, groups))
    compare(name, *problem(2, dim=128, whole=False))
