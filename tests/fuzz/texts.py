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

from hypothesis import strategies as st

from experiments.cli import read_record
from experiments.evaluation import EvaluationSettings
from experiments.tasks import read_text, source_text
from models import ChatTemplate
from tests.fuzz.verdicts import judge

_ENCODINGS = (
    "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be", "latin-1", "cp1252", "shift_jis",
    "gb18030", "cp437", "mac-roman", "utf-7", "koi8-r",
)  # fmt: skip
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
_ASCII = "abc XYZ 019.,"
_LETTERS = st.sampled_from(_ASCII) | st.sampled_from(_ASCII + "éüßøÅñçæ日本語中文привет😀👩\u200d👧\u2028\u00a0\ufeff“”—…’")
_ENDS = ("\n", "\r\n", "\r", "\n\n")


def check(data: st.DataObject, folder: pathlib.Path) -> Iterator[None]:
    """Write a text in an encoding, some of them damaged, and read it."""
    draw = data.draw
    name, wide, keys, read = draw(st.sampled_from(_READERS))
    text = draw(st.text(_LETTERS, min_size=1, max_size=60))
    if name.endswith(".yaml"):
        text = text.replace("\u2028", "")  # a line's end in YAML
    content = _in_json(text, keys) if keys else text + draw(st.sampled_from(_ENDS)) + "end"
    encoding, damage = draw(st.sampled_from(_ENCODINGS)), ""
    written = content.encode(encoding, "replace")
    if draw(st.integers(0, 2)) == 2:
        at, odd = draw(st.integers(0, len(written))), bytes([draw(st.integers(128, 255))])
        head, tail = written[:at], written[at:]
        written = draw(st.sampled_from((head, head + b"\0" + tail, head + odd + tail, tail)))
        damage = f", damaged at byte {at}"
    shutil.rmtree(folder / "texts", ignore_errors=True)
    (folder / "texts").mkdir()
    file = folder / "texts" / name
    file.write_bytes(written)
    about, want = f"{name} in {encoding}{damage}: {written[:60]!r}", _decoded(written, wide)
    try:
        if want is not None and keys:
            want = functools.reduce(operator.getitem, keys, json.loads(want))
    except (ValueError, TypeError, KeyError):
        want = None  # the damage is in the JSON
    if want is None:
        judge(about, lambda: read(file), named=(name,))
    else:  # a text of damaged letters may be refused for what it says
        expected = want if keys else want.replace("\r\n", "\n").replace("\r", "\n")
        right = lambda got: None if got == expected else f"read {got!r:.80}, expected {expected!r:.80}"  # noqa: E731
        judge(about, lambda: read(file), right=right, named=(name,) if damage else ())
    yield


def _in_json(text: str, keys: tuple[str, ...]) -> str:
    """JSON that has the text under these keys."""
    record = {"experiment": "speed", "metrics": [{"name": "time", "value": 1.0}]} if len(keys) > 1 else {}
    value: Any = text
    for key in reversed(keys):
        value = {key: value}
    return json.dumps(record | value, ensure_ascii=False)


def _decoded(written: bytes, wide: bool) -> Any:
    """Decode as UTF-8, or as what a byte-order mark says; None for bytes that are no such text."""
    encoding = next((name for mark, name in _MARKS.items() if written.startswith(mark)), "utf-8-sig") if wide else "utf-8-sig"
    try:
        text = written.decode(encoding)
    except UnicodeDecodeError:
        return None
    return None if wide and "\0" in text else text


def _template(file: pathlib.Path) -> str | None:
    template = ChatTemplate.from_directory(file.parent)
    return template and template.template


# A file's name, whether its reader takes UTF-16 and UTF-32 with a mark, the keys of the text in JSON, and the reader.
_READERS: tuple[tuple[str, bool, tuple[str, ...], Callable[[pathlib.Path], Any]], ...] = (
    ("prompt.txt", True, (), read_text),
    ("haystack.txt", True, (), lambda file: source_text(f"file:{file}")),
    ("chat_template.jinja", False, (), _template),
    ("tokenizer_config.json", False, ("chat_template",), _template),
    ("record.json", False, ("settings", "model"), lambda file: read_record(file)["settings"]["model"]),
    ("settings.yaml", False, ("model",), lambda file: EvaluationSettings.from_yaml(file).model),
)
