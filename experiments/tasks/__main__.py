"""``kvjax ls tasks``: list every task and group in a line each, or show an example of a named task."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence

from experiments.tasks.making import make_samples
from experiments.tasks.registry import GROUPS, TASKS, get_task

_LENGTH = 1024  # tokens of the example
_CHARACTERS = 4  # characters of a token, as counted here; any tokenizer counts differently
_SHOWN = 700  # characters of each end of the example's context


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Print the tasks, or an example of a task.

    Args:
        argv: arguments without the program's name; None takes the process's.

    Returns:
        The exit code: 0, or 2 for an unknown name.
    """
    parser = argparse.ArgumentParser(prog="kvjax ls tasks", description="List the tasks, or show an example of a task.")
    parser.add_argument("name", nargs="?", help="a task")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    try:
        print(_listing(arguments.json) if arguments.name is None else _example(arguments.name, arguments.json))
    except (ValueError, ModuleNotFoundError) as error:
        print(f"kvjax: error: {error}", file=sys.stderr)
        return 2
    return 0


def _listing(as_json: bool) -> str:
    if as_json:
        tasks = [{"name": task.name, "about": task.about, "needs_file": task.needs_file} for task in TASKS.values()]
        return json.dumps({"tasks": tasks, "groups": GROUPS}, indent=1)
    width = max(map(len, TASKS))
    lines = [f"{task.name:{width}s}  {task.about}{_note(task.name)}" for task in TASKS.values()]
    groups = [
        textwrap.fill(f"{name:{width}s}  {', '.join(members)}", 110, subsequent_indent=" " * (width + 2))
        for name, members in GROUPS.items()
    ]
    more = "files (FORMAT:PATH) are tasks of kvjax eval, too; kvjax ls tasks NAME shows an example"
    return "\n".join([*lines, "", "groups:", *groups, "", more])


def _note(name: str) -> str:
    return f" (needs a file: --haystack {name}=file:PATH)" if get_task(name).needs_file else ""


def _example(name: str, as_json: bool) -> str:
    task = get_task(name)
    if task.needs_file:
        raise ValueError(f"{name} asks the questions of a {task.haystack} file, which you bring, so there is no example")
    (sample,) = make_samples(
        name, length=_LENGTH, count=1, seed=0, count_tokens=lambda text: -(-len(text) // _CHARACTERS)
    )
    if as_json:
        fields = ("task", "context", "question", "answer_prefix", "answers", "max_new_tokens")
        return json.dumps({field: vars(sample)[field] for field in fields}, indent=1)
    context = sample.context
    if len(context) > 2 * _SHOWN:
        left_out = len(context) - 2 * _SHOWN
        context = f"{context[:_SHOWN]}\n[... {left_out} characters ...]\n{context[-_SHOWN:]}"
    parts = (
        f"{name}: {task.about}; answers of at most {sample.max_new_tokens} tokens",
        f"--- context\n{context}",
        f"--- question\n{sample.question.strip()}",
        f"--- the answer begins with\n{sample.answer_prefix.strip()}",
        f"--- expected\n{', '.join(sample.answers)}",
    )
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
