"""The tasks by name, and groups of tasks."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.tasks import (
    code_completion,
    code_recall,
    easy_procedures,
    file_turns,
    infinitebench,
    listing,
    math_find,
    procedures,
    ruler,
    ruler_qa,
    ruler_words,
    rules,
    scorers,
    shared,
    word_problems,
)
from experiments.tasks.base import Task
from experiments.tasks.code_files import KIND, RENAMED, Library

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
_SINGLE = _PLACELESS | _ONE


def _tasks(*rows: tuple[Any, ...]) -> tuple[Task, ...]:
    """Make tasks of rows: name, generator, scorer, haystack, most tokens of an answer, what is asked, what is special."""
    return tuple(Task(*row, about=about, **more) for *row, about, more in rows)


_SUITES = _tasks(
    *(
        (spec.name, functools.partial(ruler.niah, spec), scorers.score_all,
         "" if spec.haystack == "needles" else spec.haystack, ruler.NIAH_TOKENS, about, {})
        for spec, about in zip(ruler.NIAH_SPECS, _NIAH_ABOUT, strict=True)
    ),
    ("vt", ruler.variable_tracking, scorers.score_all, "noise", ruler.VT_TOKENS,
     "all variables that a chain of assignments gives a value to", _PLACELESS),
    ("cwe", ruler_words.common_words, scorers.score_all, "", ruler_words.CWE_TOKENS,
     "the ten most common words of a list", _SINGLE),
    ("fwe", ruler_words.frequent_words, scorers.score_all, "", ruler_words.FWE_TOKENS,
     "the three most frequent words of a coded text", _SINGLE),
    ("qa_1", ruler_qa.qa, scorers.score_any, "squad", ruler_qa.QA_TOKENS,
     "a question of a SQuAD file, answered by a document among many", {}),
    ("qa_2", ruler_qa.qa, scorers.score_any, "hotpotqa", ruler_qa.QA_TOKENS,
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

# Real code, which reads the running Python's standard library; see docs/real_text.md.
_SAME = "the same with new identifiers, which no model can know by heart"
_CODE = _tasks(
    *(
        (f"code_completion{RENAMED * new}", functools.partial(code_completion.code_completion, new),
         scorers.score_next_line, "", code_completion.COMPLETION_TOKENS, about,
         _SINGLE | {"load": Library, "chat": False, "measures": {"exact_match": scorers.score_exact_line}})
        for new, about in ((False, "the next line of a file of Python's standard library, behind other files"), (True, _SAME))
    ),
    *(
        (f"code_recall{RENAMED * new}", functools.partial(code_recall.code_recall, new), code_recall.score_code_answer, "",
         code_recall.RECALL_TOKENS, about, {"load": Library})
        for new, about in (
            (False, "parameters, a default, the exception or the return annotation of a function far above"), (True, _SAME),
        )
    ),
)  # fmt: skip

# Long answers, many instructions and several turns; see docs/long_answers.md.
_MEASURES = {"result": procedures.score_result}
_PROCEDURES = _tasks(
    *(
        (make.__name__, make, procedures.score_steps, "", procedures.MOST_TOKENS, about, _SINGLE | {"measures": _MEASURES})
        for make, about in (
            (procedures.merge, "the entries of two sorted logs, merged"),
            (procedures.table, "the rows of an HTML table as lines of TSV"),
            (procedures.walk, "every edge of a walk along a graph"),
            (procedures.ledger, "the balance after each booking on four accounts"),
        )
    )
)
_LINES, _EDGES, _SUMS = easy_procedures.right_lines, easy_procedures.right_edges, easy_procedures.right_sums
_EASY_PROCEDURES = _tasks(
    *(
        (name, make, procedures.share_of(right), "", procedures.MOST_TOKENS, about,
         _SINGLE | {"measures": {"prefix": procedures.score_steps} | _MEASURES, "right_steps": right})
        for name, make, right, about in (
            ("merge_1", functools.partial(easy_procedures.merge, 1), _LINES, "two lists, merged in turn"),
            ("merge_2", functools.partial(easy_procedures.merge, 2), _LINES, "two lists, merged by number"),
            ("table_1", functools.partial(easy_procedures.table, 1), _LINES, "a table of three columns as TSV"),
            ("table_2", functools.partial(easy_procedures.table, 2), _LINES, "a table of five columns as TSV"),
            ("walk_1", functools.partial(easy_procedures.walk, 1), _EDGES, "a walk around a circle"),
            ("walk_2", functools.partial(easy_procedures.walk, 2), _EDGES,
             "a walk around a circle among as many other edges"),
            ("ledger_1", functools.partial(easy_procedures.ledger, 1), _SUMS, "the balance after each booking"),
            ("ledger_2", functools.partial(easy_procedures.ledger, 2), _SUMS,
             "the balances of two accounts after each booking"),
            ("lookup", easy_procedures.lookup, _LINES, "the values of words, in the order asked"),
        )
    )
)  # fmt: skip
_WORD_PROBLEMS = _tasks(
    *(
        (name, functools.partial(word_problems.word_problems, single=single),
         procedures.share_of(word_problems.right_problems), "", procedures.MOST_TOKENS,
         f"the answers of a sheet of word problems{kind}",
         _SINGLE | {"measures": {"answered": word_problems.score_answered}, "right_steps": word_problems.right_problems})
        for name, single, kind in (
            ("word_problems_1", True, " of one operation"), ("word_problems", False, ", with the calculations"),
        )
    )
)  # fmt: skip
_RULES, _EASY_RULES = (
    _tasks(
        *(
            (f"{name}_{count}", functools.partial(make, count), rules.score_rules, "prose", rules.most_tokens(count),
             f"a note that keeps {count} rules of the system turn{each}, and not its secret",
             _SINGLE | {"measures": {"secret_kept": rules.score_secret}})
            for count in counts
        )
    )
    for name, make, counts, each in (
        ("rules", rules.rules, rules.COUNTS, ""), ("easy_rules", rules.easy_rules, rules.EASY_COUNTS, ", each a line of it"),
    )
)  # fmt: skip
_TURNS = _tasks(
    *(
        (make.__name__, make, scorers.score_value_among_words, "", file_turns.TURN_TOKENS, about,
         _PLACELESS | {"in_turns": True})
        for make, about in (
            (file_turns.file_turns_1, "values of a long file, and labels that earlier questions gave"),
            (file_turns.file_turns, "values of a long file; questions refer back to earlier ones"),
        )
    )
)  # fmt: skip
_LONG = (*_PROCEDURES, *_EASY_PROCEDURES, *_WORD_PROBLEMS, *_RULES, *_EASY_RULES, *_TURNS)
TASKS: dict[str, Task] = {task.name: task for task in (*_SUITES, *_CODE, *_LONG)}


def _names(tasks: Iterable[Task]) -> tuple[str, ...]:
    return tuple(task.name for task in tasks)


_NIAH = tuple(spec.name for spec in ruler.NIAH_SPECS)
# "trained" has the order of the shipped model's training rows: new tasks never join it.
GROUPS: dict[str, tuple[str, ...]] = {
    "ruler": (*_NIAH, "vt", "cwe", "fwe", "qa_1", "qa_2"),
    "infinitebench": ("passkey", "number_string", "kv_retrieval", "math_find"),
    "shared": ("kv_retrieval", "prefix_suffix", "vt", "many_shot", "math_find"),
    "trained": (*_NIAH, "vt", "passkey", "number_string", "kv_retrieval"),
    "code": _names(_CODE),
    "long": _names(_LONG),
    "procedures": _names(_PROCEDURES),
    "easy_procedures": _names(_EASY_PROCEDURES),
    "rules": _names(_RULES),
    "easy_rules": _names(_EASY_RULES),
    "generated": _names(task for task in _SUITES if not task.needs_file),
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
