"""Show what a JSON record holds: `python -m experiments.records RECORD.json [--fields method,length,value]`."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Sequence

from experiments.records.describe import describe


def main(argv: Sequence[str] | None = None) -> int:
    """Print a record.

    Args:
        argv: arguments without the program's name; None takes the process's.

    Returns:
        The exit code: 0, or 2 if the file is no record or the fields are unknown.
    """
    parser = argparse.ArgumentParser(prog="kvjax records", description="Show what a JSON record holds.")
    parser.add_argument("record", type=pathlib.Path, help="JSON record, or a result folder")
    parser.add_argument("--fields", help="comma-separated, the columns of the table (default: those that tell rows apart)")
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
        print(describe(record, fields))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has ended, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"kvjax: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
