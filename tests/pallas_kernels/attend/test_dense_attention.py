"""Dense attention of a cache with holes, and its column mass, against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _cudnn
from pallas_kernels.attend.dense_attention import cudnn, dense_attention
from pallas_kernels.numerics import merge_partials
from pallas_kernels.score.column_mass import column_mass
from pallas_kernels.soft_cap import soft_cap
from tests.pallas_kernels import cases


def added(query, key, value, *, scale, bias):
    """Compute what cuDNN computes with a bias, in plain JAX; it takes no odd lengths and no NaN."""
    assert query.shape[2] % 2 == key.shape[2] % 2 == 0
    assert bias.dtype == query.dtype and bias.shape == (len(query), 1, query.shape[2], key.shape[2])
    dtype, (query, key, value, bias) = query.dtype, (x.astype(jnp.float32) for x in (query, key, value, bias))
    logits = scale * jnp.einsum("bntd,bsd->bnts", query, key[:, 0]) + bias
    lse = jax.nn.logsumexp(logits, axis=-1)
    return jnp.einsum("bnts,bsd->bntd", jnp.exp(logits - lse[..., None]), value[:, 0]).astype(dtype), lse


@pytest.fixture
def on_cpu(monkeypatch):
    """The implementation for cuDNN, with plain JAX in the place of cuDNN, whose products are exact on a GPU too."""
    monkeypatch.setattr(_cudnn, "fused_attention", added)
    with jax.default_matmul_precision("highest"):
        yield functools.partial(cudnn.dense_attention, query_first=None, scale=cases.SCALE, limit=None, block=1024)


@pytest.mark.parametrize(("block", "dtype"), [(7, "float32"), (1024, "bfloat16")])
@pytest.mark.parametrize(("group", "dim", "length"), cases.one_shape((4, 64, 5), (1, 128, 1)))
def test_attention_and_column_mass_equal_float64(block, dtype, group, dim, length):
    (query, key, value), positions = cases.positioned_cache(group, group, dim, length, dtype=dtype)
    expected = cases.dense_oracle(query, key, value, **positions)
    run = cases.compiled(dense_attention, scale=cases.SCALE, block=block)
    out, lse = run(query, key, value, **positions)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    cases.close((out, lse), expected[:2], dtype)
    assert not np.any(out[0, 1]) and not np.any(out[1, :, :, 0])
    mass = cases.compiled(column_mass, scale=cases.SCALE, block=block)(query, key, lse, **positions)
    assert mass.dtype == jnp.float32
    cases.close(mass, expected[2].sum((2, 3)), dtype)


@pytest.mark.parametrize("limit", [0, 16, 20, 50])
def test_a_limit_hides_nothing_and_skips_the_rest(limit):
    (query, key, value), positions = cases.positioned_cache(7)
    positions["key_position"] = jnp.where(jnp.arange(50)[None, None] < limit, positions["key_position"], -1)
    run = cases.compiled(dense_attention, scale=cases.SCALE, block=16)
    plain = run(query, key, value, **positions)
    bounded = run(query, key, value, **positions, limit=jnp.int32(limit))
    cases.alike(plain, bounded, rtol=1e-6, atol=1e-6)
    if limit == 16:  # a limit that lies skips whole blocks: the loop really stops there
        (_, _, _), full = cases.positioned_cache(7)
        early = run(query, key, value, **full, limit=jnp.int32(limit))
        cases.alike(plain, early, rtol=1e-6, atol=1e-6)


def test_chunks_of_a_prompt_skip_the_future():
    """Whole blocks in the future are never read, so NaN in the values there changes nothing."""
    (query, key, value), positions = cases.positioned_cache(8, slots=64)
    positions["key_position"] = jnp.broadcast_to(jnp.arange(64), (2, 2, 64))
    positions["query_position"] = jnp.broadcast_to(jnp.arange(10, 15), (2, 5))
    key, value = np.nan_to_num(key), np.nan_to_num(value)
    value[:, :, 16:] = np.nan
    out, _ = cases.compiled(dense_attention, scale=cases.SCALE, block=16)(query, key, value, **positions)
    cases.close(out, cases.dense_oracle(query, key, value, **positions)[0], "float32")


@pytest.mark.parametrize("name", ["xla", pytest.param("cudnn", marks=cases.NEEDS_GPU)])
def test_a_query_sees_nothing_before_its_first_position(name):
    dtype = "float32" if name == "xla" else "bfloat16"
    arrays, positions = cases.positioned_cache(9, dtype=dtype)
    positions["query_first"] = jnp.maximum(positions["query_position"] - 9, 0)
    run = cases.compiled(dense_attention, scale=cases.SCALE, block=16, implementation=name)
    cases.close(run(*arrays, **positions), cases.dense_oracle(*arrays, **positions)[:2], dtype)


@pytest.mark.parametrize(("dtype", "width"), [("float32", None), ("bfloat16", 9)])
def test_a_bias_for_cudnn_hides_what_no_query_sees(on_cpu, dtype, width):
    """Lengths are odd, empty slots hold NaN, one cache is empty, and one query is padding."""
    arrays, positions = cases.positioned_cache(10, length=5, slots=51, dtype=dtype)
    if width is not None:
        positions["query_first"] = jnp.maximum(positions["query_position"] - width, 0)
    out, lse = jax.jit(on_cpu)(*arrays, **positions)
    expected = cases.dense_oracle(*arrays, **positions)
    cases.close((out, lse), expected[:2], dtype)
    assert not np.any(out[0, 1]) and not np.any(out[1, :, :, 0])


def test_a_mapped_bias_equals_calls_one_by_one(on_cpu):
    """Also where the positions of queries are the same for all calls."""
    (first, positions), (second, others) = (cases.positioned_cache(seed) for seed in (11, 12))

    @jax.jit
    def run(arrays, held):
        return on_cpu(*arrays, query_position=positions["query_position"], key_position=held)

    cases.one_by_one(run, (first, positions["key_position"]), (second, others["key_position"]))


def test_parts_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="merge_partials"):
        merge_partials(jnp.zeros((2, 3, 4)), jnp.zeros((2, 4)))


def test_the_derivative_is_that_of_capped_logits():
    """Of a compiled function: JAX traces the loop's rule when the context of the cap has ended."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(3 * rng.normal(size=(1, 2, *shape, 8)), jnp.float32) for shape in ((1, 5), (5,), (5,)))
    position = jnp.arange(5, dtype=jnp.int32)[None]
    places = {"query_position": position, "key_position": position[:, None].repeat(2, axis=1)}

    @jax.jit
    def looped(query):
        with soft_cap(0.7):
            out, _ = dense_attention(query, key, value, **places, scale=0.5, implementation="xla")
        return out.sum()

    def plain(query):
        logits = 0.7 * jnp.tanh(jnp.einsum("bhgtd,bhsd->bhgts", query, key) * 0.5 / 0.7)
        weight = jax.nn.softmax(jnp.where(jnp.tri(5, dtype=bool)[None, None, None], logits, -jnp.inf), axis=-1)
        return jnp.einsum("bhgts,bhsd->bhgtd", weight, value).sum()

    np.testing.assert_allclose(jax.grad(looped)(query), jax.grad(plain)(query), atol=1e-5)
