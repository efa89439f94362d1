"""`low_rank_attention` against float64 NumPy; the Pallas kernel runs interpreted here and compiled on a GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.shadowkv.low_rank_attention import pallas_triton
from pallas_kernels.host import to_host
from tests.pallas_kernels import cases

CONFIG = pallas_triton.Config(block=16, splits=2)
RUN = cases.implementations("low_rank_attention", config=CONFIG)


def problem(seed, group=3, dim=32, rank=48, page=4, listed=7, slots=50, dtype="float32", rows=2, heads=3):
    """Random factors and lists of different pages, the last of which the end of the slots may cut.

    What no list has is NaN. One list is empty, and so are the three parts beside it for two of its query heads.
    """
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(rows, heads, group, dim))
    left, right = rng.normal(size=(rows, slots, rank)) / np.sqrt(rank), rng.normal(size=(rows, heads, rank, dim))
    value = rng.normal(size=(rows, heads, slots, dim))
    total = -(-slots // page)
    pages = np.argsort(rng.random((rows, heads, total)), axis=-1)[..., :listed]
    mask = rng.random(pages.shape) < 0.7
    mask[0, 1], mask[1, 0], pages[1, 0, 0] = False, True, total - 1
    mask[1, 0, 1:] &= pages[1, 0, 1:] != total - 1
    seen = np.zeros((rows, heads, total), bool)
    for r, h in np.ndindex(rows, heads):
        seen[r, h, pages[r, h][mask[r, h]]] = True
    seen = np.repeat(seen, page, axis=2)[..., :slots]
    value[~seen], left[~seen.any(axis=1)] = np.nan, np.nan
    lse = 3 * rng.normal(size=(rows, heads, 3, group))
    lse[0, 1, :, 1:], lse[1, 2], lse[:, :, 1, 0] = -np.inf, -np.inf, -np.inf
    out = rng.normal(size=(*lse.shape, dim))
    out[lse == -np.inf] = np.nan
    arrays = [jnp.asarray(x, dtype) for x in (query, left, right, value)]
    pages = jnp.asarray(np.where(mask, pages, rng.choice([-(2**31), 2**31 - 1], pages.shape)), jnp.int32)
    inv_freq = jnp.asarray(1e4 ** (-np.arange(dim // 2) / (dim // 2)), jnp.float32)
    rest = {"inv_freq": inv_freq, "partials": tuple(jnp.asarray(x, jnp.float32) for x in (out, lse))}
    return [*arrays, pages, jnp.asarray(mask)], rest, seen


def oracle(args, rest, seen):
    query, left, right, value = (np.asarray(x, np.float64) for x in args[:4])
    key = np.nan_to_num(left)[:, None] @ right
    key = cases.rotated(key, np.arange(key.shape[2]), rest["inv_freq"])
    result = cases.softmax_attention(query, key, value, seen[:, :, None])[:2]
    if rest["partials"] is not None:
        for part in range(3):
            result = cases.joined([x[:, :, part] for x in rest["partials"]], *result)
    return result


SHAPES = cases.one_shape((3, 32, 48, 4, 7, 50), (1, 64, 160, 8, 12, 200), (8, 128, 16, 3, 5, 20), (4, 128, 160, 1, 40, 64))


@cases.every_body_and_dtype
@pytest.mark.parametrize(("group", "dim", "rank", "page", "listed", "slots"), SHAPES)
def test_attention_equals_float64(name, dtype, group, dim, rank, page, listed, slots):
    args, rest, seen = problem(slots, group, dim, rank, page, listed, slots, dtype)
    run = cases.compiled(RUN[name], scale=cases.SCALE, page_size=page)
    out, lse = run(*args, **rest)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    cases.close((out, lse), oracle(args, rest, seen), dtype)
    assert not np.any(out[0, 1, 1:]) and np.all(lse[0, 1, 1:] == -np.inf)
    cases.alike((out, lse), run(*args, **rest))


@cases.thorough
@cases.every_body
@pytest.mark.parametrize(("block", "splits"), [(16, 1), (64, 1), (32, 3)])
def test_nothing_beside_blocks_and_splits(name, block, splits):
    """At positions around 100,000: an angle is a product of float32 everywhere."""
    args, rest, seen = problem(1, page=16, rank=16, listed=9, slots=100_000)
    rest["partials"] = None
    config = pallas_triton.Config(block=block, splits=splits)
    run = cases.implementations("low_rank_attention", config=config)[name]
    got = cases.compiled(run, scale=cases.SCALE, page_size=16)(*args, **rest)
    cases.close(got, oracle(args, rest, seen), "float32")
    assert not np.any(got[0][0, 1]) and np.all(got[1][0, 1] == -np.inf)


@pytest.mark.parametrize("name", ["xla", pytest.param("pallas_triton", marks=cases.on_gpu.args[1][2].marks)])
def test_values_in_host_memory(name):
    args, rest, _ = problem(3)
    run = cases.compiled(RUN[name], scale=cases.SCALE, page_size=4)
    cases.alike(run(*args, **rest), run(*args[:3], to_host(args[3]), *args[4:], **rest))
