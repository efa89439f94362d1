"""Records: written whole or not at all, taken up again, never mixed; their figures' common look."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import pathlib

import pytest

from experiments.cli import Against, committed, compared, figures, read_record
from experiments.evaluation.compare import main
from experiments.records import (
    Results,
    describe,
    device_kinds,
    latex_table,
    latex_text,
    make_record,
    markdown_rows,
    method_title,
    new_figure,
    save,
    write_bytes,
    write_record,
)
from experiments.records.names_on_lines import label_lines, spread
from experiments.records.plotting import amount_axis, token_label
from kvjax import registry

RECORDS = pathlib.Path(__file__).parents[2] / "docs" / "records"
METRIC = {"name": "vt", "value": 50.0, "unit": "percent"}


def test_a_record_is_whole_or_not_there(tmp_path):
    with pytest.raises(TypeError):
        write_record(tmp_path / "bad" / "r.json", {"x": object()})
    assert not (tmp_path / "bad").exists()
    with pytest.raises(ValueError, match="lacks"):
        make_record("x", {}, [{"name": "a"}])


def test_the_rows_of_a_record_as_csv_and_latex(tmp_path, capsys):
    assert main([str(RECORDS / "speed.json"), "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == len(read_record(RECORDS / "speed.json")["metrics"]) and float(rows[0]["value"]) > 0
    assert main([str(RECORDS / "speed.json"), "--format", "latex", "--fields", "method,length,value"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [r"\begin{tabular}{lrr}", r"\toprule", r"method & length & value \\"]
    assert r"Full & 8192 & 0.006019 \\" in lines and any(line.startswith("TokenSelect (miss) & ") for line in lines)


def test_a_cell_of_any_text_is_one_cell():
    """A task of a user's file can have any name; LaTeX reads [x] behind the end of a row as an option."""
    assert markdown_rows([["a", "b"], ["x|y", "l\nm"], [r"p\|q", ""]])[2:] == [r"| x\|y | l m |", r"| p\|q |  |"]
    rows = latex_table([["a"], ["[x]"], ["l\n\nm"]]).splitlines()
    assert rows[4:6] == [r"{[}x{]} \\", r"l  m \\"]


def test_special_characters_of_latex_stand_for_themselves():
    said = latex_text(r"a_b & 50 % {x} ~ ^ \ $ # -1.5 ± 2, x-1, **bold**")
    assert said == (
        r"a\_b \& 50 \% \{x\} \textasciitilde{} \textasciicircum{} \textbackslash{} \$ \# $-$1.5 $\pm$ 2, x-1, "
        r"\textbf{bold}"
    )


@pytest.mark.parametrize(("kind", "begin"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_figures_are_the_same_bytes_whenever_they_are_drawn(kind, begin):
    """In vector files text stays text, for search and for editing."""
    made = []
    for _ in range(2):
        figure = new_figure(2, 2)
        figure.subplots().set_ylabel("score")
        made.append(save(figure, kind))
    assert made[0] == made[1] and made[0].startswith(begin)
    assert kind != "svg" or b">score</text>" in made[0]
    assert kind != "png" or made[0][25] == 3, "a palette: a third or a quarter of the size"


def test_names_at_the_ends_of_lines_are_inside_of_the_panel():
    figure = new_figure(4, 3)
    panel = figure.subplots()
    panel.set(xscale="log", xlim=(1024, 131072))
    panel.set_ylim(0, 10)
    label_lines(panel, [(131072, 9.9, "a very long name of a method", "#0072b2"), (131072, 9.8, "another", "#d55e00")])
    figure.draw_without_rendering()
    outer, boxes = panel.get_window_extent(), [text.get_window_extent() for text in panel.texts]
    assert all(outer.x0 <= box.x0 and box.x1 <= outer.x1 and box.y1 <= outer.y1 + 1 for box in boxes)


def test_every_method_has_a_name_as_in_its_paper():
    names = {name: method_title(name) for name in registry.builtin()}
    assert len(set(names.values())) == len(names) and not any(title.islower() for title in names.values())
    assert [names[x] for x in ("chess", "rkv", "pyramidkv", "h2o")] == ["CHESS", "R-KV", "PyramidKV", "H2O"]
    assert method_title("twilight(mass=0.5, method=chess(ratios=1))") == "Twilight(mass=0.5, method=CHESS(ratios=1))"
    assert method_title("tokenselect_hit") == "TokenSelect (hit)" and method_title("minference(rkv)") == "MInference(R-KV)"
    assert method_title("my_own(budget=1)") == "my_own(budget=1)"


def test_records_of_other_settings_and_files_without_a_record_are_not_continued(tmp_path):
    path = tmp_path / "metrics.json"
    Results(path, "this", {"seed": 0}).add(METRIC, {"name": "vt"})
    assert Results(path, "this", {"seed": 0}).find({"name": "vt"}) == METRIC
    with pytest.raises(ValueError, match="holds cells with seed=0, got 1: choose another --out"):
        Results(path, "this", {"seed": 1})
    with pytest.raises(ValueError, match="holds the experiment 'this', expected 'other'"):
        Results(path, "other", {})
    for text in ("", "[]", "{}", '{"metrics": []}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="metrics.json is no record"):
            Results(path, "eval", {})


def test_a_record_that_is_continued_elsewhere_names_both_devices(tmp_path):
    path = tmp_path / "r.json"
    for kind in ("one card", "another card", "one card"):
        device = {"platform": "gpu", "kind": kind, "count": 1}
        Results(path, "this", {}, device=device).add({"name": kind, "value": 1, "unit": "percent"}, {"name": kind})
    record = json.loads(path.read_text())
    assert device_kinds(record) == ["one card", "another card"] and record["device"]["kind"] == "one card"
    del record["devices"]  # as in older records
    assert device_kinds(record) == ["one card"] and device_kinds({}) == []


def test_names_beside_lines_do_not_overlap():
    assert spread([0.5, 0.9, 0.1], 0.05).tolist() == pytest.approx([0.5, 0.9, 0.1])
    close = spread([0.50, 0.51, 0.49, 0.02, 0.0, 1.0], 0.1).tolist()
    assert sorted(close) == pytest.approx([0.0, 0.1, 0.4, 0.5, 0.6, 1.0])
    assert close.index(max(close[:3])) == 1 and close[3] > close[4]  # the order stays


@pytest.mark.parametrize(("values", "scale"), [([3.0, 20.0], "linear"), ([3.0, 40.0], "log")])
def test_an_axis_of_amounts_begins_at_zero_or_is_logarithmic(values, scale):
    panel = new_figure(3, 2).subplots()
    amount_axis(panel, values)
    low, high = panel.get_ylim()
    ticks = [text.get_text() for text in panel.get_yticklabels()]
    assert scale == "linear" or {"5", "10", "20"} <= {*ticks}, ticks
    assert panel.get_yscale() == scale and (low == 0) == (scale == "linear") and low < min(values) and high > max(values)


def test_lengths_are_short():
    assert [token_label(count) for count in (200, 1024, 8000, 131072)] == ["200", "1K", "8,000", "128K"]


@pytest.mark.parametrize(
    "name",
    ["speed", "speed-mesh"]
    + [
        pytest.param(name, marks=pytest.mark.thorough)
        for name in ("speed-qwen3", "speed-h200", "speed-split", "speed-mesh-h100")
    ],
)
def test_records_of_the_documentation_are_drawn(name):
    for kind, draw in figures(RECORDS / f"{name}.json", []):
        assert draw("png").startswith(b"\x89PNG"), kind


def test_a_record_is_described(tmp_path, capsys):
    path = tmp_path / "r.json"
    rows = [{"name": "tpot", "method": name, "value": value, "unit": "s"} for name, value in (("full", 0.5), ("quest", 0.25))]
    write_record(path, make_record("speed", {"lengths": [1, 2]}, [*rows[:1], {**rows[1], "error": None}]))
    assert main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "experiment  speed" in lines and "settings    lengths 1, 2" in lines and "all rows    name tpot, unit s" in lines
    assert [line.split() for line in lines[-3:]] == [["method", "value"], ["full", "0.5"], ["quest", "0.25"]]
    assert main([str(path), "--fields", "unit,value"]) == 0
    assert capsys.readouterr().out.endswith("unit  value\ns     0.5\ns     0.25\n")


def test_examples_are_counted_as_they_were_measured():
    """Samples are what was asked for, of a file that has fewer."""
    table = describe(make_record("eval", {}, [METRIC | {"samples": 20, "examples": 6}])).splitlines()[-2:]
    assert [line.split() for line in table] == [["name", "value", "unit", "examples"], ["vt", "50", "percent", "6"]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("{", "is no record"),
        ("[]", "is no record"),
        ({"metrics": [{"name": "a"}]}, "no row has the field 'valeu'; fields: name"),
        ({"metrics": [3]}, "row 1: expected an object, got 3"),
        ({"metrics": 3}, "metrics is 3"),
        ({"device": "H100"}, "device is 'H100'"),
        (None, "neither a folder with a metrics.json nor a JSON record"),
    ],
)
def test_no_record_is_refused_with_a_line(tmp_path, capsys, change, words):
    path = tmp_path / "r.json"
    if change is not None:
        path.write_text(change if isinstance(change, str) else json.dumps(make_record("speed", {}, []) | change))
    assert main([str(path), "--fields", "valeu"]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "field", "value", "got"),
    [
        ("speed", "value", "x", "TypeError"),
        ("speed", "error", ..., "KeyError: 'error'"),
        ("speed", "floor", None, "TypeError"),
        ("speed", "method", [], "AttributeError"),
    ],
)
def test_damaged_rows_are_not_drawn(tmp_path, name, field, value, got):
    """A value of another kind, or none (...), in all rows; the file is named."""
    record, file = read_record(RECORDS / f"{name}.json"), tmp_path / "damaged.json"
    for row in record["metrics"]:
        row[field] = value
        if value is ...:
            del row[field]
    file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=f"{file} cannot be drawn: expected rows as its experiment writes them, got {got}"):
        for _, draw in figures(file, []):
            draw("png")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": "x"}, "row 1: expected a number as value, got 'x'"),
        ({"knobs": 3}, "row 1: expected an object as knobs, got 3"),
    ],
)
def test_damaged_rows_are_not_compared(tmp_path, change, message):
    whole = {"name": "decode", "method": "full", "value": 1.0, "unit": "s", "knobs": {}}
    for name, row in (("a", whole | change), ("b", whole)):
        write_record(tmp_path / f"{name}.json", make_record("speed", {}, [row]))
    with pytest.raises(ValueError, match=message):
        compared(tmp_path / "a.json", tmp_path / "b.json")


def timed(path, rows, **settings):
    """Writes a record of times: rows are (method, length, seconds, knobs)."""
    fields = ("method", "length", "value", "knobs")
    metrics = [{"name": "decode", "unit": "s", **dict(zip(fields, row, strict=True))} for row in rows]
    write_record(path, make_record("speed", settings, metrics))
    return path


def test_a_record_beside_another_shows_the_ratio_of_each_row(tmp_path):
    here = timed(tmp_path / "a.json", [("full", 8, 0.5, {}), ("quest", 8, 0.2, {"budget": 2}), ("quest", 16, 9.0, {})])
    there = timed(tmp_path / "b.json", [("quest", 8, 0.4, {"budget": 4}), ("full", 8, 0.25, {}), ("h2o", 8, 1.0, {})])
    said = compared(here, there).splitlines()
    assert said[0].startswith(f"{here} (here, cpu of ") and f"beside {there} (there, cpu of " in said[0]
    assert [line.split() for line in said[3:5]] == [
        ["full", "s", "0.5", "0.25", "2"],
        ["quest", "s", "0.2", "0.4", "0.5", "budget=2,", "there", "4"],
    ]
    assert said[5] == "ratio (here over there) of 2 rows: median 1.25, from 0.5 to 2"
    assert "and 1 more: kvjax compare" in compared(here, there, most=1)


def test_records_that_measure_other_things_are_not_compared(tmp_path):
    here, there = (timed(tmp_path / f"{name}.json", [("full", 8, 1.0, {})], model=name) for name in "ab")
    assert "not compared, because they are of two models: model 'a' here and 'b' there" in compared(here, there)
    with pytest.raises(ValueError, match="expected two records of one experiment, got 'speed' .* and 'kernels' in .*json"):
        compared(here, RECORDS / "kernels.json")
    assert compared(timed(here, [("full", 8, 1.0, {})]), timed(there, [("full", 9, 1.0, {})])).endswith("no row is in both")


def test_a_run_is_compared_with_the_committed_record_of_its_name_and_kind(tmp_path, capsys):
    made = timed(tmp_path / "speed.json", [("full", 8, 1.0, {})])
    assert committed(made, "speed") == RECORDS / "speed.json" and committed(RECORDS / "speed.json", "speed") is None
    assert committed(made, "kernels") is None and committed(made, "speed", tmp_path / "nowhere") is None
    Against().show(made, "another")
    assert capsys.readouterr().out == ""
    Against(against=timed(tmp_path / "old.json", [("full", 8, 2.0, {})])).show(made)
    assert "median 0.5" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--against: expected a record or a result folder, got .*, which does not exist"):
        Against(against=tmp_path / "none.json")


@pytest.mark.parametrize("name", ["speed.json", "offload.json", "kernels.json", "ablations/drift.json", "results/qwen-32k"])
def test_rows_of_a_record_find_themselves(name):
    measured = [row for row in read_record(RECORDS / name)["metrics"] if row.get("error") is None and row["value"]]
    said = compared(RECORDS / name, RECORDS / name)
    assert f"of {len(measured)} rows: median 1, from 1 to 1" in said


def test_a_full_disk_is_told_with_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write does, which names no file

    monkeypatch.setattr(os, "chmod", full)
    with pytest.raises(OSError, match="metrics.json"):
        write_bytes(tmp_path / "metrics.json", b"{}")
    assert not list(tmp_path.iterdir())
