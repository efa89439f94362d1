"""What `kvjax ls tasks` and `kvjax ls FORMAT:PATH` show: tasks in a line each, an example of a task, a suite's file."""

import collections
import json
import textwrap
from collections.abc import Sequence

from experiments.benchmarks.readers import read
from experiments.tasks import GROUPS, TASKS, Example, get_task, make_samples

_LENGTH = 1024  # tokens of a task's example
_CHARACTERS = 4  # characters of a token, as counted here; any tokenizer counts differently


def explain_tasks(names: Sequence[str], as_json: bool) -> str:
    """List every task and group, or those of the group of the given name; or show an example of the task of this name.

    Raises:
        ValueError: an unknown task, or one whose questions come from a file.
    """
    listed = GROUPS.get(names[0]) if names else tuple(TASKS)
    return _example(names[0], as_json) if listed is None else _listing(listed, as_json)


def _listing(names: Sequence[str], as_json: bool) -> str:
    tasks = {name: TASKS[name] for name in names}
    groups = {name: members for name, members in GROUPS.items() if tasks.keys() >= {*members}}
    if as_json:
        listed = [{"name": task.name, "about": task.about, "needs_file": task.needs_file} for task in tasks.values()]
        return json.dumps({"tasks": listed, "groups": groups}, indent=1)
    width = max(map(len, TASKS))
    notes = {name: f" (needs a file: --haystack {name}=file:PATH)" for name, task in tasks.items() if task.needs_file}
    lines = [f"{name:{width}s}  {task.about}{notes.get(name, '')}" for name, task in tasks.items()]
    parts = [
        textwrap.fill(f"{name:{width}s}  {', '.join(members)}", 110, subsequent_indent=" " * (width + 2))
        for name, members in groups.items()
    ]
    more = "files (FORMAT:PATH) are tasks of kvjax eval, too; kvjax ls tasks NAME shows an example"
    return "\n".join([*lines, "", "groups:", *parts, "", more])


def _example(name: str, as_json: bool) -> str:
    task = get_task(name)
    if task.needs_file:
        raise ValueError(f"{name} asks the questions of a {task.haystack} file, which you bring, so there is no example")
    (sample,) = make_samples(name, length=_LENGTH, count=1, seed=0, count_tokens=lambda text: -(-len(text) // _CHARACTERS))
    if as_json:
        fields = ("task", "context", "question", "answer_prefix", "answers", "max_new_tokens")
        return json.dumps({field: vars(sample)[field] for field in fields}, indent=1)
    parts = (
        f"{name}: {task.about}; answers of at most {sample.max_new_tokens} tokens"
        + f"; a guess scores {100 * task.chance:.0f}" * bool(task.chance),
        f"--- context\n{_ends(sample.context)}",
        f"--- question\n{sample.question.strip()}",
        f"--- the answer begins with\n{sample.answer_prefix.strip()}",
        f"--- expected\n{', '.join(sample.answers)}",
    )
    return "\n".join(parts)


def _ends(text: str, shown: int = 700) -> str:
    """Leave out the middle of a text, if that makes it shorter."""
    left_out = len(text) - 2 * shown
    return text if left_out <= 0 else f"{text[:shown]}\n[... {left_out} characters ...]\n{text[-shown:]}"


def explain_file(spec: str) -> str:
    """Describe what a file holds, by task, with the beginning of its first example.

    Args:
        spec: FORMAT:PATH, see `experiments.benchmarks.read`.

    Raises:
        ValueError: an unknown format, or a damaged file.
    """
    by_task: dict[str, list[Example]] = collections.defaultdict(list)
    for example in read(spec):
        by_task[example.task].append(example)
    width = max(map(len, by_task))
    lines = [f"{'task':{width}s}  examples  contexts  mean characters  new tokens  scorer"]
    for task, mine in by_task.items():
        contexts = len({example.group or index for index, example in enumerate(mine)})
        size = round(sum(len(example.prompt) for example in mine) / len(mine))
        tokens = max(example.max_new_tokens for example in mine)
        scorers = ", ".join(dict.fromkeys(example.scorer for example in mine))
        lines.append(f"{task:{width}s}  {len(mine):8,d}  {contexts:8,d}  {size:15,d}  {tokens:10,d}  {scorers}")
    first = next(iter(by_task.values()))[0]
    start, question = first.context[:300].strip(), first.question.strip()[-300:]
    return "\n".join(
        [*lines, "", f"first example: {start} ...", f"question: {question}", f"expected: {', '.join(first.answers)}"]
    )
