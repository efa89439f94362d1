"""What only RetroInfer has: clusters without room, exact estimates, refusals. Its oracle runs in test_scan.py."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.storage import empty_cache
from kvjax.methods import RetroInfer
from kvjax.methods.retroinfer.kmeans import centroids_of
from kvjax.methods.retroinfer.method import Clusters
from kvjax.protocol.method import Step
from pallas_kernels.numerics import merge_partials
from tests import goldens
from tests.oracles import retroinfer as oracle

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_the_oracle_clusters_as_the_released_code():
    golden = json.loads((goldens.FOLDER / "kvjax" / "retroinfer.json").read_text())
    rng, (tokens, dim, knobs) = np.random.default_rng(golden["seed"]), (golden[x] for x in ("tokens", "dim", "knobs"))
    key = rng.normal(size=(tokens, dim)) + rng.normal(size=(1, dim)) * 2
    parts = [range(first, first + knobs["segment"]) for first in range(0, tokens, knobs["segment"])]
    found = oracle.cluster(key, rng.normal(size=(tokens, dim)), parts, knobs["cluster_size"], knobs["iterations"])
    centroid, value_sum, members = zip(*found, strict=True)
    assert list(members) == golden["members"]
    np.testing.assert_allclose(centroid, golden["centroid"], atol=1e-5)
    np.testing.assert_allclose(value_sum, golden["value_sum"], atol=1e-5)


def test_clusters_without_room_are_estimated():
    """Six clusters in the order of their scores, of which two may be exact, if they have 32 tokens at most."""
    cases = [
        ((4, 4, 4, 4, 0, 4), [3, 5], [1, 2]),  # the empty one is neither
        ((4, 4, 4, 20, 4, 4), [4, 5], [2, 3]),
        ((4, 4, 4, 4, 29, 4), [5], [2, 3, 4]),
        ((4, 4, 4, 4, 4, 33), [], [2, 3, 4, 5]),  # and none behind it
    ]
    size = np.array([[size] for size, _, _ in cases], np.int32)
    aux = Clusters(
        centroid=np.broadcast_to(np.arange(6, dtype=np.float32)[:, None], (len(cases), 1, 6, 2)),
        # So the output says which are estimated.
        value_sum=np.where(size[..., None] > 0, np.eye(6, dtype=np.float32)[None, None], np.float32("nan")),
        size=size,
        start=np.broadcast_to(33 * np.arange(6, dtype=np.int32), size.shape),
        order=np.broadcast_to(np.arange(33 * 6, dtype=np.int32), (len(cases), 1, 33 * 6)),
        end=np.full((len(cases),), 33 * 6, np.int32),
        used=np.full((len(cases),), 6, np.int32),
        exact=np.full((len(cases), 1), -1, np.int32),
    )
    method = RetroInfer(fraction=2 / 6, estimated=2 / 6, cluster_size=4, num_sink=0)

    def select(aux):
        cache = empty_cache(len(cases), 1, 33 * 6, 2, "float32")
        query, position = jnp.ones((len(cases), 1, 1, 1, 2), jnp.float32), jnp.zeros((len(cases), 1), jnp.int32)
        found = method.select(cache, aux, Step(query=query, position=position, tokens=position, shared=None))
        return found.slots, found.mask, merge_partials(*(jnp.moveaxis(x, 2, 0) for x in found.partials))[0], found.select_aux

    slots, mask, partials, select_aux = jax.jit(select)(aux)
    for row, (sizes, exact, estimated) in enumerate(cases):
        want = [33 * c + i for c in exact for i in range(sizes[c])]
        assert np.asarray(slots[row, 0])[np.asarray(mask[row, 0])].tolist() == want
        assert np.flatnonzero(partials[row, 0, 0]).tolist() == estimated
        assert select_aux[row, 0] == len(want)


def test_wrong_sizes_are_refused():
    key, mean = (jax.ShapeDtypeStruct((1, 1, n, 4), jnp.float32) for n in (10, 1))
    used, count = jax.ShapeDtypeStruct((1, 10), bool), jax.ShapeDtypeStruct((1,), jnp.int32)
    with pytest.raises(ValueError, match="as many keys as centroids, got 10 keys and 11 centroids"):
        jax.eval_shape(functools.partial(centroids_of, most=11, rounds=1), key, mean, used, count)
