"""Retrieval by a scan: codes that are read back, their bytes, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.methods import SOCKET, InfiniGen, MagicPIG, PQCache, RetrievalAttention
from kvjax.methods.pqcache.product_codes import kmeans
from kvjax.protocol.method import LayerSpec
from kvjax.testing.model import TinyModel
from pallas_kernels.formats import bit_codes
from tests.harness import example, small
from tests.kvjax.cases import subject

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.slow
@pytest.mark.xdist_group("magicpig")
def test_samples_without_room_are_counted():
    """MagicPIG's counter is the share of steps and KV heads that sampled more tokens than a KV head may read."""
    some, every = example("magicpig"), example("magicpig", capacity=None)
    capped, whole = (subject("magicpig").drive(method=method) for method in (some, every))
    less = capped.attended.sum(axis=-1) < whole.attended.sum(axis=-1)
    got = some.counters(capped.state.aux, None)["overflowed"]
    np.testing.assert_allclose(got, less.mean(axis=(0, 2)), rtol=1e-6)
    assert got.max() > 0 and got.min() < 1 and not every.counters(whole.state.aux, None)


def test_packed_codes_are_read_back():
    """Whether they were packed together or came one by one; padding, behind the last slot, changes nothing."""
    codes = np.random.default_rng(0).integers(0, 1 << 16, (2, 1, 21))

    @jax.jit
    def both(codes):
        found = []
        for bits in (5, 12):
            code = codes & ((1 << bits) - 1)
            packed = bit_codes.pack(jnp.where(jnp.arange(21)[None, None] < 13, code, 0), bits)
            slot = jnp.asarray([[13, 14, 15, 16, 17, 18, 19, 20, 21]] * 2, jnp.int32)
            new = jnp.where(slot < 21, jnp.take_along_axis(code[:, 0], jnp.minimum(slot, 20), axis=1), 0)
            made = bit_codes.add(packed, new[:, None], slot, bits)
            found.append((code, bit_codes.unpack(bit_codes.pack(code, bits), 21, bits), bit_codes.unpack(made, 21, bits)))
        return found

    for want, together, added in both(jnp.asarray(codes, jnp.int32)):
        np.testing.assert_array_equal(together, want)
        np.testing.assert_array_equal(added, want)


def state_of(method, head_dim=128, slots=4096):
    spec = LayerSpec(
        batch=1, num_kv_heads=2, group_size=4, head_dim=head_dim, dtype="bfloat16", prompt_slots=slots - 64,
        max_new_tokens=64,
    )  # fmt: skip
    return jax.eval_shape(lambda: method.finish(method.init(spec), spec))


@pytest.mark.parametrize(
    "method, per_token, more",
    [
        (RetrievalAttention(), 0, 4 + 2 * 4),  # the slot where the prompt's last tokens begin; what was found
        (PQCache(), 1.5, 4 + 2 * (2 * 64 * 64 * 4)),  # the prompt's tokens; codebooks
        (InfiniGen(), 50, 2 * (128 * 25 * 4 + 4 * 128 * 2)),  # the matrix; the last guesses
        (SOCKET(), 60 + 2, 0),
        (SOCKET(num_bits=10), 120 + 2, 0),
        (MagicPIG(), 300, 4 + 4 + 2 * (128 * 4 + 2 * 4 - 64 * 300)),  # no bucket of later tokens; the mean key, counts
    ],
    ids=lambda x: type(x).__name__,
)
def test_codes_take_their_bytes_per_token(method, per_token, more):
    """Per token and KV head, in bfloat16 at the methods' own sizes; and what does not grow."""
    found = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state_of(method).aux))
    assert found == per_token * 2 * 4096 + more


def test_what_cannot_be_cut_or_clustered_is_refused():
    with pytest.raises(ValueError, match="PQCache: num_subvectors must divide head_dim=16, got 3"):
        state_of(PQCache(num_subvectors=3, num_centroids=16), head_dim=16)
    with pytest.raises(ValueError, match="PQCache: a key must have at most 16 bits, got num_subvectors=4 .*=64.* are 24"):
        PQCache(num_subvectors=4)
    key, used = jax.ShapeDtypeStruct((1, 1, 10, 8), jnp.float32), jax.ShapeDtypeStruct((1, 1, 10), bool)
    for parts, count, said in ((2, 11, "got 10 keys and 11 centroids"), (3, 4, "multiple of the 3 parts .* head_dim=8")):
        with pytest.raises(ValueError, match=said):
            jax.eval_shape(functools.partial(kmeans, parts=parts, count=count, iterations=1), key, used)


def test_the_structure_of_a_state_does_not_depend_on_sizes():
    """A saved cache is loaded into the structure of another prompt; this one has fewer slots than centroids."""
    for method in (RetrievalAttention(), PQCache(num_centroids=256), SOCKET(), MagicPIG(), InfiniGen()):
        assert jax.tree.structure(state_of(method, slots=65)) == jax.tree.structure(state_of(method))


def test_some_layers_of_magicpig_are_dense():
    layers = [type(MagicPIG().for_layer(layer, 40)).__name__ for layer in range(40)]
    assert [layer for layer, name in enumerate(layers) if name == "Full"] == [0, 16, 32]
    assert set(layers) == {"Full", "MagicPIG"}
    assert {type(small(MagicPIG, dense_every=0).for_layer(layer, 40)).__name__ for layer in range(40)} == {"MagicPIG"}


def test_memory_needed_counts_the_codes():
    sizes = {"batch": 1, "prompt_slots": 4096, "max_new_tokens": 64, "chunk_size": 4096}
    tiny = TinyModel(num_layers=1)
    full, socket = (kvjax.memory_needed(name, tiny, **sizes).device for name in ("full", "socket"))
    each = 60 + jnp.dtype(tiny.dtype).itemsize
    assert socket - full == tiny.num_kv_heads * (4096 + 64) * each
