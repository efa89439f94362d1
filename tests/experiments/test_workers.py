"""Worker processes end with the process that started them."""

import pathlib
import signal
import subprocess
import sys

import models

ROOT = pathlib.Path(__file__).parents[2]
KILLED = """
import os, pathlib, signal
from experiments.benchmarks import Cell, CellStore, Reading

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background would have it ignored
    cells = [Cell("passkey", length, 1) for length in (256, 300, 400)]
    store = CellStore(Reading(pathlib.Path({tokenizer!r})), cells, 2)
    print(store[cells[0]].cell.length, flush=True)
    os.{kill}
"""


def ended(script, kill):
    """A process with workers, which ends itself by a function of `os`. It leads a group of its own."""
    script.write_text(KILLED.format(tokenizer=str(models.builtin_directory() / "tokenizer.json"), kill=kill))
    command = [sys.executable, str(script)]
    return subprocess.run(
        command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, start_new_session=True
    )


def test_workers_of_a_killed_process_let_go_of_its_output(tmp_path):
    """`run` returns when nobody holds the pipe any more: it would wait for ever for workers that live on."""
    script = tmp_path / "killed.py"
    done = ended(script, "kill(os.getpid(), signal.SIGKILL)")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "256\n")


def test_workers_of_an_interrupted_process_say_nothing(tmp_path):
    """A keyboard interrupts the whole group of processes. Without the rule, every worker shows a traceback of its own."""
    done = ended(tmp_path / "interrupted.py", "killpg(os.getpgid(0), signal.SIGINT)")
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "256\n")
    assert done.stderr.count("Traceback") == 1 and "Process Spawn" not in done.stderr, done.stderr
