"""Text files in any encoding: read as what they are, or refused with the file's name; never as other letters."""

from __future__ import annotations

import codecs
import functools
import json
import operator
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from experiments.cli import read_record
from experiments.evaluation import EvaluationSettings
from experiments.tasks import read_text, source_text
from models import ChatTemplate
from tests.fuzz.report import Outcome
from tests.fuzz.verdicts import verify
from tests.fuzz.words import one

_ENCODINGS = (
    "utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be", "latin-1", "cp1252",
    "shift_jis", "gb18030", "cp437", "mac-roman", "utf-7", "koi8-r",
)  # fmt: skip
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
_LETTERS = ("abc XYZ 019.,", "éüßøÅñçæ", "日本語中文", "привет", "😀👩\u200d👧", "\u2028\u00a0\ufeff", "“”—…’")
_ENDS = ("\n", "\r\n", "\r", "\n\n")


class Texts:
    """Random texts in random encodings, some of them damaged, for each reader of text files.

    Args:
        seed: of all cases.
        folder: for files; the caller removes it.
    """

    def __init__(self, seed: int, folder: pathlib.Path) -> None:
        self.seed, self.folder = seed, folder

    def check(self, number: int) -> Iterator[Outcome]:
        """Give the outcome of one file."""
        rng = np.random.default_rng([self.seed, 7, number])
        name, wide, keys, read = one(rng, _READERS)
        letters = [_LETTERS if rng.random() < 0.7 else _LETTERS[:1] for _ in range(rng.integers(1, 60))]
        text = "".join(one(rng, one(rng, kinds)) for kinds in letters)
        if name.endswith(".yaml"):
            text = text.replace("\u2028", "")  # a line's end in YAML
        if not keys:
            text += one(rng, _ENDS) + "end"
        encoding = one(rng, _ENCODINGS)
        data, damage = _content(text, keys).encode(encoding, "replace"), ""
        if rng.random() < 0.3:
            data, damage = _damaged(data, rng)
        shutil.rmtree(self.folder / "texts", ignore_errors=True)
        (self.folder / "texts").mkdir()
        file = self.folder / "texts" / name
        file.write_bytes(data)
        want = _decoded(data, wide)
        about = f"{name} in {encoding}{damage}: {data[:60]!r}"
        expected: Any = None
        if want is not None:
            try:
                expected = _plain(want) if not keys else functools.reduce(operator.getitem, keys, json.loads(want))
            except (ValueError, TypeError, KeyError):
                want = None  # the damage is in the JSON
        if want is None:
            yield verify(about, lambda: read(file), right=None, named=name)
            return

        def right(got: Any) -> str | None:
            return None if got == expected else f"read {got!r:.80}, expected {expected!r:.80}"

        # A text of damaged letters may be refused for what it says.
        yield verify(about, lambda: read(file), right=right, named=name if damage else None)


def _content(text: str, keys: tuple[str, ...]) -> str:
    """Make the content of a file: the text itself, or JSON that has it under these keys."""
    if not keys:
        return text
    more = {"experiment": "speed", "metrics": [{"name": "time", "value": 1.0}]} if len(keys) > 1 else {}
    value: Any = text
    for key in reversed(keys):
        value = {key: value}
    return json.dumps(more | value, ensure_ascii=False)


def _plain(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _decoded(data: bytes, wide: bool) -> str | None:
    """Decode as UTF-8, or as what a byte-order mark says; None for bytes that are no such text."""
    encoding = next((name for mark, name in _MARKS.items() if data.startswith(mark)), "utf-8-sig") if wide else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        return None
    return None if wide and "\0" in text else text


def _damaged(data: bytes, rng: np.random.Generator) -> tuple[bytes, str]:
    at = int(rng.integers(len(data) + 1))
    kind = int(rng.integers(4))
    if kind == 0:
        return data[:at], f", cut to {at} bytes"
    if kind == 1:
        return data[:at] + b"\0" + data[at:], f", a NUL at {at}"
    if kind == 2:
        return data[:at] + bytes([int(rng.integers(128, 256))]) + data[at:], f", a byte more at {at}"
    return data[at:], f", from byte {at} on"


# ---- readers ------------------------------------------------------------------------------------------------------


def _template(file: pathlib.Path) -> str | None:
    found = ChatTemplate.from_directory(file.parent)
    return found and found.template


# A file's name, whether its reader takes UTF-16 and UTF-32 with a mark, the keys of the text in JSON, and the reader.
_READERS: tuple[tuple[str, bool, tuple[str, ...], Callable[[pathlib.Path], Any]], ...] = (
    ("prompt.txt", True, (), read_text),
    ("haystack.txt", True, (), lambda file: source_text(f"file:{file}")),
    ("chat_template.jinja", False, (), _template),
    ("tokenizer_config.json", False, ("chat_template",), _template),
    ("record.json", False, ("settings", "model"), lambda file: read_record(file)["settings"]["model"]),
    ("settings.yaml", False, ("model",), lambda file: EvaluationSettings.from_yaml(file).model),
)
