"""What plain JAX computes piece by piece, so that little is in memory beside the cache, equals what it computes at once."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attend.dense_decode import Rotation
from pallas_kernels.attend.dense_decode import reference as dense
from pallas_kernels.attend.gather_attention import reference as gather
from pallas_kernels.numerics import even_block, join_pieces, sum_pieces

SLOTS, DIM = 37, 8


def drawn(seed):
    """A query, keys and values; slots that hold no token hold NaN."""
    rng = np.random.default_rng(seed)
    query, key, value = (rng.normal(size=(2, 2, n, DIM)).astype(np.float32) for n in (3, SLOTS, SLOTS))
    position = rng.permuted(
        np.where(np.arange(SLOTS) < 30, np.arange(SLOTS), -1)[None, None].repeat(2, 0).repeat(2, 1), axis=2
    )
    key[position < 0] = value[position < 0] = np.nan
    return tuple(map(jnp.asarray, (query, key, value, position.astype(np.int32))))


def at_once_and_in_pieces(monkeypatch, module, name, run):
    """The results of ``run`` before and after the constant ``name`` of the module is set to 10."""
    whole = run()
    monkeypatch.setattr(module, name, 10)
    for one, other in zip(whole, run(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_listed_rows(monkeypatch):
    query, key, value, position = drawn(0)
    options = {"scale": 0.3, "bias": None, "page_size": 1, "position": None, "inv_freq": jnp.ones(DIM // 2), "logits": True}
    slots = jnp.argsort(position, axis=2)
    held = jnp.take_along_axis(position, slots, axis=2)

    def run():
        return gather.gather_attention(query, key, value, slots, held >= 0, place=held, **options)

    at_once_and_in_pieces(monkeypatch, gather, "BLOCK", run)
    slope = jax.grad(
        lambda value: gather.gather_attention(query, key, value, slots, held >= 0, place=held, **options)[0].sum()
    )
    assert np.isfinite(slope(jnp.nan_to_num(value))).all()


def test_rotated_keys(monkeypatch):
    query, key, value, position = drawn(1)
    rotation = Rotation(jnp.ones(DIM // 2) / 3, jnp.asarray([[7, 9], [5, 70]], jnp.int32), 4)
    limit = jnp.asarray([SLOTS, 31], jnp.int32)

    def run():
        return dense.dense_decode(query, key, value, position=position, limit=limit, scale=0.3, rotation=rotation)

    at_once_and_in_pieces(monkeypatch, dense, "ROTATED_BLOCK", run)


def test_sums_and_lists():
    given = jnp.arange(2 * 37.0).reshape(2, 37)
    for block in (1, 10, 36, 37, 50):
        np.testing.assert_array_equal(join_pieces(lambda x, none: x * 2, block, given, None), given * 2)
        np.testing.assert_array_equal(sum_pieces(lambda x: x.sum(axis=1), block, given), given.sum(axis=1))
        assert even_block(37, block) <= block
