"""What `kvjax ls FORMAT:PATH` shows of a suite's file."""

from __future__ import annotations

import collections

from experiments.benchmarks.base import Example
from experiments.benchmarks.readers import read

_SHOWN = 300  # characters of the example's context


def explain(spec: str) -> str:
    """Describe what a file holds, by task, with the beginning of its first example.

    Args:
        spec: FORMAT:PATH, see `experiments.benchmarks.read`.

    Raises:
        ValueError: an unknown format, or a damaged file.
    """
    examples = read(spec)
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
