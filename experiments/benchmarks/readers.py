"""Read examples from users' files: `read("FORMAT:PATH")`."""

import functools
from collections.abc import Callable
from pathlib import Path

from experiments.benchmarks.harness import read_harness
from experiments.benchmarks.helmet import read_helmet
from experiments.benchmarks.records import ROWS, check_file
from experiments.benchmarks.suites import read_infinitebench, read_longbench, read_longbench2, read_ruler, read_scbench
from experiments.benchmarks.tables import read_kvpress, read_questions
from experiments.benchmarks.understanding import EXAMPLES, examples_of
from experiments.tasks import Example, check_name

HARNESS = "lm-eval"  # its path is the name of a task, with or without a file
READERS: dict[str, Callable[[Path, int | None], list[Example]]] = {
    "questions": read_questions,
    "ruler": read_ruler,
    "kvpress": read_kvpress,
    "longbench": read_longbench,
    "longbench2": read_longbench2,
    "infinitebench": read_infinitebench,
    "scbench": read_scbench,
    "helmet": read_helmet,
    **{suite: functools.partial(examples_of, suite) for suite in EXAMPLES},
    HARNESS: read_harness,
}
_SUFFIXES = {**dict.fromkeys(("kvpress", "questions", *EXAMPLES), tuple(ROWS)), "longbench2": (".json", ".jsonl")}


def parse(spec: str) -> tuple[str, Path]:
    """Split "FORMAT:PATH".

    Args:
        spec: for example "longbench:data/qasper.jsonl".

    Raises:
        ValueError: the text has no colon or no path, or the format is unknown; the message then names the nearest format.
    """
    name, colon, path = spec.partition(":")
    if not colon or not path:
        raise ValueError(f"expected FORMAT:PATH with a format of {', '.join(READERS)}, got {spec!r}")
    check_name("format", name, READERS)
    return name, Path(path)


def files_of(name: str, path: Path) -> list[Path]:
    """List the files of a path: the file itself, or the files below a folder that have the format's suffixes.

    Args:
        name: a format.
        path: a file or a folder.

    Raises:
        ValueError: the path does not exist, or the folder has no such file.
    """
    if name == HARNESS:
        return [path]
    if not path.is_dir():
        check_file(path)
        return [path]
    suffixes = _SUFFIXES.get(name, (".jsonl",))
    files = sorted(file for file in path.rglob("*") if file.suffix in suffixes and file.is_file())
    if not files:
        raise ValueError(f"{path}: expected files that end in {' or '.join(suffixes)} in this folder, got none")
    return files


def read(spec: str, limit: int | None = None) -> list[Example]:
    """Read the examples of one file, or of all files in a folder.

    Args:
        spec: "FORMAT:PATH", with a format of `READERS`; "lm-eval:TASK" or "lm-eval:TASK=FILE" for tasks of the harness.

    Raises:
        ValueError: the format is unknown, a file is missing, or a record lacks the format's form; the message names the file,
            the line, what was found and what was expected.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"the limit must be at least 1 record, got {limit}")
    name, path = parse(spec)
    return [example for file in files_of(name, path) for example in READERS[name](file, limit)]
