"""Online eviction and what it goes by, against NumPy loops, on every implementation; interpreted where there is no GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dissimilarity as dissimilarity_package
from pallas_kernels import evict_token as evict_package
from pallas_kernels.column_mass import column_mass
from pallas_kernels.column_mass import pallas_triton as mass_triton
from pallas_kernels.dissimilarity import dissimilarity
from pallas_kernels.evict_token import evict_token

NEEDS_GPU = pytest.mark.skipif(jax.default_backend() != "gpu", reason=f"needs a GPU, got {jax.default_backend()}")
NAMES = ["xla", "interpreted", pytest.param("pallas_triton", marks=NEEDS_GPU)]


def chosen(name, operation, package):
    if name == "interpreted":
        return functools.partial(getattr(package.pallas_triton, operation.__name__), interpret=True)
    return functools.partial(operation, implementation=name)


def evict(name, *args, first=0, **kwargs):
    return jax.jit(functools.partial(chosen(name, evict_token, evict_package), first=first))(*args, **kwargs)


def case(batch=3, heads=2, slots=21, dim=16, dtype="float32", seed=0):
    """A cache whose rows are full, one token over budget 12, and below it; holes, tokens out of order, garbage in holes."""
    rng = np.random.default_rng(seed)
    cursor = np.array([slots, 13, 7][:batch])
    position = np.full((batch, heads, slots), -1)
    for row, used in enumerate(cursor):
        for head in range(heads):
            position[row, head, :used] = np.append(rng.permutation(used - 1) * 3, used * 3)
            position[row, head, rng.integers(0, used - 1, 2)] = -1
    rows = [rng.normal(size=(batch, heads, slots, dim)) for _ in range(2)]
    for x in rows:
        x[position < 0] = np.nan
    score, gain = rng.integers(0, 4, (2, batch, heads, slots))
    arrays = [jnp.asarray(x, dtype) for x in rows]
    return (*arrays, jnp.asarray(position, jnp.int32), jnp.asarray(cursor, jnp.int32)), tuple(
        jnp.asarray(x, jnp.float32) for x in (score, gain)
    )


def oracle(key, value, position, cursor, score, *, budget, gain=None, first=0, recent=0):
    """Loops over rows and heads."""
    key, value, position, cursor = (np.array(x, np.float64) for x in (key, value, position, cursor))
    total = None if score is None else np.array(score, np.float64) + (0 if gain is None else np.array(gain))
    for row, used in enumerate(cursor.astype(int)):
        if used <= budget:
            continue
        last = used - 1
        for head, places in enumerate(position[row]):
            old = [s for s, p in enumerate(places) if p >= first and 0 <= p <= places.max() - recent]
            rank = places if total is None else total[row, head]
            worst = min(old, key=lambda s, rank=rank, places=places: (rank[s], -places[s]), default=0)
            key[row, head, worst], value[row, head, worst] = key[row, head, last], value[row, head, last]
            if total is not None:
                carried, total[row, head, last] = total[row, head, last], 0
                total[row, head, worst] = carried
            places[worst] = places[last]
            places[last] = -1
        cursor[row] = last
    return key, value, position, cursor, total


KNOBS = {
    "by score": {"budget": 12},
    "nothing over budget": {"budget": 21},
    "the newest and the first are safe": {"budget": 12, "first": 4, "recent": 9},
    "nothing may go": {"budget": 12, "recent": 1000},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("label", KNOBS)
@pytest.mark.parametrize("scores", ["none", "score", "score and gain"])
def test_evict_token_matches_a_loop(name, label, scores):
    args, (score, gain) = case()
    knobs = KNOBS[label] | ({"gain": gain} if "gain" in scores else {})
    score = None if scores == "none" else score
    for x, want in zip(evict(name, *args, score, **knobs), oracle(*args, score, **knobs), strict=True):
        assert (x is None) == (want is None)
        if x is not None:
            np.testing.assert_array_equal(np.asarray(x, np.float64), want)


@pytest.mark.parametrize("name", NAMES)
def test_evict_token_under_vmap_over_budgets(name):
    args, (score, _) = case(dtype="bfloat16")
    budgets = jnp.asarray([6, 12, 20], jnp.int32)
    got = jax.vmap(lambda budget: evict(name, *args, score, budget=budget, recent=budget // 2))(budgets)
    for lane, budget in enumerate(budgets.tolist()):
        for x, want in zip(got, oracle(*args, score, budget=budget, recent=budget // 2), strict=True):
            np.testing.assert_array_equal(np.asarray(x[lane], np.float64), want)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slots", [5, 64, 150])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dissimilarity_matches_float64(name, slots, dtype):
    rng = np.random.default_rng(slots)
    position = rng.integers(-1, 3, (2, 3, slots))
    position[1, 2] = -1
    key = np.where(position[..., None] < 0, np.nan, rng.normal(size=(2, 3, slots, 32)) + 0.5)
    key[0, 0, 0] = 0  # a key without a direction
    key = jnp.asarray(key, dtype)
    run = jax.jit(chosen(name, dissimilarity, dissimilarity_package))
    got = np.asarray(run(key, jnp.asarray(position, jnp.int32)))
    exact = np.where(position[..., None] < 0, 0, np.asarray(key, np.float64))
    unit = exact / np.maximum(np.linalg.norm(exact, axis=-1, keepdims=True), 1e-8)
    mean = unit.sum(2) / np.maximum((position >= 0).sum(2), 1)[..., None]
    mean = mean / np.maximum(np.linalg.norm(mean, axis=-1, keepdims=True), 1e-8)
    np.testing.assert_allclose(got, -np.einsum("bhsd,bhd->bhs", unit, mean), atol=2e-6)


@pytest.mark.parametrize("name", ["xla", "interpreted", NAMES[2]])
@pytest.mark.parametrize(("group", "slots", "dtype"), [(1, 5, "float32"), (3, 64, "float32"), (4, 150, "bfloat16")])
def test_column_mass_of_one_query_matches_float64(name, group, slots, dtype):
    rng = np.random.default_rng(slots)
    asked = np.array([[40], [-1]])
    position = rng.integers(-1, 60, (2, 2, slots))
    key = np.where(position[..., None] < 0, np.nan, rng.normal(size=(2, 2, slots, 32)))
    query, key = jnp.asarray(rng.normal(size=(2, 2, group, 1, 32)), dtype), jnp.asarray(key, dtype)
    seen = (position >= 0) & (position <= asked[:, :, None])
    logits = 0.3 * np.einsum("bhgd,bhsd->bhgs", *(np.nan_to_num(np.asarray(x, np.float64)) for x in (query[..., 0, :], key)))
    weight = np.where(seen[:, :, None], np.exp(logits), 0)
    total = weight.sum(-1, keepdims=True)
    lse = jnp.asarray(np.log(total, where=total > 0, out=np.full_like(total, -np.inf)), jnp.float32)
    run = (
        functools.partial(mass_triton.column_mass, interpret=True, limit=None, block=1024)
        if name == "interpreted"
        else functools.partial(column_mass, implementation=name)
    )
    positions = {"query_position": jnp.asarray(asked, jnp.int32), "key_position": jnp.asarray(position, jnp.int32)}
    got = jax.jit(functools.partial(run, scale=0.3))(query, key, lse, **positions)
    want = (weight / np.where(total > 0, total, 1)).sum(2)
    np.testing.assert_allclose(got, want, atol=2e-2 if dtype == "bfloat16" and name == "xla" else 1e-5)


def test_what_does_not_fit_is_refused():
    args, (score, gain) = case()
    with pytest.raises(ValueError, match="evict_token: got key .* cursor .2,., expected"):
        evict_token(*args[:3], args[3][:2], score, budget=3)
    with pytest.raises(ValueError, match="got score and gain .*, and a score with a gain"):
        evict_token(*args, None, gain=gain, budget=3)
    with pytest.raises(NotImplementedError, match="head_dim 24, expected a power of two"):
        wide = [jnp.zeros((3, 2, 21, 24))] * 2
        evict_token(*wide, *args[2:], score, budget=3, implementation="pallas_triton", platform="gpu")
    with pytest.raises(ValueError, match="dissimilarity: got key"):
        dissimilarity(args[0], args[2][:1])
    with pytest.raises(NotImplementedError, match="head_dim 8, expected"):
        dissimilarity(args[0][..., :8], args[2], implementation="pallas_triton", platform="gpu")
    with pytest.raises(NotImplementedError, match="got 2 queries, expected 1"):
        column_mass(
            jnp.zeros((3, 2, 1, 2, 16)),
            args[0],
            jnp.zeros((3, 2, 1, 2)),
            query_position=jnp.zeros((3, 2), jnp.int32),
            key_position=args[2],
            scale=1.0,
            implementation="pallas_triton",
            platform="gpu",
        )
