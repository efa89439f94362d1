"""Score methods from Python, as the command ``kvjax eval`` does: `evaluate` returns a table."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.protocol.describe import megabytes
from kvjax.protocol.method import Method

_SHOWN = ("task", "length", "method", "budget", "score", "against_full", "same_answer", "bytes_read", "bytes_resident")


class Table(list[dict[str, Any]]):
    """Rows by name, of equal names: ``pandas.DataFrame(table)`` takes it, and ``csv.DictWriter`` its rows.

    ``print(table)`` shows some columns as a Markdown table.
    """

    def __str__(self) -> str:
        lines = [_SHOWN, ["---"] * len(_SHOWN), *([_shown(name, row.get(name)) for name in _SHOWN] for row in self)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name.startswith("bytes"):
        return megabytes(value)
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _listed(value: Any) -> list[Any]:
    """Make a list of several values, or of one."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def evaluate(
    model: Any = "builtin",
    methods: Method | str | Mapping[str, Any] | Sequence[Method | str | Mapping[str, Any]] = ("snapkv", "quest"),
    *,
    tasks: str | Sequence[str] = ("niah_single_2", "niah_multikey_1", "vt"),
    lengths: int | Iterable[int] = (4096,),
    samples: int = 20,
    budgets: str | int | float | Sequence[str | int | float] = (),
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
    **settings: Any,
) -> Table:
    """Score methods on tasks, Full first, and compare each with Full example by example.

    The defaults ask 60 questions behind 4096 tokens: minutes on a CPU, in which only ``progress=True`` shows anything.

    Args:
        model: what ``kvjax.models.load`` returns, or a name, a directory, a GGUF file or a repository of the hub.
        methods: methods as objects, as names or texts such as "twilight(quest)", or as ``{name: knobs}``. An object runs with
            its own knobs; its budget may be a `kvjax.share`, here of prompt and answer together. A name without a budget
            takes the budget of its paper, or an eighth of the length.
        tasks: generated tasks and groups of tasks (``kvjax ls tasks``), or "FORMAT:PATH" of a suite's file,
            or "questions:PATH" of a table of your own questions.
        lengths: tokens of prompt and answer of generated tasks.
        samples: contexts of each task and length.
        budgets: shares such as "1/8" or tokens, for methods whose budget is not given.
        out: a result folder, which later calls and ``kvjax eval`` continue and ``kvjax plot`` draws; None keeps nothing.
        progress: whether to show a progress bar on standard error.
        **settings: other settings of ``kvjax eval`` by name, such as ``question="extend"``, ``seed=1``, ``kv_dtype="int8"``.

    Returns:
        A row for each task, length and method. ``score`` and ``against_full`` (points of difference) are from 0 to 100, each
        with the ends of its interval of 95 %; ``same_answer`` is a percentage, and so is ``of_oracle``, the score over what
        `kvjax.methods.Oracle` reaches with as many bytes, if it ran; ``bytes_read`` is what a decode step reads of keys,
        values and metadata, and ``bytes_read_full`` what Full reads; ``bytes_resident`` are per row.

    Raises:
        ValueError: unknown names, values out of range, or a folder of other settings.
        FileNotFoundError: a model or a file does not exist.
        TypeError: ``model`` or ``methods`` is something else.
    """
    from experiments.evaluation.python import evaluate_methods  # what measures is above the library

    if isinstance(methods, (Method, str, Mapping)):
        methods = [methods]
    elif isinstance(methods, type) or not isinstance(methods, Iterable):
        raise TypeError(f"methods must be a method, a name, {{name: knobs}} or a list of these, got {methods!r}")
    given = {
        "tasks": [tasks] if isinstance(tasks, str) else list(tasks),
        "lengths": [_plain(length) for length in _listed(lengths)],
        "samples": _plain(samples),
        "budgets": [str(budget) for budget in _listed(budgets)],
        **settings,
    }
    return Table(evaluate_methods(model, list(methods), given, out, progress=progress))
