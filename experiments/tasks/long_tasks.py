"""The tasks of long answers, many instructions and several turns; see docs/long_answers.md."""

from __future__ import annotations

import functools

from experiments.tasks import easy_procedures as easy
from experiments.tasks import file_turns, procedures, rules, scorers, word_problems
from experiments.tasks.base import Task

PROCEDURES = tuple(
    Task(
        make.__name__,
        make,
        procedures.score_steps,
        "",
        procedures.MOST_TOKENS,
        takes_depth=False,
        max_questions=1,
        about=about,
        measures={"result": procedures.score_result},
    )
    for make, about in (
        (procedures.merge, "the entries of two sorted logs, merged"),
        (procedures.table, "the rows of an HTML table as lines of TSV"),
        (procedures.walk, "every edge of a walk along a graph"),
        (procedures.ledger, "the balance after each booking on four accounts"),
    )
)
_RIGHT = {easy.score_lines: easy.right_lines, easy.score_sums: easy.right_sums, easy.score_walk: easy.right_edges}
EASY_PROCEDURES = tuple(
    Task(
        name,
        make,
        score,
        "",
        procedures.MOST_TOKENS,
        takes_depth=False,
        max_questions=1,
        about=about,
        measures={"prefix": procedures.score_steps, "result": procedures.score_result},
        right_steps=_RIGHT[score],
    )
    for name, make, score, about in (
        ("merge_1", functools.partial(easy.merge, 1), easy.score_lines, "two lists, merged in turn"),
        ("merge_2", functools.partial(easy.merge, 2), easy.score_lines, "two lists, merged by number"),
        ("table_1", functools.partial(easy.table, 1), easy.score_lines, "a table of three columns as TSV"),
        ("table_2", functools.partial(easy.table, 2), easy.score_lines, "a table of five columns as TSV"),
        ("walk_1", functools.partial(easy.walk, 1), easy.score_walk, "a walk around a circle"),
        ("walk_2", functools.partial(easy.walk, 2), easy.score_walk, "a walk around a circle among as many other edges"),
        ("ledger_1", functools.partial(easy.ledger, 1), easy.score_sums, "the balance after each booking"),
        ("ledger_2", functools.partial(easy.ledger, 2), easy.score_sums, "the balances of two accounts after each booking"),
        ("lookup", easy.lookup, easy.score_lines, "the values of words, in the order asked"),
    )
)
RULES, EASY_RULES = (
    tuple(
        Task(
            f"{name}_{count}",
            functools.partial(make, count),
            rules.score_rules,
            "prose",
            rules.most_tokens(count),
            takes_depth=False,
            max_questions=1,
            about=f"a note that keeps {count} rules of the system turn{each}, and not its secret",
            measures={"secret_kept": rules.score_secret},
        )
        for count in counts
    )
    for name, make, counts, each in (
        ("rules", rules.rules, rules.COUNTS, ""),
        ("easy_rules", rules.easy_rules, rules.EASY_COUNTS, ", each a line of it"),
    )
)
WORD_PROBLEMS = tuple(
    Task(
        name,
        functools.partial(word_problems.word_problems, single=single),
        word_problems.score_problems,
        "",
        procedures.MOST_TOKENS,
        takes_depth=False,
        max_questions=1,
        about=f"the answers of a sheet of word problems{kind}",
        measures={"answered": word_problems.score_answered},
        right_steps=word_problems.right_problems,
    )
    for name, single, kind in (
        ("word_problems_1", True, " of one operation"),
        ("word_problems", False, ", with the calculations"),
    )
)
LONG_TASKS = (
    *PROCEDURES,
    *EASY_PROCEDURES,
    *WORD_PROBLEMS,
    *RULES,
    *EASY_RULES,
    *(
        Task(
            name,
            make,
            scorers.score_value_among_words,
            "",
            file_turns.TURN_TOKENS,
            takes_depth=False,
            about=about,
            in_turns=True,
        )
        for name, make, about in (
            ("file_turns_1", file_turns.file_turns_1, "values of a long file, and labels that earlier questions gave"),
            ("file_turns", file_turns.file_turns, "values of a long file; questions refer back to earlier ones"),
        )
    ),
)
