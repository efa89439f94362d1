"""How far a download is: a bar on a terminal, a few lines in a log."""

from __future__ import annotations

import io
import sys

from models.progress import progress


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self):
        return True


def shown(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("a file") as show:
        show(0, 8_000_000)
        for done in range(0, 8_000_001, 1_000_000):
            show(done, 8_000_000)
    return stream.getvalue()


def test_a_log_gets_a_line_for_every_quarter(monkeypatch):
    lines = [f"kvjax: a file: {share} % of 8 MB\n" for share in (25, 50, 75, 100)]
    assert shown(io.StringIO(), monkeypatch) == "".join(lines)


def test_a_terminal_gets_a_bar(monkeypatch):
    text = shown(Screen(), monkeypatch)
    assert text.count("\r") > 1 and "a file: 100%" in text and "8.00M/8.00M" in text
