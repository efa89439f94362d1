"""What `kvjax ls tasks` shows: every task and group in a line each, or an example of a task."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from experiments.tasks.making import make_samples
from experiments.tasks.registry import GROUPS, TASKS, get_task

_LENGTH = 1024  # tokens of the example
_CHARACTERS = 4  # characters of a token, as counted here; any tokenizer counts differently
_SHOWN = 700  # characters of each end of the example's context


def explain(names: Sequence[str], as_json: bool) -> str:
    """List every task and group, or show an example of the task of the given name.

    Raises:
        ValueError: an unknown task, or one whose questions come from a file.
    """
    return _example(names[0], as_json) if names else _listing(as_json)


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
    (sample,) = make_samples(name, length=_LENGTH, count=1, seed=0, count_tokens=lambda text: -(-len(text) // _CHARACTERS))
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
