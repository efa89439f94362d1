"""One call of attention, timed and compared."""

from experiments.cli import read_record
from experiments.lab import attention_peers


def test_one_call_of_attention_is_timed_and_right(tmp_path, monkeypatch):
    monkeypatch.setattr(
        attention_peers, "WORK", {"all": attention_peers.Work(2, 64), "pages": attention_peers.Work(1, 64, 2, 4)}
    )
    monkeypatch.setattr(attention_peers, "ITERATIONS", 1)
    assert attention_peers.main(["--out", str(tmp_path / "r.json")]) == 0
    rows = read_record(tmp_path / "r.json")["metrics"]
    assert [(row["work"], row["side"]) for row in rows] == [("all", "kvjax"), ("pages", "kvjax")]
    assert all(row["relative_error"] < 1e-2 for row in rows) and rows[1]["bytes_read"] == 2 * 2 * 8 * 8 * 128
