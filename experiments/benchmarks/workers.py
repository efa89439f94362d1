"""Worker processes that end when the process that started them ends, however it ends, and say nothing then."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator


def end_with_parent() -> None:
    """Ends this process as soon as its parent has ended; the initializer of a pool of spawned processes.

    A parent that is killed cannot tell its workers to stop. They would wait for work for ever, and hold its standard output
    open, on which a pipe behind it waits. An interrupt from a keyboard reaches the workers too: they end without a word, for
    their parent says what happened.
    """
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait, args=(parent,), daemon=True).start()


@contextlib.contextmanager
def held_interrupts() -> Iterator[None]:
    """Interrupts wait for the end of this context, and in processes that start in it for `end_with_parent`.

    A process that is interrupted while Python starts shows a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)  # from a thread nothing else ends a process whose other threads wait
