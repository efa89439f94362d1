"""The command ``kvjax``, which is also ``python -m kvjax``; which imports `experiments`."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
from collections.abc import Sequence

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
    if told := _hidden():
        sys.stderr.write(f"kvjax: error: {told}\n")
        return 2
    from experiments.cli.main import main as run

    return run(argv)


def _hidden() -> str | None:
    """Describe a foreign package that hides one of ours, or a package of ours that is missing; None if all is well."""
    for name in ("models", "experiments"):
        found = importlib.util.find_spec(name)
        places = [] if found is None else [pathlib.Path(p).resolve() for p in found.submodule_search_locations or ()]
        if _HOME / name not in places:
            other = next(iter(places), None) or (found.origin if found is not None else None)
            what = f"{other} hides it: rename that, or take its directory off the search path" if other else "it is missing"
            return f"kvjax needs its own package {name!r} in {_HOME}, but {what}"
    return None


if __name__ == "__main__":
    sys.exit(main())
