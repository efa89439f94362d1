"""What the figures of a speed record show of batches: speed against rows, where the memory ends, a step's parts."""

from __future__ import annotations

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
        ("full", "1 row"), ("quest", "1 row"), ("full", "4 rows"), ("quest", "4 rows"), ("quest", "16 rows"),
    ])  # fmt: skip
