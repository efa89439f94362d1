"""Show what a JSON record holds: `python -m experiments.records RECORD.json [--fields method,length,value]`."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.records.describe import chosen_fields, describe, text_of
from experiments.records.tables import csv_table, latex_table
from experiments.records.titles import method_title


def _csv(record: Mapping[str, Any], fields: Sequence[str]) -> str:
    rows = record["metrics"]
    names = chosen_fields(record, fields) if fields else list(dict.fromkeys(name for row in rows for name in row))
    return csv_table([{name: row.get(name) for name in names} for row in rows])


def _latex(record: Mapping[str, Any], fields: Sequence[str]) -> str:
    rows = [
        {name: text_of(method_title(value) if name == "method" else value) for name, value in row.items()}
        for row in record["metrics"]
    ]
    names = chosen_fields(record, fields)
    telling = [name for name in names if fields or len({row.get(name, "") for row in rows}) > 1] or names
    return latex_table([telling, *([row.get(name, "") for name in telling] for row in rows)])


_FORMATS = {"text": describe, "csv": _csv, "latex": _latex}


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Print a record.

    Args:
        argv: arguments without the program's name; None takes the process's.

    Returns:
        The exit code: 0, or 2 if the file is no record or the fields are unknown.
    """
    parser = argparse.ArgumentParser(prog="kvjax records", description="Show what a JSON record holds.")
    parser.add_argument("record", type=pathlib.Path, help="JSON record, or a result folder")
    parser.add_argument("--fields", help="comma-separated, the columns of the table (default: those that tell rows apart)")
    parser.add_argument("--format", choices=tuple(_FORMATS), default="text", help="of the rows (default: text for people)")
    arguments = parser.parse_args(argv)
    file = arguments.record / "metrics.json" if arguments.record.is_dir() else arguments.record
    fields = [name.strip() for name in arguments.fields.split(",")] if arguments.fields else []
    try:
        if not file.exists():
            raise ValueError(f"{arguments.record} is neither a folder with a metrics.json nor a JSON record")
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is no JSON: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get("metrics"), list):
            raise ValueError(f"{file} is no record of an experiment: it has no list of metrics")
        objects = {name: record.get(name) or {} for name in ("settings", "device", "versions", "notes")}
        objects |= {f"row {number}": row for number, row in enumerate(record["metrics"], 1)}
        for name, value in objects.items():
            if not isinstance(value, dict):
                raise ValueError(f"{file}: expected an object as {name}, got {value!r:.60}")
        print(_FORMATS[arguments.format](record, fields), end="" if arguments.format != "text" else "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has ended, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"kvjax: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
