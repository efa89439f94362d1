"""Parameters on a mesh: the parts of a parameter here; the rest in a process with eight devices (`eight_devices.py`)."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import models
from models import sharding
from models.files.tables import checkpoint as checkpoint_table
from tests.mesh import eight_devices_models
from tests.mesh.processes import found_in, run_two
from tests.tiny_models import FAMILIES

CHECKS = [name for name in vars(eight_devices_models) if name.startswith("check_")]
MIXTRAL = models.Experts(num_experts=3, num_experts_per_tok=2, intermediate_size=48, norm_topk_prob=True, layers=(0, 1))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What one process with eight devices found, by the names of `CHECKS`."""
    return found_in("tests.mesh.eight_devices_models", tmp_path_factory.mktemp("mesh"))


@pytest.mark.slow
@pytest.mark.xdist_group("eight_devices")
@pytest.mark.parametrize("name", CHECKS)
def test_loading_holds_on_eight_devices(found, name):
    assert found[name] is None, found[name]


@pytest.mark.thorough
@pytest.mark.xdist_group("eight_devices")
def test_loading_holds_where_no_process_sees_all_devices(tmp_path):
    """Loading, adapters, saving and random parameters where no process can see all devices."""
    run_two("tests.mesh.two_processes_models", tmp_path, devices=4)


CONFIGS = {
    **FAMILIES,
    "mixtral": models.ModelConfig(**{**vars(FAMILIES["llama"]), "experts": MIXTRAL}),
    "mixed": eight_devices_models.MIXED,
}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_part_is_joined_from_parts_of_the_file(family):
    """Along the dimension that is split: the slices of the file's tensors make the slice of the parameter, and no more."""
    config = CONFIGS[family]
    rng = np.random.default_rng(0)
    pieces = 3 if family == "untiled_heads" else 2
    for leaf in checkpoint_table.checkpoint_table(config):
        file = [rng.normal(size=leaf.file_shape(i)) for i in range(len(leaf.names))]
        whole = leaf.join(file)
        dims = [dim for dim, axis in enumerate(sharding.param_spec(leaf.path, whole.ndim)) if axis]
        assert len(dims) == (0 if "norm" in leaf.path or "router" in leaf.path else 1)
        for number in range(pieces if dims and whole.shape[dims[0]] % pieces == 0 else 0):
            index = [slice(None)] * whole.ndim
            size = whole.shape[dims[0]] // pieces
            index[dims[0]] = slice(number * size, (number + 1) * size)
            part, where = leaf.part(tuple(index))
            read = [tensor[at] for tensor, at in zip(file, where, strict=True)]
            np.testing.assert_array_equal(part.join(read), whole[tuple(index)])
            assert sum(x.size for x in read) == whole[tuple(index)].size


def test_specs_split_layers_and_tables_over_the_model_axis():
    specs = sharding.param_specs(models.param_shapes(eight_devices_models.MIXED))
    flat = flatten_dict(specs, sep="/")
    split = {path: tuple(spec) for path, spec in flat.items() if path.startswith(("layers_1", "embed")) and any(spec)}
    assert split == {
        "embed/embedding": ("model", None),
        "layers_1/attention/qkv/kernel": (None, "model"),
        "layers_1/attention/out/kernel": ("model", None),
        "layers_1/mlp/gate_up/kernel": (None, None, None, "model"),
        "layers_1/mlp/down/kernel": (None, "model", None),
    }
    assert jax.tree.structure(specs) == jax.tree.structure(models.param_shapes(eight_devices_models.MIXED))
