"""The tables of the main model, a language model as it was published: the README's table, and the tables of docs/quality.md.

A mean is over the tasks that Full solves. Tasks of code have columns of their own.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from experiments.answering import PAPERS, without_effect
from experiments.evaluation import COUNTED, Compared, averages, beside_full, kendall_tau, other_reading
from experiments.lab.site.marks import command_of, missing
from experiments.lab.site.quality import mean_score, question_table, short, table
from experiments.lab.site.runs import Row, Runs, against, megabytes, read, share, wrapped
from experiments.records import method_title, token_label
from experiments.tasks import GROUPS, TASKS

RECORDS = ("qwen-16k", "qwen-32k")
AFTER = "qwen-16k-question-after"  # on some of the tasks
OTHERS = ("qwen-16k-other-tasks", "qwen-32k-other-tasks")  # tasks that count in no mean
ALONE = ("qwen-full", *RECORDS, *OTHERS)  # with Full's scores on every task
BEST = 5  # baselines in the README's table
SHARES = (1 / 16, 1 / 8, 1 / 4)  # of the bytes that a step reads under Full
_SLACK = 1.1  # a budget of 1/8 reads a little more than 1/8 of the bytes: the tokens of the answer come on top
_CODE = {
    "code recall": ("code_recall", "code_recall_renamed"),
    "code line": ("code_completion", "code_completion_renamed"),
}  # heads of columns, and the two tasks of each
_REVERSED = "reversed"


def runs_of(docs: pathlib.Path) -> Runs:
    """Read the runs of the main model, as far as they exist; means leave out the tasks of code and unsolved tasks."""
    return Runs(docs, RECORDS, least=COUNTED, apart=GROUPS["code"])


def measured(docs: pathlib.Path) -> bool:
    """Tell whether the record of the main table exists."""
    return (docs / "records" / "results" / RECORDS[0]).is_dir()


def parts(docs: pathlib.Path) -> dict[str, Callable[[], str]]:
    """List the functions that make the parts, by name; see `experiments.lab.site.marks`."""
    runs = runs_of(docs)
    after = Runs(docs, (AFTER,), least=COUNTED, apart=GROUPS["code"])
    alone, more = Runs(docs, ALONE), Runs(docs, OTHERS)
    made = {
        "means": (means, RECORDS[:1]),
        "settings": (settings, RECORDS[:1]),
        "bytes": (bytes_read, RECORDS[:1]),
        "tasks": (tasks, RECORDS[:1]),
        "others": (functools.partial(others, more=more), (RECORDS[0], OTHERS[0])),
        "questions": (functools.partial(questions, after=after), (RECORDS[0], AFTER)),
        "checks": (checks, RECORDS[:1]),
        "lengths": (functools.partial(by_length, alone=alone), ALONE[:1]),
    }
    there = {x.name for x in (*runs.folders, *after.folders, *alone.folders)}
    front_page = {"quality": functools.partial(front, runs, docs)} if measured(docs) else {}
    return front_page | {
        f"qwen-{name}": functools.partial(make, runs) if {*names} <= there else functools.partial(missing, docs, names)
        for name, (make, names) in made.items()
    }


def front(runs: Runs, docs: pathlib.Path) -> str:
    """Write the README's table, the best first: Full, the five papers' methods, and the best baselines."""
    lengths = runs.shown("prefill")
    first = lengths[0]
    ranked = runs.ranked("prefill", first)
    own = {"full", *PAPERS}
    best = {*own, *[method for method in ranked if method not in own][:BEST]}
    code = _code_scores(runs, first)
    head = ["method", *(f"score at {token_label(length)}" for length in lengths)]
    head += [*code, f"read per step at {token_label(first)}", f"resident at {token_label(first)}"]
    body = []
    for method in (method for method in ranked if method in best):
        mean = runs.mean(method, "prefill", first)
        assert mean is not None  # it has a rank
        scores = (mean_score(runs.mean(method, "prefill", length)) for length in lengths)
        shown = (column.get(method, "") for column in code.values())
        body.append((method_title(method), *scores, *shown, read(mean), megabytes(mean["resident_bytes_per_row"])))
    cells = [x for x in runs.own if x.row["question"] == "prefill" and x.row["method"] in best]
    counted = (*runs.counted[first], *itertools.chain(*_CODE.values()))
    cells = [x for x in cells if x.row["name"] in (counted if x.row["length"] == first else runs.counted[x.row["length"]])]
    subject, commits = runs.measured(cells)
    told = (
        f"{subject}: scores from 0 to 100, {_over(runs, lengths)}. The question is in the prompt. "
        "Code: the score on Python's library, and on the same code with new names. Shares are of what a decode step reads "
        f"under Full. {commits}"
    )
    others = len(ranked) - len([x for x in ranked if x in own])
    if len(best) < len(ranked):
        told += f" Of {others} baselines the best {BEST}; [all](docs/quality.md)."
    more = " and ".join(f"`{x.name}.yaml`" for x in runs.folders[1:])
    command = f"`{command_of(docs / 'settings' / f'{runs.folders[0].name}.yaml')}`"
    command += f" makes the columns of {token_label(first)}" + (f",\n{more} the other columns." if more else ".")
    return f"{wrapped(told)}\n\n{table(head, body)}\n\n{command}"


def means(runs: Runs) -> str:
    """Show every method at its own setting: means over the tasks that count beside Full, code, and costs."""
    body = []
    lengths = runs.lengths("prefill")
    code = {length: _code_scores(runs, length) for length in lengths}
    for method in runs.ranked("prefill", lengths[0]):
        for length in lengths:
            if (mean := runs.mean(method, "prefill", length)) is not None:
                heads = (head.partition(" at ")[0] for head in code[lengths[0]])  # a longer length may lack tasks of code
                columns = (code[length].get(f"{head} at {token_label(length)}", {}) for head in heads)
                shown = (column.get(method, "") for column in columns)
                body.append((method_title(method), f"{length:,}", *_line(mean, shown)))
    head = ("method", "length", *_head(code[lengths[0]]))
    links = ", ".join(f"[{x.name}](records/results/{x.name}/table.md)" for x in runs.folders)
    told = f"{runs.about}. Scores are {_over(runs, lengths)}."
    return f"{wrapped(told)}\n\n{table(head, body)}\n\nEvery cell: {links}."


def settings(runs: Runs) -> str:
    """Show every setting of every method at the shortest length, by method and bytes, with costs and the figure."""
    length, rows = _at_first(runs)
    code = {head: _two(rows, names) for head, names in _CODE.items()}
    code = {head: scores for head, scores in code.items() if scores}
    body = []
    for mean in averages(runs.counting(rows)):
        shown = (column.get(mean["method"], "") for column in code.values())
        body.append((_told(mean["method"]), *_line(mean, shown)))
    picture = f"![score against bytes read per step](records/results/{runs.folders[0].name}/solved.png)"
    told = f"At {token_label(length)} tokens, the question in the prompt."
    return f"{told}\n\n{table(('method', *_head(code)), body)}\n\n{picture}"


def bytes_read(runs: Runs) -> str:
    """Show, for each method as it is by default, the score of the setting that reads most within a share of Full's bytes."""
    _, rows = _at_first(runs)
    by_name: dict[str, list[Row]] = {}
    for mean in averages(runs.counting(rows)):
        if not other_reading(mean["method"]):
            by_name.setdefault(mean["method"].partition("(")[0], []).append(mean)
    lines = {name: [_most(line, limit) for limit in SHARES] for name, line in by_name.items()}
    shown = [name for name in lines if name not in ("full", _REVERSED) and lines[name][-1]]
    shown.sort(key=lambda name: -max(x["score"] for x in lines[name][-1:] if x))
    body = [
        (method_title(name), *("" if x is None else f"{x['score']:.1f} ({share(x)})" for x in lines[name])) for name in shown
    ]
    return table(("method", *(f"within 1/{round(1 / x)} of the bytes" for x in SHARES)), body)


def tasks(runs: Runs) -> str:
    """Show the score of every method in every task with the question in the prompt, at each length."""
    made = []
    for length in runs.lengths("prefill"):
        rows = [x.row for x in runs.compared if (x.row["question"], x.row["length"]) == ("prefill", length)]
        names = sorted(dict.fromkeys(row["name"] for row in rows), key=_place)
        at = {(row["method"], row["name"]): row["value"] for row in rows}
        body = []
        for method in runs.ranked("prefill", length):
            body.append((method_title(method), *(f"{at[method, x]:.0f}" if (method, x) in at else "" for x in names)))
        counted = runs.counted[length]
        head = ("method", *(f"**{short(name)}**" if name in counted else short(name) for name in names))
        made.append(f"{length:,} tokens; tasks in bold count in the means:\n\n{table(head, body)}")
    return "\n\n".join(made)


def others(runs: Runs, more: Runs) -> str:
    """Show every method on the tasks that count in no mean, and its mean with them, at each length."""
    made = []
    for length in runs.lengths("prefill"):
        at = {(x.row["method"], x.row["name"]): x.row["value"] for x in more.own if x.row["length"] == length}
        names = sorted({name for _, name in at}, key=_place)
        counted, means, body = len(runs.counted[length]), [], []
        for method in runs.ranked("prefill", length):
            mean = runs.mean(method, "prefill", length)
            scores = [at[method, name] for name in names if (method, name) in at]
            whole = ""
            if mean is not None and len(scores) == len(names):
                means.append((mean["score"], (counted * mean["score"] + sum(scores)) / (counted + len(names))))
                whole = f"{means[-1][1]:.1f}"
            shown = (f"{at[method, name]:.0f}" if (method, name) in at else "" for name in names)
            body.append((method_title(method), mean_score(mean), *shown, whole))
        tau = kendall_tau([x for x, _ in means], [x for _, x in means])
        head = ("method", f"mean of {counted} tasks", *map(short, names), f"mean of {counted + len(names)}")
        told = f"{length:,} tokens. The two means order {len(means)} methods with a tau of {tau:.2f}:"
        made.append(f"{told}\n\n{table(head, body)}")
    return "\n\n".join(made)


def questions(runs: Runs, after: Runs) -> str:
    """Show scores with the question in the prompt and after it, on the tasks of the second run that Full solves there."""
    (length,) = after.lengths("extend")
    names = after.counted[length]
    asked = [x for x in runs.compared if (x.row["question"], x.row["length"]) == ("prefill", length)]
    before = {mean["method"]: mean for mean in averages([x for x in asked if x.row["name"] in names])}
    both = {x: (before.get(x), after.mean(x, "extend", length)) for x in after.ranked("extend", length)}
    counts = [mean["samples"] if mean else 0 for mean in both["full"]]
    told = (
        f"Means of {', '.join(map(short, sorted(names, key=_place)))} at {token_label(length)}, with {counts[0]} samples of "
        f"each with the question in the prompt, and {counts[1]} with the question after it."
    )
    return f"{wrapped(told)}\n\n{question_table(both)}"


def checks(runs: Runs) -> str:
    """Show Full, SnapKV and its reverse on every task at the shortest length; a task is sound if the reverse scores low."""
    length, rows = _at_first(runs)
    at = {(item.row["method"], item.row["name"]): item.row["value"] for item in rows}
    names = sorted({name for _, name in at}, key=_place)
    labels = ["full", "snapkv", *dict.fromkeys(x for x, _ in at if x.partition("(")[0] == _REVERSED)]
    body = [(f"`{name}`", *(f"{at[x, name]:.1f}" if (x, name) in at else "" for x in labels)) for name in names]
    return table((f"task at {token_label(length)}", *map(_told, labels)), body)


def by_length(_: Runs, alone: Runs) -> str:
    """Show Full's score on every task at every length, the question in the prompt."""
    rows = {(x.row["name"], x.row["length"]): x.row for x in alone.own if x.row["method"] == "full"}
    names, lengths = sorted({name for name, _ in rows}, key=_place), sorted({length for _, length in rows})
    counts = {length: {row["samples"] for (_, at), row in rows.items() if at == length} for length in lengths}
    heads = (f"{token_label(x)}, {' or '.join(map(str, sorted(counts[x])))} samples" for x in lengths)
    body = [(f"`{x}`", *(f"{rows[x, at]['value']:.1f}" if (x, at) in rows else "" for at in lengths)) for x in names]
    return table(("task", *heads), body)


def _at_first(runs: Runs) -> tuple[int, list[Compared]]:
    """Compare all settings at the shortest length, the question in the prompt; return the length and the rows."""
    length = runs.lengths("prefill")[0]
    asked = [x for x in runs.entries if (x.row["question"], x.row["length"]) == ("prefill", length)]
    return length, beside_full(asked)


def _most(line: Sequence[Row], limit: float) -> Row | None:
    """Find the setting that reads most within a share of Full's bytes; None if no setting does."""
    within = [(x["bytes_read_per_step"] / x["full_bytes_read_per_step"], x["score"], x) for x in line]
    within = [x for x in within if x[0] <= _SLACK * limit]
    return max(within, key=lambda x: x[:2])[2] if within else None


def _code_scores(runs: Runs, length: int) -> dict[str, dict[str, str]]:
    """Format the scores of the tasks of code at a length, by the column's head and the method; only columns with scores."""
    rows = [x for x in runs.compared if (x.row["question"], x.row["length"]) == ("prefill", length)]
    made = {f"{head} at {token_label(length)}": _two(rows, names) for head, names in _CODE.items()}
    return {head: scores for head, scores in made.items() if scores}


def _two(rows: Sequence[Compared], names: tuple[str, str]) -> dict[str, str]:
    """Format the scores of two tasks as one cell, by method."""
    at = {(x.row["method"], x.row["name"]): x.row["value"] for x in rows}
    methods = dict.fromkeys(method for method, name in at if name in names)
    return {x: " / ".join(f"{at[x, name]:.0f}" if (x, name) in at else "-" for name in names) for x in methods}


def _over(runs: Runs, lengths: Sequence[int]) -> str:
    """Say which tasks the means of each length are over, with how many samples."""
    made: dict[str, list[str]] = {}
    for length in lengths:
        mean = runs.mean("full", "prefill", length)
        names = sorted(runs.counted[length], key=_place)
        told = f"the {len(names)} tasks on which Full has at least {COUNTED:.0f} ({', '.join(map(short, names))})"
        samples = "" if mean is None else f", {mean['samples']} samples of each"
        made.setdefault(told, []).append(f"at {token_label(length)}{samples}")
    return "means of " + "; of ".join(f"{told} {'; '.join(at)}" for told, at in made.items())


def _head(code: Any) -> tuple[str, ...]:
    heads = (head.partition(" at ")[0] for head in code)
    return ("score", "against Full", *heads, "same answer", "tokens attended", "read per step", "resident")


def _line(mean: Row, code: Any) -> tuple[str, ...]:
    return (
        mean_score(mean) + (" (no effect)" if without_effect(mean) else ""),
        against(mean),
        *code,
        f"{mean['same']:.0f} %",
        f"{mean['attended_tokens']:,} of {mean['length_tokens']:,}",
        read(mean),
        megabytes(mean["resident_bytes_per_row"]),
    )


def _told(label: str) -> str:
    return "Reversed" + label.removeprefix(_REVERSED) if label.startswith(_REVERSED) else method_title(label)


def _place(name: str) -> int:
    return list(TASKS).index(name)
