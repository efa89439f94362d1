"""Files of a model are replaced as one, and written with the types that they are read with."""

from __future__ import annotations

import itertools
import os

import pytest
from filelock import FileLock

from models.files import replaced_files
from models.files.hf.checks import check_types
from tests.tiny_models import FAMILIES


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
