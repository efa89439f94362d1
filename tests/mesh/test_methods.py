"""Runs over the devices of a mesh: what needs no devices here. `test_devices.py` has the rest."""

import contextlib
import dataclasses
import re

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import models
from kvjax import memory_needed, offload_share, prefill
from kvjax.accounting import memory
from kvjax.mesh.sharding import plan_of
from kvjax.methods import Full, MosaicKV, Quest, SnapKV, StreamingLLM
from models import Experts, sharding
from models.sharding import shard_params
from tests.harness import small
from tests.mesh.eight_devices import CONFIG, params
from tests.mesh.eight_devices_models import MIXED


def test_gpus_without_a_plan_are_refused():
    """XLA's partitioner cannot divide kernels. `tests/compile_only/test_mesh.py` has true GPUs."""

    @dataclasses.dataclass(frozen=True)
    class Device:
        id: int
        platform: str
        process_index: int = 0

    def given(platform):
        mesh = Mesh(np.array([Device(0, platform), Device(1, platform)]), ("tp",))
        return {"kernel": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(mesh, PartitionSpec("tp")))}

    with pytest.raises(ValueError, match="parameters on several GPUs must be on a mesh with the axes 'data', 'model' and"):
        plan_of(given("gpu"))
    assert plan_of(given("cpu")) is None


def test_a_mesh_of_one_device_runs_with_axes_of_both_types():
    """`jax.make_mesh` makes Explicit axes, with which a program runs inside shard_map alone."""
    for kind in (AxisType.Explicit, AxisType.Auto):
        given = shard_params(params(), jax.make_mesh((1,), ("model",), axis_types=(kind,)))
        cache = prefill(given, [[1, 2, 3]], config=CONFIG, method=Full(), max_new_tokens=1, pad_multiple=16)
        assert (cache.plan is None) == (kind == AxisType.Auto)
        with contextlib.nullcontext() if cache.plan is None else pytest.raises(ValueError, match="must be closed over"):
            jax.jit(lambda x: prefill(x, [[1]], config=CONFIG, method=Full(), max_new_tokens=1)).lower(given)
    foreign = NamedSharding(jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Explicit,)), PartitionSpec())
    with pytest.raises(ValueError, match="Explicit axes must be on one with the axes 'data', 'model' and 'slots'"):
        plan_of({"kernel": jax.ShapeDtypeStruct((8,), np.float32, sharding=foreign)})


def test_a_model_is_divided_by_heads_and_widths():
    experts = Experts(num_experts=4, num_experts_per_tok=2, intermediate_size=24, norm_topk_prob=True, layers=(1,))
    config = dataclasses.replace(CONFIG, experts=experts)
    part = config.local(4)
    assert (part.num_q_heads, part.num_kv_heads, part.intermediate_size, part.experts.intermediate_size) == (4, 2, 12, 6)
    assert part == dataclasses.replace(config, num_q_heads=4, num_kv_heads=2, intermediate_size=12, experts=part.experts)
    told = "num_kv_heads=8, intermediate_size=48, experts.intermediate_size=24, vocab_size=64 can be split over"
    with pytest.raises(ValueError, match=f"{told} 1 or 2 or 4 or 8 devices .the mesh's axis 'model'., got 3"):
        config.local(3)
    with pytest.raises(ValueError, match="for 16 devices take model=8 and data=2, .* or slots=2"):
        config.local(16)


def test_memory_is_counted_per_device():
    sizes = {"batch": 4, "prompt_slots": 64, "max_new_tokens": 8}
    whole = memory_needed(Full(), CONFIG, **sizes)
    for data, model in ((1, 8), (2, 4), (4, 2)):
        mesh = AbstractMesh((data, model), ("data", "model"))
        part = memory_needed(Full(), CONFIG, mesh=mesh, **sizes)
        assert whole.device / 8 <= part.device <= 1.01 * whole.device / 8
        # Two layers of Quest are dense.
        assert offload_share(Quest(), CONFIG, mesh=mesh, device_bytes=part.peak, spare=0, **sizes) == 0
    with pytest.raises(ValueError, match="a multiple of the 3 devices of the mesh's axis 'data', got 4 rows"):
        memory_needed(Full(), CONFIG, mesh=AbstractMesh((3, 1), ("data", "model")), **sizes)
    with pytest.raises(ValueError, match="axes of a mesh must be among 'data', 'model' and 'slots', got .'tp',"):
        memory_needed(Full(), CONFIG, mesh=AbstractMesh((2,), ("tp",)), **sizes)
    with pytest.raises(TypeError, match="mesh must be a jax.sharding.Mesh or AbstractMesh, got str"):
        offload_share(Quest(), CONFIG, mesh="model=2", **sizes)


def test_too_little_memory_is_named_for_each_device(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: 1 << 10)
    sizes = {"batch": 4, "prompt_slots": 64, "max_new_tokens": 8, "chunk_size": 64}
    mesh = AbstractMesh((2, 4), ("data", "model"))
    needed = memory_needed(Full(), CONFIG, mesh=mesh, **sizes)
    with pytest.raises(MemoryError, match=f"^Full on each of 8 devices needs {re.escape(str(needed))}, got .* of free"):
        memory.check_memory([Full()], CONFIG, mesh, None, sizes)


def test_a_long_row_is_divided():
    """Each device needs its part, in whole pages. A layer with a window is small: each device has all of it."""
    sizes = {"batch": 2, "prompt_slots": 48, "max_new_tokens": 16, "chunk_size": 16}
    mesh = AbstractMesh((4,), ("slots",))
    for method in (Full(), Quest(page_size=8, num_dense_layers=0)):
        whole, part = (memory_needed(method, CONFIG, mesh=over, **sizes).device for over in (None, mesh))
        assert whole / 4 <= part <= 1.01 * whole / 4
    paged, needed = (memory_needed(Full(), CONFIG, mesh=AbstractMesh(*of), **sizes).device for of in (
        ((4, 2), ("slots", "model")), ((4,), ("slots",)),
    ))  # fmt: skip
    assert needed / 2 <= paged <= 1.01 * needed / 2
    windows = dataclasses.replace(CONFIG, windows=(16,) * CONFIG.num_layers)
    assert memory_needed(Full(), windows, mesh=mesh, **sizes) == memory_needed(Full(), windows, **sizes)
    told = "MosaicKV cannot run over the mesh's axis 'slots', .* Full, Quest, ParisKV, TokenSelect and Chess can, and SnapKV"
    with pytest.raises(ValueError, match=told):
        memory_needed(MosaicKV(), CONFIG, mesh=mesh, **sizes)


def test_a_long_prompt_is_divided():
    """While it is read each device has its part; what a method keeps of it each device has whole."""
    sizes = {"batch": 1, "prompt_slots": 64, "max_new_tokens": 4, "chunk_size": 16, "order": "chunks"}
    mesh = AbstractMesh((4,), ("slots",))
    for method, share in ((SnapKV(budget=4, obs_window=2), 4), (small(StreamingLLM, budget=6, chunk=8), 1)):
        whole, part = (memory_needed(method, CONFIG, mesh=over, **sizes).device for over in (None, mesh))
        assert whole / share <= part <= 1.5 * whole / share


def test_specs_split_layers_and_tables_over_the_model_axis():
    specs = sharding.param_specs(models.param_shapes(MIXED))
    flat = flatten_dict(specs, sep="/")
    split = {path: tuple(spec) for path, spec in flat.items() if path.startswith(("layers_1", "embed")) and any(spec)}
    assert split == {
        "embed/embedding": ("model", None),
        "layers_1/attention/qkv/kernel": (None, "model"),
        "layers_1/attention/out/kernel": ("model", None),
        "layers_1/mlp/gate_up/kernel": (None, None, None, "model"),
        "layers_1/mlp/down/kernel": (None, "model", None),
    }
    assert jax.tree.structure(specs) == jax.tree.structure(models.param_shapes(MIXED))
