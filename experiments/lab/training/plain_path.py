"""A path that every writer of arrays takes as it stands, whatever the folder is called.

Orbax and TensorStore read brackets and stars in a path as patterns, a backslash as a separator, and ``x:/`` as an address: a
checkpoint is then written elsewhere, or in part, without an error.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
import tempfile
from collections.abc import Iterator

_SPECIAL = re.compile(r"[^\w/ .,+=@~-]")


@contextlib.contextmanager
def plain_path(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a path to ``folder`` that has no special characters: the path itself, or a link that is deleted at the end.

    Args:
        folder: an absolute path to a folder that exists.

    Raises:
        ValueError: the path has special characters, and so has the path of temporary files.
        OSError: the path has special characters, and no link can be made.
    """
    if not _special(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="kvjax-") as holder:
        link = pathlib.Path(holder) / "folder"
        if found := _special(link):
            raise ValueError(
                f"expected a path of letters, digits and _ . - , + = @ ~ for {folder}, or for temporary files, got {found!r} "
                f"in both; set TMPDIR, now {holder}"
            )
        link.symlink_to(folder, target_is_directory=True)
        yield link


def _special(path: pathlib.Path) -> str:
    """Return the first special character of a path, or nothing; a drive's letter does not count."""
    found = _SPECIAL.search(path.relative_to(path.anchor).as_posix())
    return "" if found is None else found[0]
