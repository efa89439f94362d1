"""MosaicKV's packing of vectors: which coordinates stay, in how many bytes, and what that loses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.methods.mosaickv.strategy import bytes_per_vector
from pallas_kernels.formats.packed_vectors import channel_score, pack_channels
from pallas_kernels.formats.packed_vectors import unpack as unpacked
from tests.oracles import mosaickv

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_bytes_equal_the_paper():
    """A key, a value and a share of a block's mean: 170 bytes a token, 512 in bfloat16: the 3x of the paper."""
    sizes = ((128, 32, 1, 8, 170), (128, 32, 1, 16, 165), (128, 32, 4, 8, 144.5), (64, 16, 2, 4, 81))
    for dim, rank, group, block, want in sizes:
        assert bytes_per_vector(rank, dim, group, 2) * (2 + 1 / block) == want


def samples(dim, seed=0):
    """float32 [N, D]: random vectors, vectors full of ties, one-hot vectors, a zero vector."""
    rng = np.random.default_rng(seed)
    tied = rng.integers(-2, 3, (24, dim))
    flat = np.ones((1, dim)) * -3
    return np.concatenate([rng.normal(size=(24, dim)), tied, flat, np.eye(dim)[:5], np.zeros((1, dim))]).astype("f4")


@functools.partial(jax.jit, static_argnums=(1, 2))
def pack(y, rank, group):
    return pack_channels(y, channel_score(y.astype(jnp.float32), group), rank, y.dtype)


unpack = jax.jit(unpacked, static_argnums=2)


@pytest.mark.parametrize("dim, rank, group", [(16, 4, 1), (16, 4, 2), (16, 4, 4), (16, 16, 1), (128, 32, 4)])
def test_packing_round_trip(dim, rank, group):
    """Unpacking gives the vector with all but its largest coordinates zero; ties and zero vectors go to low channels."""
    y = samples(dim)
    values, bitmap = pack(y, rank, group)
    assert values.shape == (len(y), rank) and values.dtype == jnp.float32
    assert bitmap.shape == (len(y), dim // 8) and bitmap.dtype == jnp.uint8
    np.testing.assert_array_equal(np.unpackbits(np.asarray(bitmap), axis=1).sum(axis=1), rank)
    want = np.stack([mosaickv.prune(x.astype(np.float64), rank, group) for x in y])
    np.testing.assert_array_equal(unpack(values, bitmap, dim), want.astype(np.float32))
    mask = unpack(jnp.ones_like(values), bitmap, dim)
    picked = [mosaickv.largest(x.astype(np.float64) ** 2, rank, group) for x in y]
    for row, channels in zip(np.asarray(mask), picked, strict=True):
        assert np.flatnonzero(row).tolist() == channels
    order = np.take_along_axis(y, np.array(picked), axis=1)
    np.testing.assert_array_equal(values, order)  # values lie in channel order


def test_packing_takes_any_leading_axes_and_dtype():
    y = samples(16)[:24].reshape(2, 3, 4, 16).astype(jnp.bfloat16)
    values, bitmap = pack(y, 4, 1)
    assert values.shape == (2, 3, 4, 4) and values.dtype == jnp.bfloat16 and bitmap.shape == (2, 3, 4, 2)
    flat_values, flat_bitmap = pack(y.reshape(24, 16), 4, 1)
    np.testing.assert_array_equal(values.reshape(24, 4), flat_values)
    np.testing.assert_array_equal(bitmap.reshape(24, 2), flat_bitmap)
    assert unpack(values, bitmap, 16).dtype == jnp.bfloat16


def energy(y, rank, group=1):
    """Energy of what packing keeps of each vector: float64 [N]."""
    kept = unpack(*pack(y, rank, group), y.shape[-1])
    return np.sum(np.asarray(kept, np.float64) ** 2, axis=-1)


def test_own_channels_keep_at_least_the_energy_of_common_ones():
    """For every vector, and for every choice of common channels that a uniform mask could make."""
    y, rank = samples(16), 4
    for channels in (np.argsort(-(y**2).sum(axis=0))[:rank], np.arange(rank), np.arange(16 - rank, 16)):
        assert (energy(y, rank) >= np.sum(y[:, channels].astype(np.float64) ** 2, axis=1) - 1e-6).all()


def test_loss_is_monotone_in_rank_and_group():
    y = samples(16)
    for group in (1, 4):
        kept = [energy(y, rank, group) for rank in (4, 8, 16)]
        assert all((more >= less).all() for less, more in zip(kept, kept[1:]))
        np.testing.assert_allclose(kept[-1], np.sum(y.astype(np.float64) ** 2, axis=1), rtol=1e-6)
    kept = [energy(y, 4, group) for group in (4, 2, 1)]
    assert all((fine >= coarse - 1e-6).all() for coarse, fine in zip(kept, kept[1:]))
