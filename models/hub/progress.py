"""The messages and the progress of a download on standard error."""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

_MINUTE = 60.0  # seconds


def say(text: str) -> None:
    """Show a line on standard error, above the progress bars."""
    tqdm.write(f"kvjax: {text}", file=sys.stderr)


def megabytes(size: float) -> str:
    """Format a number of bytes for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def is_drawn() -> bool:
    """Tell whether a bar can be drawn again and again in one place: on a terminal and in a notebook, but not in a log."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    in_notebook = shell is not None and "IPKernelApp" in shell.config  # whose standard error is no terminal
    return in_notebook or (sys.stderr is not None and sys.stderr.isatty())


def progress_bar(**options: Any) -> tqdm:
    """Make a bar: a widget in a notebook that has ipywidgets, otherwise text. In a log it is drawn once a minute at most.

    Args:
        options: arguments of `tqdm.tqdm`.
    """
    if not is_drawn():
        options = {"mininterval": _MINUTE, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it advises to install ipywidgets, and a bar of text is shown without
        from tqdm.auto import tqdm as bar
    return bar(**options)


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of the bytes that are done and of all bytes, which draws the `progress_bar` of a job."""
    with progress_bar(desc=title, unit="B", unit_scale=True, unit_divisor=1000) as bar:

        def draw(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield draw
