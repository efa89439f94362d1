"""Worker processes that end silently when the process that started them ends, however it ends."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator


def end_with_parent() -> None:
    """End this process as soon as its parent has ended; the initializer of a pool of spawned processes.

    A killed parent cannot tell its workers to stop. The workers would wait for work for ever, and would hold the parent's
    standard output open, so that a pipe after the parent would never end. An interrupt from a keyboard reaches the workers
    too: they end silently, because their parent says what happened.
    """
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait, args=(parent,), daemon=True).start()


@contextlib.contextmanager
def held_interrupts() -> Iterator[None]:
    """Hold interrupts until this context ends; in processes that start inside it, until `end_with_parent` runs.

    A process that is interrupted while Python starts would show a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)  # from a thread nothing else ends a process whose other threads wait
