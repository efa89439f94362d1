"""The texts that commands read."""

import sys

from experiments.tasks import check_unicode, decode_text, read_text


def read_prompt(text: str | None, path: str | None = None) -> str:
    """Return the text, or the text of the file, "-" for standard input; an empty text is refused.

    A file is UTF-8, or UTF-16 with a byte-order mark.
    """
    if path is not None:
        text = decode_text(sys.stdin.buffer.read(), "standard input") if path == "-" else read_text(path)
    if not (text or "").strip():
        raise ValueError(f"expected a text, got {text!r} from {path or 'the command line'}")
    check_unicode(text or "")
    return text or ""
