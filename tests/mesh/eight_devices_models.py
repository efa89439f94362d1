"""Parameters on a mesh: what only a process with many devices can show. `test_devices.py` runs it on eight of a CPU.

``python -m tests.mesh.eight_devices_models check ...`` runs functions, each on a folder of its own, and prints a JSON object:
by the name of each, the text of its exception, or null.
"""

import contextlib
import dataclasses
import itertools
import json
import pathlib
import re
import sys
import tempfile
from unittest import mock

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType, Mesh
from safetensors.numpy import load_file, save_file

import kvjax
import models
from models import sharding, weights
from models.files import adapter
from models.files import gguf as gguf_files
from models.files.tensors import SafeTensors
from tests.mesh.processes import refused, report
from tests.models import test_families, test_parity
from tests.tiny_models import TINY, factors_of, vivid_params

EXPERTS = models.Experts(num_experts=4, num_experts_per_tok=2, intermediate_size=16, norm_topk_prob=True, layers=(1,))
WIDE = models.ModelConfig(**{**TINY, "num_q_heads": 8, "num_kv_heads": 8, "head_dim": 4}, qkv_bias=True)
# The second layer has experts. No family has this, so it is never written.
MIXED = dataclasses.replace(WIDE, qkv_bias=False, qk_norm=True, experts=EXPERTS)
FAMILIES = ("qwen2_bias", "qwen3_tied", "mixtral", "phi3", "glm4", "olmo3", "qwen3_next", "qwen3_5_text", "minimax_m2")


def on(data: int, model: int, kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(kind, kind))


def assert_same(got, expected, mesh):
    """Equal in every bit, with the dtypes, and split as the specs say."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    leaves, specs = map(jax.tree.leaves, (got, expected)), sharding.param_specs(expected)
    for one, other, spec in zip(*leaves, jax.tree.leaves(specs, is_leaf=_is_spec), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype and one.sharding.mesh == mesh and one.sharding.spec == spec


def _is_spec(x):
    return isinstance(x, jax.sharding.PartitionSpec)


def saved(folder: pathlib.Path, config=WIDE):
    params = vivid_params(config)
    models.save_pretrained(folder / "model", params, config)
    return folder / "model", params


@contextlib.contextmanager
def counted():
    """A list of the tensors that are read within, as (name, number of elements)."""
    reads, read = [], SafeTensors._read

    def note(self, name, index):
        found = read(self, name, index)
        reads.append((name, found.size))
        return found

    with mock.patch.object(SafeTensors, "_read", note):
        yield reads


def check_codes_of_weights_are_divided_like_their_numbers(folder):
    config = models.ModelConfig(**{**TINY, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}, qkv_bias=True)
    params, tokens, mesh = models.random_params(config, jax.random.key(0)), np.arange(12)[None], on(4, 2)
    models.save_pretrained(folder, params, config)
    for weight_dtype in ("int8", "int4"):
        one, _ = models.from_pretrained(folder, weight_dtype=weight_dtype)
        spread, _ = models.from_pretrained(folder, weight_dtype=weight_dtype, mesh=mesh)
        for each in (spread, models.shard_params(one, mesh)):
            assert_same(each, one, mesh)
        made = []
        for each, rows in ((one, 1), (spread, 4)):
            cache = kvjax.prefill(each, np.repeat(tokens, rows, 0), config=config, method="full", max_new_tokens=4)
            made.append(np.asarray(kvjax.generate(each, cache, max_new_tokens=4).tokens)[0])
        np.testing.assert_array_equal(*made)
        drawn = (models.random_params(config, jax.random.key(0), weight_dtype=weight_dtype, mesh=x) for x in (mesh, None))
        assert_same(*drawn, mesh)
        try:
            models.shard_params(one, on(1, 8))  # parts of 32 numbers of a row
        except ValueError as error:
            assert "expected a number of devices that divides 128 into multiples of 64" in str(error), error
        else:
            raise AssertionError("a chunk was cut")


def check_every_family_loads_as_on_one_device(folder):
    """Also fused tensors and wide norms."""
    for name, kind in zip(FAMILIES, itertools.cycle((AxisType.Auto, AxisType.Explicit))):
        if name in test_families.NAMES:
            test_families.write_checkpoint(folder / name, test_families.golden(name))
        else:
            (folder / name).mkdir()
            test_parity.write_checkpoint(folder / name, test_parity.read_golden(name))
        expected, config = models.from_pretrained(folder / name)
        mesh = on(4, 2, kind)
        with counted() as reads:
            got, read = models.from_pretrained(folder / name, mesh=mesh)
        assert read == config
        assert_same(got, expected, mesh)
        assert sum(size for _, size in reads) == sum(leaf.size for leaf in jax.tree.leaves(expected))


def check_every_byte_is_read_once(folder):
    """By one process that has all devices, on every mesh; and replicas share what was read."""
    directory, params = saved(folder)
    tensors = {name: tensor.size for name, tensor in load_file(directory / "model.safetensors").items()}
    for mesh in (on(1, 8), on(2, 4), on(8, 1), Mesh(jax.devices(), ("model",)), Mesh(jax.devices(), ("data",))):
        with counted() as reads:
            got, _ = models.from_pretrained(directory, mesh=mesh)
        totals = dict.fromkeys(tensors, 0)
        for name, size in reads:
            totals[name] += size
        assert totals == tensors
        if "model" in mesh.axis_names:
            assert_same(got, params, mesh)
        parts = mesh.shape.get("model", 1)
        assert max(size for name, size in reads if "norm" not in name) <= max(tensors.values()) // parts


def check_shards_and_two_copies_of_a_tied_table(folder):
    config = dataclasses.replace(WIDE, tie_word_embeddings=True)
    directory, params = saved(folder, config)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    names = sorted(tensors)
    files = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, directory / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "model.safetensors").unlink()
    assert_same(models.from_pretrained(directory, mesh=on(2, 4))[0], params, on(2, 4))
    tensors["lm_head.weight"][-1] += 1  # in the last device's part
    file = weight_map["lm_head.weight"]
    save_file({name: tensors[name] for name in files[file]}, directory / file)
    with refused("embeddings are tied, but model.embed_tokens.weight and lm_head.weight differ"):
        models.from_pretrained(directory, mesh=on(2, 4))


def check_random_parameters_are_those_of_one_device(folder):
    """A few of them, since drawing takes long to compile."""
    layer = models.param_shapes(WIDE)["layers_0"]
    some = {"layers_0": {"mlp": {"gate_up": layer["mlp"]["gate_up"]}, "mlp_norm": layer["mlp_norm"]}}
    mesh, key = on(2, 4, AxisType.Explicit), jax.random.key(3)
    with mock.patch.object(weights, "param_shapes", lambda config, weight_dtype: some):
        assert_same(models.random_params(WIDE, key, mesh=mesh), models.random_params(WIDE, key), mesh)


def check_bytes_of_each_device(folder):
    params, mesh = jax.tree.map(np.asarray, vivid_params(MIXED)), on(2, 4)
    got = models.shard_params(params, mesh)
    assert_same(got, params, mesh)
    held = dict.fromkeys(mesh.devices.flat, 0)
    for leaf in jax.tree.leaves(got):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    sizes = {path: leaf.nbytes for path, leaf in flatten_dict(params, sep="/").items()}
    whole = sum(size for path, size in sizes.items() if "norm" in path or "router" in path)
    split = sum(sizes.values()) - whole
    assert set(held.values()) == {split // 4 + whole} and split > 10 * whole


def check_saved_from_a_mesh(folder):
    directory, params = saved(folder)
    got, config = models.from_pretrained(directory, mesh=on(1, 8, AxisType.Explicit))
    models.save_pretrained(folder / "again", got, config)
    for file in ("model.safetensors", "config.json"):
        assert (folder / "again" / file).read_bytes() == (directory / file).read_bytes()


def check_an_adapter_changes_the_parts(folder):
    params = jax.tree.map(np.asarray, vivid_params(WIDE))
    about = adapter.AdapterConfig(base="wide", fingerprint=adapter.fingerprint(params), rank=3, stretch=1.0)
    adapter.save_adapter(folder, factors_of(params), about)
    expected, _ = models.apply_adapter(params, WIDE, folder)
    mesh = on(2, 4, AxisType.Explicit)
    assert_same(models.apply_adapter(models.shard_params(params, mesh), WIDE, folder)[0], expected, mesh)


def check_gguf(folder):
    with np.load(test_parity.GOLDENS / "gguf" / "qwen2.npz") as golden:
        (folder / "tiny.gguf").write_bytes(golden["gguf"].tobytes())
    expected, config = models.from_pretrained(folder)
    mesh = on(2, 2) if config.num_kv_heads == 2 else on(8, 1)
    decoded, read = [], gguf_files.GGUFTensors.read

    def note(self, name, dtype):
        decoded.append(name)
        return read(self, name, dtype)

    with mock.patch.object(gguf_files.GGUFTensors, "read", note):
        assert_same(models.from_pretrained(folder, mesh=mesh)[0], expected, mesh)
    assert len(decoded) == len(set(decoded)) > 10


def check_refusals(folder):
    directory, _ = saved(folder, dataclasses.replace(WIDE, num_kv_heads=4, vocab_size=60))
    sizes, can = "num_kv_heads=4, intermediate_size=48, vocab_size=60", "1 or 2 or 4 devices (the mesh's axis 'model')"
    with refused(re.escape(f"a model of {sizes} can be split over {can}, got 8")), counted() as reads:
        models.from_pretrained(directory, mesh=on(1, 8))
    assert not reads
    odd = dataclasses.replace(MIXED, vocab_size=62)
    with refused("experts.intermediate_size=16, vocab_size=62 can be split over 1 or 2 devices"):
        models.random_params(odd, jax.random.key(0), mesh=on(2, 4))
    other = Mesh(jax.devices(), ("tensor",))
    with refused(re.escape("the axes of a mesh must be among 'data', 'model' and 'slots', got ('tensor',)")):
        models.from_pretrained(directory, mesh=other)
    with refused("mesh must be a jax.sharding.Mesh, got list", TypeError):
        models.from_pretrained(directory, mesh=jax.devices())
    whole = vivid_params(WIDE)
    with refused(re.escape("got ('tensor',)")):
        models.shard_params(whole, other)
    with refused("mesh must be a jax.sharding.Mesh, got NoneType", TypeError):
        models.shard_params(whole, None)
    three = Mesh(jax.devices()[:3], ("model",))
    with refused("cannot be split over 3 devices .*: expected a number of devices that divides"):
        models.shard_params(whole, three)


CHECKS = [name for name in globals() if name.startswith("check_")]


def run(name):
    with tempfile.TemporaryDirectory() as folder:
        globals()[name](pathlib.Path(folder))


if __name__ == "__main__":
    report(run, sys.argv[1:])
