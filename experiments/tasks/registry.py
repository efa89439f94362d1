"""The tasks by name, and groups of tasks."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Sequence

from experiments.tasks import infinitebench, listing, math_find, ruler, ruler_qa, ruler_words, scorers, shared
from experiments.tasks.base import Task
from experiments.tasks.code_files import KIND
from experiments.tasks.code_tasks import CODE_TASKS
from experiments.tasks.long_tasks import EASY_PROCEDURES, EASY_RULES, LONG_TASKS, PROCEDURES, RULES

_NIAH_ABOUT = (
    "a number, hidden in a repeated sentence",
    "a number, hidden in prose",
    "a uuid, hidden in prose",
    "a number by its key, beside three other keys in prose",
    "a number by its key, among nothing but other keys",
    "a uuid by its uuid, among nothing but other uuids",
    "the four numbers of a key, hidden in prose",
    "the numbers of four keys, hidden in prose",
)
_ONE = {"max_questions": 1}
_PLACELESS = {"takes_depth": False}

# A row: name, generator, scorer, haystack, most tokens of an answer, what the task asks for, what is special.
_ROWS = (
    *(
        (spec.name, functools.partial(ruler.niah, spec), scorers.score_all,
         "" if spec.haystack == "needles" else spec.haystack, ruler.NIAH_TOKENS, about, {})
        for spec, about in zip(ruler.NIAH_SPECS, _NIAH_ABOUT, strict=True)
    ),
    ("vt", ruler.variable_tracking, scorers.score_all, "noise", ruler.VT_TOKENS,
     "all variables that a chain of assignments gives a value to", _PLACELESS),
    ("cwe", ruler_words.common_words, scorers.score_all, "", ruler_words.CWE_TOKENS,
     "the ten most common words of a list", _PLACELESS | _ONE),
    ("fwe", ruler_words.frequent_words, scorers.score_all, "", ruler_words.FWE_TOKENS,
     "the three most frequent words of a coded text", _PLACELESS | _ONE),
    ("qa_1", functools.partial(ruler_qa.qa, "qa_1"), scorers.score_any, "squad", ruler_qa.QA_TOKENS,
     "a question of a SQuAD file, answered by a document among many", {}),
    ("qa_2", functools.partial(ruler_qa.qa, "qa_2"), scorers.score_any, "hotpotqa", ruler_qa.QA_TOKENS,
     "a question of a HotpotQA file, answered by several documents among many", _PLACELESS),
    ("passkey", infinitebench.passkey, scorers.score_first_integer, "noise", infinitebench.PASSKEY_TOKENS,
     "a key of five digits, hidden in a repeated sentence", _ONE),
    ("number_string", infinitebench.number_string, scorers.score_first_integer, "noise", infinitebench.NUMBER_STRING_TOKENS,
     "ten digits with repeats, hidden in a repeated sentence", _ONE),
    ("kv_retrieval", infinitebench.kv_retrieval, scorers.score_value_among_words, "", infinitebench.KV_TOKENS,
     "a uuid by its key in a JSON object of uuids", {}),
    ("math_find", math_find.math_find, scorers.score_first_number, "", math_find.MATH_TOKENS,
     "a number of a list by its rank, such as the second largest, or the median",
     _PLACELESS | {"max_questions": len(math_find.MATH_KINDS)}),
    ("prefix_suffix", shared.prefix_suffix, scorers.score_value_among_words, "", shared.PREFIX_SUFFIX_TOKENS,
     "a string of a list by its beginning and its end", {}),
    ("many_shot", shared.many_shot, scorers.score_first_word, "", shared.MANY_SHOT_TOKENS,
     "the class of a number, learned from hundreds of examples", _PLACELESS),
    ("listing", functools.partial(listing.listing, listing.LISTING), listing.score_in_order, "prose", listing.LISTING.most,
     "the values of all records in a text, in their order", _PLACELESS),
)  # fmt: skip
_ALL = (*(Task(*row, about=about, **more) for *row, about, more in _ROWS), *CODE_TASKS, *LONG_TASKS)
TASKS: dict[str, Task] = {task.name: task for task in _ALL}
_NIAH = tuple(spec.name for spec in ruler.NIAH_SPECS)
# "trained" has the order of the shipped model's training rows: new tasks never join it.
GROUPS: dict[str, tuple[str, ...]] = {
    "ruler": (*_NIAH, "vt", "cwe", "fwe", "qa_1", "qa_2"),
    "infinitebench": ("passkey", "number_string", "kv_retrieval", "math_find"),
    "shared": ("kv_retrieval", "prefix_suffix", "vt", "many_shot", "math_find"),
    "trained": (*_NIAH, "vt", "passkey", "number_string", "kv_retrieval"),
    "code": tuple(task.name for task in CODE_TASKS),
    "long": tuple(task.name for task in LONG_TASKS),
    "procedures": tuple(task.name for task in PROCEDURES),
    "easy_procedures": tuple(task.name for task in EASY_PROCEDURES),
    "rules": tuple(task.name for task in RULES),
    "easy_rules": tuple(task.name for task in EASY_RULES),
    "generated": tuple(task.name for task in _ALL if not task.needs_file and task not in (*CODE_TASKS, *LONG_TASKS)),
    "all": tuple(TASKS),
}


def expand(names: Iterable[str]) -> tuple[str, ...]:
    """Replace the names of groups by the names of their tasks.

    Returns:
        The tasks in the order named, without repeats.

    Raises:
        ValueError: a name is neither a task nor a group; the message names the nearest known name.
    """
    expanded: dict[str, None] = {}
    for name in names:
        if name not in GROUPS and name not in TASKS:
            known = (*GROUPS, *TASKS)
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"unknown task {name!r}, did you mean {near!r}? expected one of {', '.join(TASKS)}, "
                f"or a group: {', '.join(GROUPS)}"
            )
        expanded.update(dict.fromkeys(GROUPS.get(name, (name,))))
    return tuple(expanded)


def get_task(name: str) -> Task:
    """Return the task called `name`."""
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown task {name!r}, did you mean {near!r}? expected one of {', '.join(TASKS)}")
    return TASKS[name]


def reads_library(name: str, haystack: str | None) -> bool:
    """Tell whether a task's text comes from Python's standard library, so that a result records `library_origin`.

    Args:
        haystack: kind; None takes the task's own.
    """
    task = get_task(name)
    return task.load is not None or (haystack or task.haystack) == KIND


def score(name: str, prediction: str, answers: Sequence[str]) -> float:
    """Score an output with the suite's own scorer."""
    return get_task(name).score(prediction, answers)
