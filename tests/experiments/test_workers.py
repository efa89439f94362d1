"""Worker processes end with the process that started them."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys

import models

ROOT = pathlib.Path(__file__).parents[2]
KILLED = """
import os, pathlib, signal
from experiments.suites import Cell, CellStore, Reading

if __name__ == "__main__":
    cells = [Cell("passkey", length, 1) for length in (256, 300, 400)]
    store = CellStore(Reading(pathlib.Path({tokenizer!r})), cells, 2)
    print(store[cells[0]].cell.length, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_of_a_killed_process_let_go_of_its_output(tmp_path):
    """`run` returns when nobody holds the pipe any more: it would wait for ever for workers that live on."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(tokenizer=str(models.builtin_directory() / "tokenizer.json")))
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "256\n")
