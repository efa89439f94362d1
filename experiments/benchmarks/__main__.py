"""``kvjax suites FORMAT:PATH``: show what a suite's file holds, by task, with the beginning of an example."""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Sequence

from experiments.benchmarks.base import Example
from experiments.benchmarks.readers import READERS, read

_SHOWN = 300  # characters of the example's context


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Print what a file holds.

    Args:
        argv: arguments without the program's name; None takes the process's.

    Returns:
        The exit code: 0, or 2 for a file that cannot be read.
    """
    parser = argparse.ArgumentParser(prog="kvjax suites", description="Show what a suite's file holds.")
    parser.add_argument("spec", metavar="FORMAT:PATH", help=f"a file or a folder; formats: {', '.join(READERS)}")
    parser.add_argument("--limit", type=int, help="records to read of each file (default: all)")
    arguments = parser.parse_args(argv)
    try:
        print(_summary(read(arguments.spec, arguments.limit)))
    except (ValueError, ModuleNotFoundError, OSError) as error:
        print(f"kvjax: error: {error}", file=sys.stderr)
        return 2
    return 0


def _summary(examples: Sequence[Example]) -> str:
    by_task: dict[str, list[Example]] = collections.defaultdict(list)
    for example in examples:
        by_task[example.task].append(example)
    width = max(map(len, by_task))
    lines = [f"{'task':{width}s}  examples  contexts  mean characters  new tokens  scorer"]
    for task, mine in by_task.items():
        contexts = len({example.group or index for index, example in enumerate(mine)})
        size = round(sum(len(example.prompt) for example in mine) / len(mine))
        tokens = max(example.max_new_tokens for example in mine)
        scorers = ", ".join(dict.fromkeys(example.scorer for example in mine))
        lines.append(f"{task:{width}s}  {len(mine):8,d}  {contexts:8,d}  {size:15,d}  {tokens:10,d}  {scorers}")
    first = examples[0]
    return "\n".join(
        [
            *lines,
            "",
            f"first example: {first.context[:_SHOWN].strip()} ...",
            f"question: {first.question.strip()[-_SHOWN:]}",
            f"expected: {', '.join(first.answers)}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
