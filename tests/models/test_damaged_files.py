"""Values that no config.json should have are read or refused in a sentence; files of a model are replaced as one."""

from __future__ import annotations

import itertools
import os

import pytest
from filelock import FileLock

from models import ModelConfig
from models.files import replaced_files
from models.files.hf.checks import check_types
from tests.tiny_models import FAMILIES, HF

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
def test_a_failure_never_leaves_a_mixture(tmp_path, monkeypatch, existing):
    """Before the files are moved nothing has changed; while they are moved no reader accepts the directory."""
    directory = tmp_path / "model"
    for name in existing:
        directory.mkdir(exist_ok=True)
        (directory / name).write_text("old")
    before = contents(directory) if existing else None
    with pytest.raises(OSError, match="full"), replaced_files.replaced_files(directory, ("a", "b")) as folder:
        (folder / "a").write_text("half")
        raise OSError("full")
    assert (contents(directory) if directory.exists() else None) == before
    for at in range(2):
        monkeypatch.setattr(replaced_files.os, "replace", failing_replace(at))
        with pytest.raises(OSError, match="no permission"), replaced_files.replaced_files(directory, ("a", "b")) as folder:
            (folder / "a").write_text("new")
            (folder / "b").write_text("new")
        monkeypatch.undo()
        assert not directory.exists() or "b" not in contents(directory)


def test_what_a_killed_save_left_is_removed_and_a_living_one_is_not_disturbed(tmp_path):
    scratch = tmp_path / ".saving"
    scratch.mkdir()
    (scratch / "a").write_text("half")
    with FileLock(scratch / "lock"), pytest.raises(ValueError, match="another process is writing to "):
        with replaced_files.replaced_files(tmp_path, ("a",)):
            pass
    assert (scratch / "a").read_text() == "half"
    with replaced_files.replaced_files(tmp_path, ("a",)) as folder:
        (folder / "a").write_text("new")
    assert contents(tmp_path) == {"a": b"new"}
