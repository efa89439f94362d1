"""``kvjax fuzz``: runs ``tests/fuzz``, which a clone of the repository has and an installation lacks."""

import importlib
import pathlib
import sys
from collections.abc import Sequence

_CLONE = pathlib.Path(__file__).resolve().parents[2]  # the folder that holds the packages of a clone


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run ``kvjax fuzz``; an installation, which has no ``tests/fuzz`` beside `experiments`, is refused."""
    folder = _CLONE / "tests" / "fuzz"
    if not folder.is_dir():
        raise FileNotFoundError(f"kvjax fuzz needs a clone of the repository: this installation has no {folder}")
    if sys.path[0] != str(_CLONE):
        sys.path.insert(0, str(_CLONE))  # in front of any other package that is called "tests"
    try:
        job = importlib.import_module("tests.fuzz.__main__")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"kvjax fuzz needs {error.name}: install the extra test, '.[test]'") from error
    return job.main(argv, prog)
