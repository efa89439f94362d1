"""What the figures of a speed record show of batches: speed against rows, where the memory ends, a step's parts."""

from __future__ import annotations

import pytest

from experiments.speed import figures


def row(method, batch, seconds, **more):
    split = {"rest": seconds / 2, "attend": seconds / 4, "select": seconds / 4, "select_and_attend": seconds / 2}
    good = {"value": seconds, "least": seconds, "most": seconds, "floor": seconds / 2, "ratio": 2.0, "split": split}
    good |= {"tokens_per_second": batch / seconds, "cache_bytes": batch << 30, "error": None, "out_of_memory": False}
    return {"name": "decode", "model": "tiny", "method": method, "length": 1024, "batch": batch, **good, **more}


def lacking(method, batch):
    return row(method, batch, 1.0, value=None, error="RESOURCE_EXHAUSTED", out_of_memory=True)


ROWS = [*(row("full", n, 0.01 * n) for n in (1, 4)), *(row("quest", n, 0.01) for n in (1, 4, 16)), lacking("full", 16)]


def drawn(name, rows):
    made, usual = figures({"experiment": "speed", "metrics": rows})
    assert name in usual
    return made[name]()


def test_the_smallest_batch_that_lacks_memory_is_crossed():
    panel = drawn("speed", ROWS).axes[-1]
    crosses = [line.get_xydata().tolist() for line in panel.lines if line.get_marker() == "x"]
    assert crosses == [[[16, 100.0]]], "level with Full's largest batch; Quest has not met its limit"
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["out of memory"]
    assert drawn("speed", ROWS[:-1]).axes[-1].get_legend() is None


def test_the_parts_of_a_step_are_shown_at_every_batch():
    (panel,) = drawn("split", ROWS).axes
    names = [label.get_text() for label in panel.get_yticklabels()]
    assert sorted(names) == sorted(f"{m}, 1K, {n}" for m, n in [
        ("Full", "1 row"), ("Quest", "1 row"), ("Full", "4 rows"), ("Quest", "4 rows"), ("Quest", "16 rows"),
    ])  # fmt: skip


def test_bars_of_speed_are_sorted_and_name_the_card():
    rows = [row(name, 1, time) for name, time in SLOW]
    figure = figures({"experiment": "speed", "metrics": rows, "device": {"kind": "NVIDIA H200"}})[0]["speed"]()
    (panel,) = figure.axes
    named = [label.get_text() for label in panel.get_yticklabels()]
    assert named == ["CHESS", "TokenSelect (hit)", "Full (int8)", "Full"], "the fastest first, names as in the papers"
    assert figure.get_suptitle() == "NVIDIA H200" and panel.get_xlabel().startswith("ms per token")


SLOW = (("full", 0.04), ("chess", 0.01), ("tokenselect_hit", 0.02), ("full@int8", 0.03), ("full", 0.001))  # the last again


def on(mesh, method, seconds, **more):
    return row(method, 1, seconds, mesh=mesh, length=4096, **more)


def test_steps_on_several_numbers_of_devices_beside_their_floors():
    """Of two ways to sum the faster; a method on one mesh alone, and a part of a model, are no line."""
    two, four = "data=1,model=2", "data=1,model=4"
    rows = [
        *(on(None, "full", 0.008), on(two, "full", 0.005, sums="xla"), on(two, "full", 0.004, sums="peer")),
        *(on(four, "full", 0.003), on(four, "quest", 0.002), on(None, "full", 0.001, parts=2)),
        *(on("data=1,model=1,slots=2", "full", 0.006), on("data=2,model=2", "full", 0.001)),
        on("data=1,model=8", "full", 1.0, error="no"),
    ]
    (panel,) = drawn("scaling", rows).axes
    times, floors = (line.get_xydata().tolist() for line in panel.lines)
    assert times == [[1, 8.0], [2, 4.0], [4, 3.0]]
    assert floors == [[1, 4.0], [2, 2.0], [4, 1.5]]
    assert "model" in panel.get_xlabel() and "4K" in panel.get_title() and panel.get_ylabel() == "ms per token"
    assert "scaling" not in figures({"experiment": "speed", "metrics": ROWS})[1]


def test_one_mesh_makes_no_figure_of_devices():
    made, usual = figures({"experiment": "speed", "metrics": [on("data=1,model=2", "full", 0.01)]})
    assert "scaling" not in usual
    with pytest.raises(ValueError, match="on meshes of two sizes: run experiments.speed --mesh"):
        made["scaling"]()
