"""What the figures of a speed record show: steps beside their floors, and steps on several numbers of devices."""

import pytest

from experiments.speed import figures


def row(method, batch, seconds, **more):
    good = {"value": seconds, "least": seconds, "most": seconds, "floor": seconds / 2, "ratio": 2.0}
    good |= {"tokens_per_second": batch / seconds, "cache_bytes": batch << 30, "error": None, "out_of_memory": False}
    return {"name": "decode", "model": "tiny", "method": method, "length": 1024, "batch": batch, **good, **more}


ROWS = [row(name, 1, 0.01) for name in ("full", "quest")]


def drawn(name, rows):
    made, usual = figures({"experiment": "speed", "metrics": rows})
    assert name in usual
    return made[name]()


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
