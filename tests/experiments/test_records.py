"""Records: written whole or not at all, taken up again, never mixed; their figures' common look."""

import csv
import errno
import io
import json
import os
import pathlib
import types

import jax
import pytest

from experiments import records
from experiments.cli import figures, read_record
from experiments.evaluation.compare import committed, compared, main
from experiments.records.names_on_lines import label_lines, spread
from kvjax import registry

RECORDS = pathlib.Path(__file__).parents[2] / "docs" / "records"
METRIC = {"name": "vt", "value": 50.0, "unit": "percent"}


def test_a_record_is_whole_or_not_there(tmp_path):
    with pytest.raises(TypeError):
        records.write_record(tmp_path / "bad" / "r.json", {"x": object()})
    assert not (tmp_path / "bad").exists()
    with pytest.raises(ValueError, match="lacks"):
        records.make_record("x", {}, [{"name": "a"}])


def test_a_pipe_is_written_to_and_what_a_link_names_is_replaced(tmp_path):
    link, file, pipe = (tmp_path / name for name in ("link", "file", "pipe"))
    link.symlink_to(file)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (link, pipe):
        records.write_bytes(path, b"lines")
    assert link.is_symlink() and pipe.is_fifo() and file.read_bytes() == os.read(reader, 9) == b"lines"


def test_the_rows_of_a_record_as_csv(capsys):
    assert main([str(RECORDS / "speed.json"), "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == len(read_record(RECORDS / "speed.json")["metrics"]) and float(rows[0]["value"]) > 0


def test_a_folded_record_has_the_same_rows(tmp_path):
    folded = json.loads((RECORDS / "results" / "int8" / "metrics.json").read_text())
    whole = records.unfold(folded)
    assert "unit" not in folded["metrics"][0] and {"unit", "method", "value"} < whole["metrics"][0].keys()
    assert records.fold(whole) == records.fold(folded) == folded, (
        "python -m experiments.records docs/records/results/*/metrics.json"
    )
    records.write_record(tmp_path / "r.json", folded)
    assert (
        records.Results(tmp_path / "r.json", "eval", {}).metrics
        == read_record(tmp_path / "r.json")["metrics"]
        == whole["metrics"]
    )


def test_a_cell_of_any_text_is_one_cell():
    """A task of a user's file can have any name."""
    assert records.markdown_rows([["a", "b"], ["x|y", "l\nm"], [r"p\|q", ""]])[2:] == [r"| x\|y | l m |", r"| p\|q |  |"]


@pytest.mark.parametrize(("kind", "begin"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_figures_are_the_same_bytes_whenever_they_are_drawn(kind, begin):
    """In vector files text stays text, for search and for editing."""
    made = []
    for _ in range(2):
        figure = records.new_figure(2, 2)
        figure.subplots().set_ylabel("score")
        made.append(records.save(figure, kind))
    assert made[0] == made[1] and made[0].startswith(begin)
    assert kind != "svg" or b">score</text>" in made[0]
    assert kind != "png" or made[0][25] == 3, "a palette: a third or a quarter of the size"


def test_names_at_the_ends_of_lines_are_inside_of_the_panel():
    figure = records.new_figure(4, 3)
    panel = figure.subplots()
    panel.set(xscale="log", xlim=(1024, 131072), ylim=(0, 10))
    label_lines(panel, [(131072, 9.9, "a very long name of a method", "#0072b2"), (131072, 9.8, "another", "#d55e00")])
    figure.draw_without_rendering()
    outer, boxes = panel.get_window_extent(), [text.get_window_extent() for text in panel.texts]
    assert all(outer.x0 <= box.x0 and box.x1 <= outer.x1 and box.y1 <= outer.y1 + 1 for box in boxes)


def test_every_method_has_a_name_as_in_its_paper():
    names = {name: records.method_title(name) for name in registry.builtin()}
    assert len(set(names.values())) == len(names) and not any(title.islower() for title in names.values())
    assert [names[x] for x in ("chess", "rkv", "pyramidkv", "h2o")] == ["CHESS", "R-KV", "PyramidKV", "H2O"]
    assert records.method_title("twilight(mass=0.5, method=chess(ratios=1))") == "Twilight(mass=0.5, method=CHESS(ratios=1))"
    assert (
        records.method_title("tokenselect_hit") == "TokenSelect (hit)"
        and records.method_title("minference(rkv)") == "MInference(R-KV)"
    )
    assert records.method_title("my_own(budget=1)") == "my_own(budget=1)"


def test_a_record_is_read_again_only_if_another_process_has_changed_it(tmp_path, monkeypatch):
    one, two = (records.Results(tmp_path / "metrics.json", "this", {}) for _ in range(2))
    for at, (mine, other) in enumerate([(one, two), (two, one), (one, two)]):
        mine.add({**METRIC, "name": str(at)}, {"name": str(at)})
        other.read()
        assert [row["name"] for row in other.metrics] == [row["name"] for row in mine.metrics] == list("012"[: at + 1])
    monkeypatch.setattr(json, "loads", None)
    one.read(), two.read()


def test_records_of_other_settings_and_files_without_a_record_are_not_continued(tmp_path):
    path = tmp_path / "metrics.json"
    records.Results(path, "this", {"seed": 0}).add(METRIC, {"name": "vt"})
    assert records.Results(path, "this", {"seed": 0}).find({"name": "vt"}) == METRIC
    with pytest.raises(ValueError, match="holds cells with seed=0, got 1: choose another --out"):
        records.Results(path, "this", {"seed": 1})
    with pytest.raises(ValueError, match="holds the experiment 'this', expected 'other'"):
        records.Results(path, "other", {})
    for text in ("", "[]", "{}", '{"metrics": []}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="metrics.json is no record"):
            records.Results(path, "eval", {})


def test_a_record_that_is_continued_elsewhere_names_both_devices(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    for kind in ("one card", "another card", "one card"):
        monkeypatch.setattr(jax, "devices", lambda kind=kind: [types.SimpleNamespace(platform="gpu", device_kind=kind)])
        records.Results(path, "this", {}).add({"name": kind, "value": 1, "unit": "percent"}, {"name": kind})
    record = json.loads(path.read_text())
    assert records.device_kinds(record) == ["one card", "another card"] and record["device"]["kind"] == "one card"
    del record["devices"]  # as in older records
    assert records.device_kinds(record) == ["one card"] and records.device_kinds({}) == []


def test_names_beside_lines_do_not_overlap():
    assert spread([0.5, 0.9, 0.1], 0.05).tolist() == pytest.approx([0.5, 0.9, 0.1])
    close = spread([0.50, 0.51, 0.49, 0.02, 0.0, 1.0], 0.1).tolist()
    assert sorted(close) == pytest.approx([0.0, 0.1, 0.4, 0.5, 0.6, 1.0])
    assert close.index(max(close[:3])) == 1 and close[3] > close[4]  # the order stays


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
    records.write_record(path, records.make_record("speed", {"lengths": [1, 2]}, [*rows[:1], {**rows[1], "error": None}]))
    assert main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "experiment  speed" in lines and "settings    lengths 1, 2" in lines and "all rows    name tpot, unit s" in lines
    assert [line.split() for line in lines[-3:]] == [["method", "value"], ["full", "0.5"], ["quest", "0.25"]]


def test_examples_are_counted_as_they_were_measured():
    """Samples are what was asked for, of a file that has fewer."""
    table = records.describe(records.make_record("eval", {}, [METRIC | {"samples": 20, "examples": 6}])).splitlines()[-2:]
    assert [line.split() for line in table] == [["name", "value", "unit", "examples"], ["vt", "50", "percent", "6"]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("{", "r.json: Expecting"),
        ("[]", "r.json: expected what its experiment writes"),
        ({"metrics": [3]}, "row 1: expected an object, got 3"),
        ({"metrics": 3}, "metrics is 3"),
        ({"device": "H100"}, "device is 'H100'"),
        (None, "neither a folder with a metrics.json nor a JSON record"),
    ],
)
def test_no_record_is_refused_with_a_line(tmp_path, capsys, change, words):
    path = tmp_path / "r.json"
    if change is not None:
        path.write_text(change if isinstance(change, str) else json.dumps(records.make_record("speed", {}, []) | change))
    assert main([str(path)]) == 2
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
    with pytest.raises(ValueError, match=f"{file}: expected what its experiment writes, got {got}"):
        for _, draw in figures(file, []):
            draw("png")


@pytest.mark.parametrize("change", [{"value": "x"}, {"knobs": 3}])
def test_damaged_rows_are_not_compared(tmp_path, change):
    whole = {"name": "decode", "method": "full", "value": 1.0, "unit": "s", "knobs": {}}
    for name, row in (("a", whole | change), ("b", whole)):
        records.write_record(tmp_path / f"{name}.json", records.make_record("speed", {}, [row]))
    with pytest.raises(ValueError, match=f"^{tmp_path / 'a.json'} and "):
        compared(tmp_path / "a.json", tmp_path / "b.json")


def timed(path, rows, **settings):
    """Writes a record of times: rows are (method, length, seconds, knobs)."""
    fields = ("method", "length", "value", "knobs")
    metrics = [{"name": "decode", "unit": "s", **dict(zip(fields, row, strict=True))} for row in rows]
    records.write_record(path, records.make_record("speed", settings, metrics))
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


def test_rows_of_two_seeds_stand_beside_each_other_and_their_intervals_overlap_or_not(tmp_path):
    ends = {"vt": ([40, 60], [55, 75]), "cwe": ([40, 45], [50, 75]), "fwe": ([100, 100], [60, 86])}  # 20 of 20 may be 85 %
    for seed in (0, 1):
        rows = [{**METRIC, "name": x, "seed": seed, "examples": 20, "interval_95": both[seed]} for x, both in ends.items()]
        records.write_record(tmp_path / f"{seed}.json", records.make_record("eval", {"seed": seed}, rows))
    text = compared(tmp_path / "0.json", tmp_path / "1.json")
    assert "overlap in 2 of 3 rows" in text and "cwe" in next(x for x in text.splitlines() if "intervals apart" in x)


def test_records_that_measure_other_things_are_not_compared(tmp_path):
    here, there = (timed(tmp_path / f"{name}.json", [("full", 8, 1.0, {})], model=name) for name in "ab")
    assert "not compared, because they are of two models: model 'a' here and 'b' there" in compared(here, there)
    with pytest.raises(ValueError, match="expected two records of one experiment, got 'speed' .* and 'kernels' in .*json"):
        compared(here, RECORDS / "kernels.json")
    assert compared(timed(here, [("full", 8, 1.0, {})]), timed(there, [("full", 9, 1.0, {})])).endswith("no row is in both")


def test_a_record_is_compared_with_the_committed_one_of_its_name_and_kind_or_with_another(tmp_path, capsys):
    made = timed(tmp_path / "speed.json", [("full", 8, 1.0, {})])
    assert committed(made) == RECORDS / "speed.json" and committed(RECORDS / "speed.json") is None
    assert committed(timed(tmp_path / "kernels.json", [])) is None and committed(made, tmp_path / "nowhere") is None
    old = timed(tmp_path / "old.json", [("full", 8, 2.0, {})])
    for words in ([str(old)], ["--against", str(old)]):
        assert main([str(made), *words]) == 0
        assert "median 0.5" in capsys.readouterr().out
    assert main([str(RECORDS / "results" / "qwen-32k"), "--against", str(RECORDS / "results" / "qwen-16k")]) == 0
    assert "no row is in both" in capsys.readouterr().out
    assert main([str(made), "--against", str(tmp_path / "none.json")]) == 2


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
        records.write_bytes(tmp_path / "metrics.json", b"{}")
    assert not list(tmp_path.iterdir())


def test_a_record_names_further_packages():
    assert records.versions(("pytest",))["pytest"] == pytest.__version__ and "pytest" not in records.versions()
