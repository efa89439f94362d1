"""Kernels of a step: read from profiles with known contents, and the command where there is no GPU."""

import dataclasses

import jax
import pytest
from jax.profiler import ProfileData

from experiments.lab import profile
from experiments.speed.settings import MODELS
from models import ModelConfig, param_shapes, shapes
from models.sharding import param_spec
from tests.tiny_models import TINY

pytestmark = pytest.mark.usefixtures("quick_compile")

NAMES = ("a", "b", "op", "host")


def plane(name, **lines):
    """A plane of a profile as text; lines have events of a name, a start and a length in microseconds."""
    text = [f'planes {{ name: "{name}"']
    text += [f'event_metadata {{ key: {at} value {{ id: {at} name: "{kernel}" }} }}' for at, kernel in enumerate(NAMES, 1)]
    for number, (line, events) in enumerate(lines.items(), 1):
        text.append(f'lines {{ id: {number} name: "{line.replace("_", " ")}"')
        for kernel, start, took in events:
            at = NAMES.index(kernel) + 1
            text.append(f"events {{ metadata_id: {at} offset_ps: {start * 10**6} duration_ps: {took * 10**6} }}")
        text.append("}")
    return "\n".join([*text, "}"])


def test_kernels_of_all_streams_count_and_instants_count_once():
    text = [
        plane("/host:CPU", **{"Stream_of_thoughts": [("host", 0, 100)]}),
        plane("/device:GPU:0", **{
            "Stream_7": [("b", 20, 10), ("a", 0, 10)],  # not in order
            "Stream_8": [("a", 25, 30)],  # 5 us beside b
            "XLA_Ops": [("op", 0, 100)],
        }),
    ]  # fmt: skip
    data = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace("\n".join(text)))
    (one,) = profile.kernel_times(data, steps=2)
    assert one["device"] == "/device:GPU:0"
    assert one["span"] == pytest.approx(55e-6 / 2)
    assert one["busy"] == pytest.approx(45e-6 / 2)  # 10, 10, and 25 after b
    assert list(one["kernels"]) == ["a", "b"], "the longest first"
    assert one["kernels"]["a"] == {"per_step": 1.0, "seconds": pytest.approx(20e-6)}
    assert one["kernels"]["b"] == {"per_step": 0.5, "seconds": pytest.approx(5e-6)}


def test_the_table_names_the_rest_of_the_kernels():
    kernels = {
        "long": {"per_step": 2.0, "seconds": 8e-6},
        "short": {"per_step": 1.0, "seconds": 1e-6},
        "less": {"per_step": 3.0, "seconds": 5e-7},
    }
    row = {
        "method": "full", "where": "model=2", "sums": "xla", "device": "/device:GPU:1",
        "value": 2e-3, "span": 3e-3, "busy": 1e-3, "kernels": kernels,
    }  # fmt: skip
    text = profile.profile_table([row], top=1)
    assert "**full, model=2, GPU:1, sums xla**: 2.000 ms a step" in text
    assert "| long | 2.0 | 4.00 | 8.0 |" in text
    assert "| 2 others | 4.0 |  | 1.5 |" in text
    assert "short" not in text


@pytest.mark.parametrize(
    ("given", "told"),
    [({"parts": 2, "mesh": "model=2"}, "--parts"), ({"methods": ("fool",)}, "'fool'"), ({"sums": ("xla",)}, "--sums")],
)
def test_wrong_settings_are_refused(given, told):
    with pytest.raises(ValueError, match=told):
        profile.ProfileSettings(**given)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="needs a machine without a GPU")
def test_without_a_gpu_the_command_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(MODELS, "tiny", lambda: ModelConfig(**TINY))
    given = ["--model", "tiny", "--methods", "full", "--length", "64", "--tokens", "2"]
    code = profile.main([*given, "--out", str(tmp_path / "p.json")])
    assert code == 2
    assert "the profiler saw no kernels" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize("config", [shapes.llama31_70b(), shapes.qwen3_0_6b()], ids=["untied", "tied"])
def test_a_part_of_a_model_has_the_parameters_of_a_device_on_a_mesh(config):
    mesh, config = jax.sharding.AbstractMesh((4,), ("model",)), dataclasses.replace(config, num_layers=1)
    whole, part = param_shapes(config), param_shapes(profile.part_of(config, 4))
    assert profile.part_of(config, 1) == config
    for (path, leaf), mine in zip(jax.tree_util.tree_leaves_with_path(whole), jax.tree.leaves(part), strict=True):
        split = jax.sharding.NamedSharding(mesh, param_spec("/".join(key.key for key in path), leaf.ndim))
        assert split.shard_shape(leaf.shape) == mine.shape, path
