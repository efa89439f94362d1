"""Folders that appear when they are whole: failures, killed processes and others at work."""

import pytest

from kvjax.api.new_folder import new_folder


def test_it_appears_when_it_is_whole(tmp_path):
    target = tmp_path / "deep" / "cache"
    with new_folder(target) as folder:
        (folder / "file").write_text("content")
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["cache"]
    assert [path.name for path in target.iterdir()] == ["file"]


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


def test_what_a_killed_process_left_is_removed_and_a_living_one_is_not_disturbed(tmp_path):
    with new_folder(tmp_path / "cache") as folder:
        (folder / "file").write_text("content")
        with pytest.raises(ValueError, match="another process is saving"), new_folder(tmp_path / "cache"):
            pass
        assert (folder / "file").exists()
    folder.mkdir()
    for name in (".saving", "half"):
        (folder / name).touch()
    (tmp_path / "cache").rename(tmp_path / "other")
    with new_folder(tmp_path / "cache") as again:
        assert again == folder and not (folder / "half").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "other"]
