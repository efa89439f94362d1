"""Parts of a page that are made from records: each part stands between two marks, and is written again with the tables."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

_MARKED = re.compile(r"(<!-- ([\w-]+): generated[^>]*-->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def with_parts(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Make the parts of a page again and return its text.

    A part stands between the lines ``<!-- NAME: generated ... -->`` and ``<!-- end of NAME -->``.

    Args:
        text: the page.
        parts: by name, a function that makes the markdown of a part; only the functions of parts on the page are called.

    Raises:
        ValueError: the page has a part that nothing makes.
    """

    def made(found: re.Match[str]) -> str:
        name = found[2]
        if name not in parts:
            raise ValueError(f"a page has the part {name!r}, expected one of {', '.join(parts)}")
        return f"{found[1]}{parts[name]()}\n{found[3]}"

    return _MARKED.sub(made, text)


def names_of(text: str) -> list[str]:
    """List the names of the parts that a page has."""
    return [found[2] for found in _MARKED.finditer(text)]


def missing(docs: pathlib.Path, settings: Sequence[str]) -> str:
    """Write the text in place of a part whose records do not exist yet: the commands that make the records.

    Args:
        docs: folder of the documentation.
        settings: names of files of ``docs/settings``, whose first line ends with the command.
    """
    commands = [command_of(docs / "settings" / f"{name}.yaml") for name in settings]
    told = " and ".join(f"`{command}`" for command in commands)
    return f"This part has not been measured yet. {told} {'makes its record' if len(commands) == 1 else 'make its records'}."


def command_of(settings: pathlib.Path) -> str:
    """Find the command that a settings file names in its comment."""
    found = re.search(r"python -m (kvjax|experiments).+", settings.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{settings} must name its command (python -m ...) in a comment, got none")
    return found[0].strip()
