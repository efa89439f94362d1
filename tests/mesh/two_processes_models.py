"""Parameters on a mesh of two processes with four devices each; `test_loading.py` runs it twice.

``python -m tests.mesh.two_processes_models NUMBER PORT DIRECTORY``: every process makes the model that is expected by itself.
"""

from __future__ import annotations

import pathlib
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType
from safetensors.numpy import load_file

import models
from models.files import adapter
from tests.mesh.eight_devices_models import WIDE, counted, factors_of, on
from tests.mesh.processes import one_of_two
from tests.tiny_models import vivid_params


def assert_parts(got, expected):
    """This process's parts equal the parts of ``expected``, in every bit."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape and not one.is_fully_addressable and len(one.addressable_shards) == 4
        for shard in one.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(other)[shard.index])


def main(number: int, directory: pathlib.Path) -> None:
    params = jax.tree.map(np.asarray, vivid_params(WIDE))
    if number == 0:
        models.save_pretrained(directory, params, WIDE)
    multihost_utils.sync_global_devices("saved")
    factors = factors_of(params)
    for kind in (AxisType.Auto, AxisType.Explicit):
        for data, model in ((1, 8), (2, 4), (8, 1)):
            mesh = on(data, model, kind)
            with counted() as reads:
                got, config = models.from_pretrained(directory, mesh=mesh)
            assert_parts(got, params)
            share = {8: 0.51, 4: 1.0, 1: 1.0}[model]  # of the file; norms are read by both processes
            assert sum(size for _, size in reads) <= share * sum(x.size for x in jax.tree.leaves(params))
            assert adapter.fingerprint(got) == adapter.fingerprint(params)
            assert_parts(adapter.merge_adapter(got, factors), adapter.merge_adapter(params, factors))
            again = directory / f"{kind.name}{model}"
            models.save_pretrained(again, got, config)
            written, wanted = (load_file(place / "model.safetensors") for place in (again, directory))
            assert written.keys() == wanted.keys()
            assert all(np.array_equal(written[name], wanted[name]) for name in wanted)
    key = jax.random.key(0)
    assert_parts(models.random_params(WIDE, key, mesh=mesh), models.random_params(WIDE, key))


if __name__ == "__main__":
    with one_of_two(int(sys.argv[1]), int(sys.argv[2])):
        main(int(sys.argv[1]), pathlib.Path(sys.argv[3]))
