"""The command ``kvjax``, which is also ``python -m kvjax``; which imports `experiments`."""

import os
import pathlib
import sys
from collections.abc import Sequence

from kvjax.models import hidden

_HOME = pathlib.Path(__file__).resolve().parents[1]  # our packages lie beside each other


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    ``python -m`` looks for modules in the current directory first, where a folder "models" is likely and would hide ours. The
    script ``kvjax`` does not look there. So the current directory is taken off the search path.

    Args:
        argv: arguments without the program's name; None means the arguments of this process.
    """
    here = os.getcwd()
    # A checkout that is not installed is found by the current directory only.
    if sys.path[0] in ("", here) and pathlib.Path(here).resolve() != _HOME:
        del sys.path[0]
    for name in ("models", "experiments"):
        if reason := hidden(name):
            sys.stderr.write(f"kvjax: error: {reason}\n")
            return 2
    from experiments.cli.main import main as run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
