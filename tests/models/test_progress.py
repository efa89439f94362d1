"""How far a download is: a bar on a terminal, a few lines in a log."""

from __future__ import annotations

import io
import sys
import types
import warnings

from models.hub.progress import progress


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


def test_a_notebook_gets_a_bar_without_a_warning(monkeypatch):
    """Its standard error is no terminal. Without ipywidgets the bar is text."""
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    for name in [name for name in sys.modules if name.split(".")[0] == "tqdm" and name.endswith(("auto", "autonotebook"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = shown(io.StringIO(), monkeypatch)
    assert "a file: 100%" in text and "8.00M/8.00M" in text
    shell.config.clear()
    assert "25 % of 8 MB" in shown(io.StringIO(), monkeypatch), "IPython in a log"
