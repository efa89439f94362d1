"""Checks the files of a result folder as they are read, so that an error names the damaged file and what it lacks."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

from models.files.directories import leaves_folder

_Kind = tuple[Callable[[Any], bool], str]


def _typed(expected: str, *types: type) -> _Kind:
    """Describe values of some types; a number must be finite, and a truth value is no number."""
    return lambda value: type(value) in types and (type(value) is not float or math.isfinite(value)), expected


_TEXT, _TEXT_OR_NULL = _typed("a text", str), _typed("a text or null", str, NoneType)
_NUMBER, _NUMBER_OR_NULL = _typed("a number", int, float), _typed("a number or null", int, float, NoneType)
_WHOLE, _WHOLE_OR_NULL = _typed("a whole number", int), _typed("a whole number or null", int, NoneType)
_BOOL, _OBJECT = _typed("true or false", bool), _typed("an object", dict)
_POSITIVE: _Kind = (lambda value: _NUMBER[0](value) and value > 0, "a number above 0")
_PAIR: _Kind = (
    lambda value: isinstance(value, list) and len(value) == 2 and all(map(_NUMBER[0], value)),
    "a list of two numbers",
)

_ROW: dict[str, _Kind] = {
    "name": _TEXT, "value": _NUMBER, "unit": _TEXT, "method": _TEXT, "question": _TEXT, "predictions": _TEXT,
}  # fmt: skip
_SHOWN_OF_ROW: dict[str, _Kind] = {
    "interval_95": _PAIR, "no_effect": _BOOL, "samples": _WHOLE, "attended_tokens": _NUMBER, "length_tokens": _NUMBER,
    "bytes_read_per_step": _NUMBER, "full_bytes_read_per_step": _POSITIVE, "resident_bytes_per_row": _NUMBER,
}  # fmt: skip
_ROW_MAY: dict[str, _Kind] = {
    "task": _TEXT, "length": _WHOLE_OR_NULL, "seed": _WHOLE_OR_NULL, "haystack": _TEXT_OR_NULL, "depth": _NUMBER_OR_NULL,
    "questions": _WHOLE_OR_NULL, "source": _TEXT_OR_NULL, "scored_tokens": _WHOLE_OR_NULL, "knobs": _OBJECT,
    "library": _OBJECT, "examples_digest": _TEXT, **_SHOWN_OF_ROW,
}  # fmt: skip
_RECORD: dict[str, _Kind] = {"device": _OBJECT, "versions": _OBJECT, "date": _TEXT, "commit": _TEXT_OR_NULL}
_RUN: dict[str, _Kind] = {"date": _TEXT, "commit": _TEXT_OR_NULL}
_RUN_MAY: dict[str, _Kind] = {"cells": _WHOLE}
_LINE: dict[str, _Kind] = {"key": _TEXT, "prediction": _TEXT, "score": _NUMBER}
_LINE_MAY: dict[str, _Kind] = {"group": _TEXT}


def check_rows(record: Mapping[str, Any], where: pathlib.Path) -> None:
    """Refuse a metrics.json whose rows a comparison cannot use.

    Args:
        record: the file's content, as `experiments.cli.read_record` returns it.
        where: the folder or the file, for messages.

    Raises:
        ValueError: a field is missing or of another type, or a row's predictions are a file outside of the folder.
    """
    for number, row in enumerate(record["metrics"], 1):
        _check(row, _ROW, _ROW_MAY, f"{where}, row {number}")
        if leaves_folder(row["predictions"]):
            raise ValueError(f"{where}, row {number}: predictions must be a file of the folder, got {row['predictions']!r}")


def check_shown(record: Mapping[str, Any], where: pathlib.Path) -> None:
    """Refuse a metrics.json that lacks fields of a table: what made the numbers, and the accounting of the rows."""
    _check(record, _RECORD, {}, f"{where}")
    _check(record["settings"], {"model": _TEXT, "dtype": _TEXT}, {}, f"{where}, settings")
    _check(record["device"], {"kind": _TEXT}, {}, f"{where}, device")
    _check(record["versions"], {"jax": _TEXT}, {}, f"{where}, versions")
    for number, row in enumerate(record["metrics"], 1):
        _check(row, _SHOWN_OF_ROW, {}, f"{where}, row {number}")


def read_meta(file: pathlib.Path) -> list[dict[str, Any]]:
    """Read the runs in a folder's meta.json."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    runs = content.get("runs") if isinstance(content, dict) else None
    if not isinstance(runs, list):
        raise ValueError(f"{file} is damaged: expected a list of runs, got {_shown(runs)}")
    for number, run in enumerate(runs, 1):
        _check(run, _RUN, _RUN_MAY, f"{file}, run {number}")
    return runs


def read_lines(file: pathlib.Path) -> list[dict[str, Any]]:
    """Read the predictions in a file, in the order of its lines."""
    predictions = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line:
            continue
        try:
            prediction = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is damaged in line {number}: {error}") from error
        _check(prediction, _LINE, _LINE_MAY, f"{file}, line {number}")
        predictions.append(prediction)
    return predictions


def _check(values: Any, must: Mapping[str, _Kind], may: Mapping[str, _Kind], where: str) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected an object, got {_shown(values)}")
    for name, (_, expected) in must.items():
        if name not in values:
            raise ValueError(f"{where}: expected {expected} as {name}, got nothing")
    for name, (fits, expected) in {**must, **may}.items():
        if name in values and not fits(values[name]):
            raise ValueError(f"{where}: expected {expected} as {name}, got {_shown(values[name])}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
