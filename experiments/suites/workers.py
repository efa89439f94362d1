"""Worker processes that end when the process that started them ends, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Ends this process as soon as its parent has ended; the initializer of a pool of spawned processes.

    A parent that is killed cannot tell its workers to stop. They would wait for work for ever, and hold its standard output
    open, on which a pipe behind it waits.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait, args=(parent,), daemon=True).start()


def _wait(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)  # from a thread nothing else ends a process whose other threads wait
