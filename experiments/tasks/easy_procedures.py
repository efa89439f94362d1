"""Easier procedures for small models: simpler decisions, the same long answers from the same prompt.

Each kind of `experiments.tasks.procedures` has levels: ``table_1`` is the easiest, ``table_2`` is harder, and ``table``
without a number is the hardest. A line of an answer repeats the line of the prompt that it comes from, so the prompt has to
be in the cache at every step. `lookup` is a kind of its own.

* `merge`: assignments of two lists, in turn (1), or by number, at most two of a list behind each other (2).
* `table`: every cell of every row, of three columns (1) or of five (2).
* `walk`: a circle of assignments in Python, alone (1), or among as many others (2).
* `ledger`: bookings with an item of their own, on one account (1) or on two (2).
* `lookup`: the values of keys, in the order in which the question names them; half of the keys are asked for.

A line counts by itself here: the score is the share of the right lines that the answer has in their order. The share before
the first wrong line is a further measure, ``prefix``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from experiments.tasks.base import Document, Request
from experiments.tasks.procedures import COLOURS, fitted, runs, step_document, steps_of, table_row, two_lists

CODE = "Lines:\n```python\n"  # what opens an answer of code; without it the model writes the words alone
TURNS = (
    "Merge two lists of assignments in Python. Take one line from each of them in turn.\n\n"
    'Example\nFirst list\na[1] = "oak"\na[2] = "ash"\n\nSecond list\nb[1] = "fir"\nb[2] = "yew"\n\n'
    'Merged\na[1] = "oak"\nb[1] = "fir"\na[2] = "ash"\nb[2] = "yew"\n\n'
    "Now the real lists\nFirst list\n{a}\n\nSecond list\n{b}"
)
LOGS = (
    "Merge two lists of assignments in Python. Each is sorted by number, and so is the merged list. No number is missing in "
    'the end.\n\nExample\nFirst list\nlog[11] = "oak"\nlog[13] = "ash"\n\nSecond list\nlog[12] = "fir"\nlog[14] = "yew"\n\n'
    'Merged\nlog[11] = "oak"\nlog[12] = "fir"\nlog[13] = "ash"\nlog[14] = "yew"\n\n'
    "Now the real lists\nFirst list\n{a}\n\nSecond list\n{b}"
)
MERGE_QUESTION = "\n\nWrite the merged list, from {first} to {last}, and nothing else."
CELLS = (
    "Convert the rows of an HTML table to TSV. Each row becomes a line with all of its values, separated by tabs. Keep the "
    "order of the rows, and leave none out.\n\n<table>\n{rows}\n</table>"
)
CELLS_QUESTION = "\n\nWrite the TSV lines of all rows of the table, in order, and nothing else."
ROADS = (
    "Each line of this Python code says which village comes after another one. Some of the villages form a circle.\n\n"
    'Example of a walk from oak, if the lines are after["elm"] = "oak", after["oak"] = "fir", after["fir"] = "elm":\n'
    '1. after["oak"] = "fir"\n2. after["fir"] = "elm"\n3. after["elm"] = "oak"\n\nNow the real lines\n{roads}'
)
ROADS_QUESTION = (
    '\n\nWalk around the circle from "{start}": the next line is always the line of the village that the last line ended '
    "with. Write {count} lines with their numbers, and nothing else."
)
BOOKINGS = (
    "Write the balance after every booking. Each booking has a number, an item, an account and a change.\n\n"
    "Example\nBalance: cash 100\n1. oak: cash +3\n2. fir: cash -1\nLines:\n1. oak: cash +3 = 103\n2. fir: cash -1 = 102\n\n"
    "Now the real bookings\nBalance: {balances}\n{bookings}"
)
BOOKINGS_QUESTION = "\n\nWrite the lines of all {count} bookings, in order, each with the balance after it, and nothing else."
LOOKUP = "This Python code gives each word a value.\n\n{entries}"
LOOKUP_QUESTION = (
    "\n\nWrite the lines of the following {count} words again, in this order and as they stand in the code, and nothing "
    "else: {keys}."
)
_GIVEN = 4  # lines of a merged list, and of a walk, that the answer begins with
_ROAD = re.compile(r'(?:\d+\. )?after\["(\w+)"\] = "(\w+)"')
_LINE = re.compile(r"(.*: (\S+) ([+-]\d{1,9})) = (-?\d{1,9})")


def right_lines(prediction: str, answers: Sequence[str]) -> list[bool]:
    """Tell for each right line whether an answer has it in order, which is a longest common subsequence of lines.

    Other lines cost nothing.
    """
    written = steps_of(prediction)[: 4 * len(answers)]
    steps = [" ".join(answer.split()) for answer in answers]
    longest = [[0] * (len(written) + 1)]  # of the first steps and the first written lines
    for step in steps:
        above, row = longest[-1], [0]
        for at, line in enumerate(written, 1):
            row.append(above[at - 1] + 1 if line == step else max(above[at], row[-1]))
        longest.append(row)
    right, at = [False] * len(steps), len(written)
    for place in range(len(steps), 0, -1):
        above, row = longest[place - 1], longest[place]
        while at and row[at] == row[at - 1]:
            at -= 1
        if row[at] > above[at]:
            right[place - 1] = True
            at -= 1
    return right


def right_sums(prediction: str, answers: Sequence[str]) -> list[bool]:
    """Tell for each right booking whether an answer has it in order, with a sum that is right.

    A sum is right if it is the account's last balance in the answer, plus the change. So a wrong sum costs one booking, and
    not the bookings behind it.
    """
    right = _bookings(answers)
    balances: dict[str, int] = {}
    for _, account, change, after in right:
        balances.setdefault(account, after - change)
    kept = []
    for head, account, change, after in _bookings(steps_of(prediction)):
        if balances.get(account) == after - change:
            kept.append(head)
        balances[account] = after
    return right_lines("\n".join(kept), [head for head, *_ in right])


def right_edges(prediction: str, answers: Sequence[str]) -> list[bool]:
    """Tell for each right assignment whether an answer has it behind an assignment that leads to it.

    So a wrong step costs one assignment, and the walk may go on from where it led. Repeats count once, and numbers do not
    matter.
    """
    right, followed = [_edge(answer) for answer in answers], set()
    at = right[0][0]
    for line in steps_of(prediction):
        edge = _edge(line)
        if edge[0] == at:
            followed.add(edge)
        at = edge[1]
    return [edge in followed for edge in right]


def _edge(line: str) -> tuple[str, str]:
    """Read where an assignment of a walk begins and ends, whatever its number; two empty names for another line."""
    match = _ROAD.fullmatch(line)
    return (match.group(1), match.group(2)) if match else ("", "")


def _bookings(lines: Sequence[str]) -> list[tuple[str, str, int, int]]:
    """Read lines of a ledger: the line up to the change, its account, its change, the balance after it; skip other lines."""
    matches = (_LINE.fullmatch(line) for line in lines)
    return [(one.group(1), one.group(2), int(one.group(3)), int(one.group(4))) for one in matches if one]


def merge(level: int, request: Request) -> Document:
    """Draw two lists of assignments to be merged: in turn (1), or by number with at most two of a list behind each other (2).

    The first lines of the merged list are given.
    """
    nouns = request.words.plain_nouns

    def build(rng: random.Random, pairs: int) -> Document:
        drawn = rng.sample(nouns, 2 * pairs)
        in_a = [True, False] * pairs
        if level == 1:
            lines = [f'{"ab"[at % 2]}[{at // 2 + 1}] = "{noun}"' for at, noun in enumerate(drawn)]
        else:
            lines = [f'log[{number}] = "{noun}"' for number, noun in enumerate(drawn, rng.randint(100, 199))]
            in_a = runs(rng, len(lines), 2)
        first, last = (lines[at].partition(" = ")[0] for at in (0, -1))
        context = (TURNS if level == 1 else LOGS).format(**two_lists(lines, in_a))
        question = MERGE_QUESTION.format(first=first, last=last)
        prefix = CODE + "".join(f"{line}\n" for line in lines[:_GIVEN])
        return step_document(request, context, question, prefix, lines[_GIVEN:])

    return fitted(request, build, least=_GIVEN, most=len(nouns) // 2)


def table(level: int, request: Request) -> Document:
    """Draw a table of three or five columns, to be written as TSV with all of them."""
    words = request.words
    columns = ("name", "city", "price") if level == 1 else ("name", "colour", "city", "number", "price")

    def build(rng: random.Random, count: int) -> Document:
        rows, steps = [table_row("th", columns)], []
        for _ in range(count):
            cells = {"name": words.word(rng), "city": rng.choice(words.nouns).capitalize()}
            cells |= {"price": str(rng.randint(10, 999)), "colour": rng.choice(COLOURS), "number": str(rng.randint(100, 999))}
            values = [cells[column] for column in columns]
            rows.append(table_row("td", values))
            steps.append("\t".join(values))
        prefix = "TSV:\n" + "\t".join(columns) + "\n"
        return step_document(request, CELLS.format(rows="\n".join(rows)), CELLS_QUESTION, prefix, steps)

    return fitted(request, build)


def walk(level: int, request: Request) -> Document:
    """Draw a circle of assignments, to be followed all around; at level 2 as many assignments lie beside it.

    The first lines of the answer are given.
    """
    nouns = request.words.plain_nouns

    def build(rng: random.Random, count: int) -> Document:
        names = rng.sample(nouns, level * count)
        circle, aside = names[:count], names[count:]
        roads = [f'after["{one}"] = "{other}"' for one, other in zip(circle, [*circle[1:], circle[0]], strict=True)]
        steps = [f"{number}. {road}" for number, road in enumerate(roads, 1)]
        roads += [f'after["{name}"] = "{rng.choice(names)}"' for name in aside]
        rng.shuffle(roads)
        context, question = ROADS.format(roads="\n".join(roads)), ROADS_QUESTION.format(start=circle[0], count=count)
        prefix = "Lines:\n" + "".join(f"{step}\n" for step in steps[:_GIVEN])
        return step_document(request, context, question, prefix, steps[_GIVEN:])

    return fitted(request, build, least=_GIVEN + 1, most=len(nouns) // level)


def ledger(level: int, request: Request) -> Document:
    """Draw bookings of one digit on one or two accounts; balances stay between 100 and 999."""
    nouns = request.words.plain_nouns

    def build(rng: random.Random, count: int) -> Document:
        balances = {account: rng.randint(20, 90) * 10 for account in ("cash", "bank")[:level]}
        opening = ", ".join(f"{account} {balance}" for account, balance in balances.items())
        bookings, steps = [], []
        for number, item in enumerate(rng.sample(nouns, count), 1):
            account, amount = rng.choice(sorted(balances)), rng.randint(1, 9)
            up = balances[account] < 110 or (balances[account] < 990 and rng.random() < 0.5)
            balances[account] += amount if up else -amount
            bookings.append(f"{number}. {item}: {account} {'+' if up else '-'}{amount}")
            steps.append(f"{bookings[-1]} = {balances[account]}")
        context = BOOKINGS.format(balances=opening, bookings="\n".join(bookings))
        return step_document(request, context, BOOKINGS_QUESTION.format(count=count), "Lines:\n", steps)

    return fitted(request, build, most=len(nouns))


def lookup(request: Request) -> Document:
    """Draw a dictionary of numbers, half of whose keys are asked for in an order of their own."""
    nouns = request.words.plain_nouns

    def build(rng: random.Random, count: int) -> Document:
        keys = rng.sample(nouns, 2 * count)
        entries = {key: f'value["{key}"] = {rng.randint(100, 999)}' for key in keys}
        asked = rng.sample(keys, count)
        steps = [entries[key] for key in asked]
        question = LOOKUP_QUESTION.format(count=count, keys=", ".join(asked))
        context = LOOKUP.format(entries="\n".join(entries.values()))
        return step_document(request, context, question, CODE, steps)

    return fitted(request, build, most=len(nouns) // 2)
