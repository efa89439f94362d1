"""A small file of the fields that a comparison needs of every example: key, context, score, and a digest of the answer.

The predictions of an evaluation take megabytes. The tables need less: they only ask whether two answers are equal.
``examples.npz`` keeps the needed fields beside metrics.json, so that a folder without its predictions can still be compared.
"""

import hashlib
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FILE = "examples.npz"


def brief(line: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce a prediction to "key", "group", "score" and "answer", a 32-bit digest of its text."""
    answer = int(hashlib.sha256(line["prediction"].encode()).hexdigest()[:8], 16)
    return {"key": line["key"], "group": line.get("group", ""), "score": float(line["score"]), "answer": answer}


def packed(cells: Mapping[str, Sequence[Mapping[str, Any]]]) -> bytes:
    """Pack the examples of many cells into the bytes of an npz file.

    Args:
        cells: the examples of each cell as `brief` gives them, by the name of the cell's file of predictions.
    """
    # Cells with the same examples stand side by side, because repeated keys then compress to almost nothing.
    names = sorted(cells, key=lambda name: ([example["key"] for example in cells[name]], name))
    lines = [example for name in names for example in cells[name]]
    file = io.BytesIO()
    np.savez_compressed(
        file,
        cell=np.asarray([name.encode() for name in names]),
        count=np.asarray([len(cells[name]) for name in names], np.int32),
        key=np.asarray([x["key"].encode() for x in lines]),
        group=np.asarray([x["group"].encode() for x in lines]),
        score=np.asarray([x["score"] for x in lines], np.float64),
        answer=np.asarray([x["answer"] for x in lines], np.uint32),
    )
    return file.getvalue()


def unpacked(path: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """Read the examples of a file that `packed` wrote, by the name of their file of predictions; {} if there is no file."""
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as stream, np.load(stream) as file:  # NumPy leaves a damaged file that it opened itself open
            arrays = {name: file[name] for name in file.files}
        return _cells(**arrays)
    except Exception as error:  # a damaged archive ends in errors of zipfile, of zlib, of NumPy and of Python
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def _cells(cell: np.ndarray, count: np.ndarray, **fields: np.ndarray) -> dict[str, list[dict[str, Any]]]:
    cells, start = {}, 0
    for name, size in zip(cell, count, strict=True):
        each = slice(start, start + int(size))
        start = each.stop
        columns = zip(*(fields[field][each].tolist() for field in ("key", "group", "score", "answer")), strict=True)
        cells[name.decode()] = [
            {"key": key.decode(), "group": group.decode(), "score": score, "answer": answer}
            for key, group, score, answer in columns
        ]
    return cells
