"""Files of a model that are damaged, edited or hostile: one sentence names the file or the key. Files are replaced as one."""

from __future__ import annotations

import itertools
import json
import os
import re

import jax
import jax.numpy as jnp
import pytest
from filelock import FileLock

import models
from models import ModelConfig
from models.files import adapter, replaced_files
from models.files.hf.checks import check_types
from tests.models.test_weights import saved  # noqa: F401
from tests.tiny_models import FAMILIES

HF = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive whole number, got 0"),
        ({"num_attention_heads": "4"}, "num_attention_heads must be a positive whole number, got '4'"),
        ({"num_attention_heads": None}, "num_attention_heads must be a positive whole number, got None"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive whole number, got 0"),
        ({"hidden_size": True}, "hidden_size must be a positive whole number, got True"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"attention_bias": "no"}, "attention_bias must be true or false, got 'no'"),
        ({"rope_parameters": "x"}, "rope_parameters must be an object, got 'x'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": "8"}}, "rope_scaling.factor must be a finite number, got '8'"),
        ({"rope_theta": float("nan")}, "rope_theta must be a finite number, got nan"),
        ({"layer_types": 3}, "layer_types must be a list of texts, got 3"),
        ({"model_type": "mistral", "sliding_window": "64"}, "sliding_window must be a whole number, got '64'"),
        ({"eos_token_id": [1.5]}, "eos_token_id must be a whole number or a list of them, got [1.5]"),
        ({"eos_token_id": [[1]]}, "eos_token_id must be a whole number or a list of them, got [[1]]"),
    ],
)
def test_values_of_another_type_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig.from_hf({**HF, **change})


STRANGE = (None, True, False, 0, -1, 1.5, float("nan"), float("inf"), 10**30, 10**400, "", "4", [], [1], [[1]], ["x"])
STRANGE += ({}, {"a": 1}, {"rope_type": 3}, {"rope_type": "llama3", "factor": []}, {"rope_theta": "x"})


def test_any_json_value_is_read_or_refused_by_a_sentence():
    """No value of a known key ends in another error than ValueError."""
    keys = [
        *HF, "head_dim", "rms_norm_eps", "hidden_act", "rope_theta", "rope_parameters", "rope_scaling", "sliding_window",
        "layer_types", "max_window_layers", "use_sliding_window", "tie_word_embeddings", "attention_bias", "mlp_bias",
        "torch_dtype", "dtype", "eos_token_id", "quantization_config", "partial_rotary_factor",
    ]  # fmt: skip
    base = {**HF, "use_sliding_window": True, "sliding_window": None}
    for kind, key, value in itertools.product(("llama", "mistral", "qwen2", "qwen3"), keys, STRANGE):
        try:
            read = ModelConfig.from_hf({**base, "model_type": kind, key: value})
        except ValueError:
            continue
        assert isinstance(read, ModelConfig) and hash(read)


def test_configs_that_are_written_have_the_right_types():
    for config in FAMILIES.values():
        check_types(config.to_hf())


def test_deep_nesting_and_other_damage_is_named(saved):  # noqa: F811
    directory = saved[0]
    weights, generation = directory / "model.safetensors", directory / "generation_config.json"
    generation.write_text('{"eos_token_id": [[1]]}')
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id must be .* got \[\[1\]\]"):
        models.from_pretrained(directory)
    generation.unlink()
    weights.write_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode())
    with pytest.raises(ValueError, match="model.safetensors is damaged: got 100008 bytes with a header that does not parse"):
        models.from_pretrained(directory)
    weights.unlink()
    for name in ("model.safetensors.index.json", "generation_config.json", "config.json"):
        (directory / name).write_text(DEEP)
        with pytest.raises(ValueError, match=f"{name} is not valid JSON: .*recursion"):
            models.from_pretrained(directory)


def test_an_index_names_files_of_its_own_directory(saved):  # noqa: F811
    directory = saved[0]
    (directory / "model.safetensors").rename(directory.parent / "model.safetensors")
    for outside in ("../model.safetensors", "/etc/model.safetensors", "a/../../b", "..\\model", "C:\\model"):
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": outside}}))
        with pytest.raises(ValueError, match=re.escape(f"must name files of its own directory, got {outside!r}")):
            models.from_pretrained(directory)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def failing_replace(at):
    """`os.replace` that fails at its call number ``at``."""
    count = itertools.count()

    def replace(source, target, really=os.replace):
        if next(count) == at:
            raise OSError("no permission")
        really(source, target)

    return replace


@pytest.mark.parametrize("existing", [(), ("b",), ("a", "b"), ("b", "other")])
def test_a_failure_at_any_rename_changes_nothing(tmp_path, monkeypatch, existing):
    for name in existing:
        (tmp_path / name).write_text("old")
    before = contents(tmp_path)
    for at in range(2 + len({"a", "b"} & {*existing})):
        monkeypatch.setattr(replaced_files.os, "replace", failing_replace(at))
        with pytest.raises(OSError, match="no permission"):
            with replaced_files.replaced_files(tmp_path, ("a", "b")) as folder:
                (folder / "a").write_text("new")
                (folder / "b").write_text("new")
        monkeypatch.undo()
        assert contents(tmp_path) == before


def test_a_failed_export_keeps_the_old_model(saved, monkeypatch):  # noqa: F811
    """It fails at the last rename, when the new weights are in their place already."""
    directory, params, config = saved
    before = contents(directory)
    monkeypatch.setattr(replaced_files.os, "replace", failing_replace(3))
    with pytest.raises(OSError, match="no permission"):
        models.save_pretrained(directory, jax.tree.map(jnp.zeros_like, params), config)
    assert contents(directory) == before


def test_the_same_holds_for_an_adapter_and_a_new_directory(tmp_path, monkeypatch):
    """Both files are there, or neither."""
    about = adapter.AdapterConfig(base="x", fingerprint="0" * 16, rank=1, stretch=1.0)

    with monkeypatch.context() as patch:
        patch.setattr(replaced_files.os, "replace", failing_replace(1))
        with pytest.raises(OSError, match="no permission"):
            adapter.save_adapter(tmp_path / "new", {"a": jnp.ones(2)}, about)
    assert not (tmp_path / "new").exists()
    adapter.save_adapter(tmp_path / "new", {"a": jnp.ones(2)}, about)
    assert sorted(contents(tmp_path / "new")) == ["adapter_config.json", "adapter_model.safetensors"]


def test_what_a_killed_save_left_is_removed_and_a_living_one_is_not_disturbed(tmp_path):
    scratch = tmp_path / ".saving"
    (scratch / "old").mkdir(parents=True)
    (scratch / "old" / "a").write_text("older")
    (scratch / "a").write_text("half")
    with FileLock(scratch / "lock"), pytest.raises(ValueError, match="another process is writing to "):
        with replaced_files.replaced_files(tmp_path, ("a",)):
            pass
    assert (scratch / "a").read_text() == "half"
    with replaced_files.replaced_files(tmp_path, ("a",)) as folder:
        assert not (folder / "a").exists()
        (folder / "a").write_text("new")
    assert contents(tmp_path) == {"a": b"new"}
