"""Folders that appear when they are whole: failures, killed processes and others at work."""

from __future__ import annotations

import pytest
from filelock import FileLock

from kvjax.api.new_folder import new_folder


def test_it_appears_when_it_is_whole(tmp_path):
    target = tmp_path / "deep" / "cache"
    with new_folder(target) as folder:
        (folder / "file").write_text("content")
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["cache"]
    assert [path.name for path in target.iterdir()] == ["file"] and target.stat().st_mode & 0o777 == 0o755


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="half"), new_folder(tmp_path / "cache") as folder:
        (folder / "part").mkdir()
        (folder / "part" / "file").write_text("content")
        raise RuntimeError("half")
    assert not list(tmp_path.iterdir())


def test_what_exists_is_not_replaced_even_if_it_came_meanwhile(tmp_path):
    with pytest.raises(ValueError, match="new directory, got .*cache, which exists already"):
        with new_folder(tmp_path / "cache"):
            (tmp_path / "cache").mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_only_folders_of_killed_processes_are_removed(tmp_path):
    for name in ("killed.partial-a", "others.partial-b"):
        (tmp_path / name / "arrays").mkdir(parents=True)
        (tmp_path / name / ".saving").touch()
    (tmp_path / "mine.partial-c").mkdir()  # has nothing of ours
    with FileLock(tmp_path / "others.partial-b" / ".saving"):
        with new_folder(tmp_path / "cache"):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "mine.partial-c", "others.partial-b"]
