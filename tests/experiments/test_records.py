"""Records: written whole or not at all, taken up again, never mixed; their figures' common look."""

from __future__ import annotations

import pytest

from experiments.records import Results, make_record, write_record


def test_a_record_is_whole_or_not_there(tmp_path):
    with pytest.raises(TypeError):
        write_record(tmp_path / "bad" / "r.json", {"x": object()})
    assert not (tmp_path / "bad").exists()
    with pytest.raises(ValueError, match="lacks"):
        make_record("x", {}, [{"name": "a"}])


def test_records_of_other_settings_are_not_continued(tmp_path):
    path = tmp_path / "r.json"
    Results(path, "this", {"seed": 0}).add({"name": "a", "value": 1, "unit": "percent"}, {"name": "a"})
    assert Results(path, "this", {"seed": 0}).find({"name": "a"})["value"] == 1
    with pytest.raises(ValueError, match="holds cells with seed=0, got 1: choose another --out"):
        Results(path, "this", {"seed": 1})
    with pytest.raises(ValueError, match="holds the experiment 'this', expected 'other'"):
        Results(path, "other", {})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"metrics": []}'])
def test_a_file_that_is_no_record_is_said_to_be_none(tmp_path, text):
    path = tmp_path / "metrics.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="metrics.json is no record"):
        Results(path, "eval", {})
