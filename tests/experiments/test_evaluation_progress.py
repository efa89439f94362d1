"""What an evaluation shows while it works: in a log, where no bar is drawn, and inside of a cell."""

from __future__ import annotations

import concurrent.futures
import threading
import time

import pytest

from experiments.evaluation import answers, progress
from experiments.evaluation.ahead import CompileAhead


def lines_of(capsys):
    return capsys.readouterr().err.splitlines()


def wait_for(capsys, part):
    """Lines of a log, up to the first with ``part``."""
    found, end = [], time.monotonic() + 10
    while not any(part in line for line in found):
        assert time.monotonic() < end, (part, found)
        time.sleep(0.01)
        found += lines_of(capsys)
    return found


def test_a_log_says_what_is_done_whenever_nothing_was_said_for_long(capsys):
    with progress.Progress(26, True, False, lambda: "3 of 9 programs are ready", silence=0.02) as bar:
        bar.end(2)
        bar.begin("12 methods passkey 16384", 12)
        line = wait_for(capsys, "compiling")[-1]
        assert "16384: compiling, 3 of 9 programs are ready (for 0 s; 2 of 26 cells are done)" in line
        bar.tell("reading", 0.1, "prompts 9 to 16 of 50")
        line = wait_for(capsys, "reading")[-1]
        assert "12 methods passkey 16384: reading prompts 9 to 16 of 50 (for 0 s; 2 of 26 cells are done)" in line
    lines_of(capsys)
    time.sleep(0.1)
    assert lines_of(capsys) == [], "the end of the block ends the lines"
    assert "progress" not in [thread.name for thread in threading.enumerate()]


def test_a_log_has_no_line_while_others_are_shown_and_none_if_nothing_is(capsys):
    with progress.Progress(2, True, False, silence=0.5) as bar:
        for _ in range(30):
            bar.tell("reading", 0.0)
            bar.said()
            time.sleep(0.02)
    with progress.Progress(2, False, False, silence=0.01) as bar:
        bar.begin("x", 1)
        time.sleep(0.1)
    assert lines_of(capsys) == []


@pytest.mark.parametrize("methods", [1, 3])
def test_a_part_of_a_cell_says_which_prompts_of_the_cell(methods):
    told = []
    given = lambda *args: told.append(args)  # noqa: E731
    answers._tell_part(given, 20, 30, 50, methods, "reading", 0.0, range(8, 16), 0)
    answers._tell_part(given, 20, 30, 50, methods, "asking", 0.5, range(8, 16), 1)
    under = " under method 1 of 3" if methods > 1 else ""
    assert told == [("reading", 0.4, "prompts 29 to 36 of 50"), ("asking", 0.7, f"prompts 29 to 36 of 50{under}")]


def test_the_compiler_says_how_many_programs_are_ready():
    go = threading.Event()

    class Program:
        def __init__(self, waits=False):
            self.compile = go.wait if waits else int

    with CompileAhead(threads=2) as ahead:
        assert ahead.describe() == ""
        ahead.add("a", lambda: iter([Program(), Program(waits=True)]))
        concurrent.futures.wait([ahead._traced["a"]])
        ahead.wait("a", 1)
        assert ahead.describe() == "1 of 2 programs are ready"
        go.set()
        ahead.wait("a")
        assert ahead.describe() == "2 of 2 programs are ready"
