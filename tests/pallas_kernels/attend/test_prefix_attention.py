"""A chunk of a prompt over what came before it, and over the slots of a cache, against float64 NumPy; cuDNN on a GPU.

Pallas does not interpret the kernel of Mosaic GPU, so it is lowered here, and on a Hopper GPU it runs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._mosaic_gpu import prompt
from pallas_kernels.attend.past_attention import past_attention
from pallas_kernels.attend.prefix_attention import prefix_attention, reference
from pallas_kernels.machine import assume_machine
from tests.oracles.adaptive_prompt import blasst_blocks
from tests.pallas_kernels.attend.test_mosaic_gpu import lowered
from tests.pallas_kernels.cases import NEEDS_GPU, ON_HOPPER, SCALE, close, one_by_one, softmax_attention
from tests.pallas_kernels.operations import choose

TOKENS, SLOTS = 16, 104
KERNELS = pytest.param("cudnn", "bfloat16", marks=NEEDS_GPU), pytest.param("pallas_mosaic_gpu", "bfloat16", marks=ON_HOPPER)
every_case = pytest.mark.parametrize(("name", "dtype"), [("xla", "float32"), ("xla", "bfloat16"), *KERNELS])
MOSAIC = functools.partial(prefix_attention, scale=SCALE, implementation="pallas_mosaic_gpu")


def chunk(rows, heads=2, group=3, dim=64, tokens=TOKENS, slots=SLOTS):
    """Random queries of a chunk, and keys and values."""
    rng = np.random.default_rng(0)
    shapes = (rows, heads, group, tokens, dim), (rows, heads, slots, dim), (rows, heads, slots, dim)
    return [rng.normal(size=shape) for shape in shapes]


def expected(query, key, value, seen):
    return softmax_attention(query, key[:, :, None], value[:, :, None], seen)[:2]


@every_case
def test_queries_see_the_first_slots_of_their_row(name, dtype):
    arrays, count = [jnp.asarray(x, dtype) for x in chunk(3)], np.asarray([104, 37, 0], np.int32)
    run = jax.jit(functools.partial(past_attention, scale=SCALE, implementation=name))
    out, lse = run(*arrays, count=count)
    assert not out[2].any() and (lse[2] == -jnp.inf).all()
    close((out, lse), expected(*arrays, (np.arange(SLOTS) < count[:, None])[:, None, None, None]), dtype)
    empty = [arrays[0], *(x[:, :, :0] for x in arrays[1:])]  # a cache without slots, which kernels leave to plain JAX
    out, lse = past_attention(*empty, count=jnp.zeros(3, jnp.int32), scale=SCALE)
    assert out.shape == arrays[0].shape and not out.any() and (lse == -jnp.inf).all()


def agrees(name, dtype, arrays, start, length, threshold=None):
    """Compare with float64, NaN behind the real tokens and in free memory; count the visible pairs that a threshold skips."""
    query, key, value = arrays
    rows, tokens = len(query), query.shape[3]
    real, first = np.full(rows, tokens) if length is None else np.asarray(length), np.broadcast_to(np.asarray(start), (rows,))
    for row in range(rows):
        query[row, :, :, real[row] :] = np.nan
        for x in (key, value):
            x[row, :, first[row] + real[row] : first[row] + tokens] = np.nan
    arrays = [jnp.asarray(x, dtype) for x in arrays]
    run = functools.partial(prefix_attention, scale=SCALE, implementation=name)
    run = functools.partial(run, start=start) if isinstance(start, int) else run
    if threshold is not None:
        run = functools.partial(run, threshold=jnp.full(query.shape[:3], threshold, jnp.float32))
    start = {} if isinstance(start, int) else {"start": start}
    length = None if length is None else jnp.asarray(length, jnp.int32)
    jnp.full((1 << 22,), jnp.nan).delete()
    out, lse = jax.jit(run)(*arrays, length=length, **start)
    token = np.arange(tokens)
    seen = np.arange(key.shape[2]) <= (first[:, None] + token)[..., None]
    seen = (seen & (token < real[:, None])[..., None])[:, None, None]
    if threshold is not None:
        kept = np.zeros((*query.shape[:4], key.shape[2]), bool)
        for row, head, g in np.ndindex(*query.shape[:3]):
            begin, stop = first[row], first[row] + real[row]
            q, k = (np.asarray(x, np.float64) for x in (arrays[0][row, head, g], arrays[1][row, head, :stop]))
            q = np.pad(SCALE * np.sqrt(q.shape[1]) * q[: real[row]], [(begin, 0), (0, 0)])
            for strip, blocks in enumerate(blasst_blocks(q, k, threshold, begin)):
                for j in blocks:
                    kept[row, head, g, 64 * strip : 64 * strip + 64, 192 * j : 192 * j + 192] = True
        whole, seen = seen, seen & kept
    close((out, lse), expected(np.nan_to_num(query), *arrays[1:], seen), "float32" if dtype == "float32" else "bfloat16")
    for row, end in enumerate(real):
        assert not out[row, :, :, end:].any() and (lse[row, :, :, end:] == -jnp.inf).all()
    return 0 if threshold is None else np.sum(np.broadcast_to(whole, seen.shape) & ~seen)


@every_case
@pytest.mark.parametrize(
    ("start", "length"),
    [(0, None), (jnp.int32(0), [16, 7]), (jnp.int32(88), None), (jnp.asarray([3, 99], jnp.int32), [16, 5])],
    ids=["whole prompt", "first chunk", "last chunk", "rows of their own"],
)
def test_token_t_sees_slots_up_to_its_own(name, dtype, start, length):
    agrees(name, dtype, chunk(2), start, length)


@ON_HOPPER
@pytest.mark.parametrize(
    ("rows", "heads", "group", "dim", "tokens", "slots", "start", "length", "dtype"),
    [
        (2, 2, 4, 128, 1000, 3000, jnp.asarray([1999, 0], jnp.int32), [1000, 137], "bfloat16"),
        (3, 1, 4, 64, 203, 208, 0, [203, 0, 77], "float16"),
        (1, 2, 1, 128, 513, 1032, jnp.int32(512), None, "bfloat16"),
        (1, 1, 8, 64, 130, 704, jnp.int32(574), None, "bfloat16"),
        (1, 1, 5, 128, 300, 304, 0, None, "bfloat16"),
        (1, 1, 1, 128, 1, 8, jnp.int32(7), [0], "bfloat16"),
    ],
)
def test_tiles_of_all_kinds_equal_float64(rows, heads, group, dim, tokens, slots, start, length, dtype):
    agrees("pallas_mosaic_gpu", dtype, chunk(rows, heads, group, dim, tokens, slots), start, length)


@pytest.mark.parametrize(("name", "dtype"), [("xla", "float32"), KERNELS[1]])
@pytest.mark.parametrize(
    ("rows", "group", "dim", "tokens", "slots", "start", "length"),
    [(2, 3, 64, 200, 976, jnp.asarray([776, 500], jnp.int32), [200, 130]), (1, 1, 128, 700, 704, 0, None)],
    ids=["rows of their own", "whole prompt"],
)
def test_a_threshold_skips_the_blocks_of_the_oracle(name, dtype, rows, group, dim, tokens, slots, start, length):
    """Three kinds of blocks and queries, whose logits are high with their own kind; of 64 queries the sixth is of another."""
    query, key, value = chunk(rows, 2, group, dim, tokens, slots)
    kinds = [np.arange(tokens) // 64 % 3, np.array([0, 2, 1, 0, 2, 1])[np.arange(slots) // 192]]
    kinds[0][5::64] += 1
    for x, kind in zip((query, key), kinds, strict=True):
        x *= 0.5
        x[..., :3] = 8 * np.eye(3)[kind % 3]
    assert agrees(name, dtype, (query, key, value), start, length, threshold=3.0) > 0
    assert agrees(name, dtype, (query, key, value), start, length, threshold=np.inf) == 0


@ON_HOPPER
def test_queries_and_places_are_mapped():
    query, key, value = (jnp.asarray(x, "bfloat16") for x in chunk(2, group=4, dim=128, tokens=200, slots=504))
    one_by_one(
        lambda query, start, level: MOSAIC(query, key, value, start=start, threshold=level),
        *((query * (i + 1), jnp.int32(100 * i), jnp.full(query.shape[:3], 2.0 * i)) for i in range(3)),
    )


def test_it_lowers_for_an_h100_and_says_where_it_cannot_run():
    shape, one = jax.ShapeDtypeStruct, (2, 2, 3)
    for dim, tokens in ((128, 203), (64, 16)):
        arrays = [shape((*lead, dim), "bfloat16") for lead in ((*one, tokens), (2, 2, 504), (2, 2, 504))]
        given = {"start": shape((2,), "int32"), "length": shape((2,), "int32")}
        assert lowered(MOSAIC, *arrays, **given) == 1 == lowered(MOSAIC, *arrays, **given, threshold=shape(one, "float32"))
    assert (reference.ROWS, reference.BLOCK) == (prompt.ROWS, prompt.BLOCK)
    with assume_machine("gpu", (9, 0)):
        for sizes, words in (({"D": 80}, "head_dim 80"), ({"P": 4, "T": 9}, "got 13 slots"), ({"scale": -0.1}, "positive")):
            with pytest.raises(NotImplementedError, match=words):
                choose("prefix_attention", implementation="pallas_mosaic_gpu", **{"D": 64} | sizes)
    with assume_machine("gpu", (8, 0)), pytest.raises(NotImplementedError, match="compute capability"):
        choose("prefix_attention", implementation="pallas_mosaic_gpu", D=64)
