"""Procedures: algorithms that a model executes in text, a step a line, over thousands of tokens.

The kinds follow LongProc (Ye et al. 2025, arXiv:2501.05414), which asks for long answers that a program can check. Its
texts come from the web; the texts here are drawn, so that a seed gives as many as wanted at every length.

* `merge`: two sorted logs become one. No number is missing in the end, so the next entry is found by its number in either
  log. Up to seven entries of a log follow each other. (A small model cannot compare numbers reliably for hundreds of steps.)
* `table`: the rows of an HTML table become lines of TSV, with three of its five columns.
* `walk`: a walk along the edges of a graph, whose edges are listed in random order among as many others.
* `ledger`: bookings on four accounts. Each step writes the account's new balance, so it needs a balance of the answer above.

The length decides the number of steps: prompt and answer fill it. The answer is two thirds of the length in `ledger`, almost
half of it in `merge`, a third in `walk` and a fifth in `table`.

Small models solve none of these, so each kind has easier levels: simpler decisions, the same long answers. A line of an
answer repeats the line of the prompt that it comes from, so the prompt has to be in the cache at every step.

* `merge_lists`: assignments of two lists, in turn (1), or by number, at most two of a list behind each other (2).
* `table`: every cell of every row, of three columns (1) or of five (2).
* `circle`: a circle of assignments in Python, alone (1), or among as many others (2).
* `bookings`: bookings with an item of their own, on one account (1) or on two (2).
* `lookup`: the values of keys, in the order in which the question names them; half of the keys are asked for.

A line counts by itself there: the score is the share of the right lines that the answer has in their order. The share before
the first wrong line is a further measure, ``prefix``.
"""

import html
import random
import re
from collections.abc import Callable, Sequence

from experiments.tasks.base import Document, Question, Request
from experiments.tasks.fitting import fit_steps
from experiments.tasks.scorers import common_length

_MOST_STEPS = 1024
_STEP_TOKENS = 8  # fewer than a step takes in prompt and answer
_NOUNS_UP_TO = 4096  # tokens of a walk whose villages are named by single nouns; longer ones need more names than nouns
_LONGEST_RUN = 7  # entries of a log that follow each other in the merged log
_SLACK = 16  # tokens of an answer beyond the right steps, a sixteenth of them more
_GIVEN = 4  # lines of a merged list, and of a circle, that the answer begins with
_COLOURS = ("red", "blue", "green", "black", "white", "brown", "grey", "pink")
_ROAD = re.compile(r'(?:\d+\. )?after\["(\w+)"\] = "(\w+)"')
_LINE = re.compile(r"(.*: (\S+) ([+-]\d{1,9})) = (-?\d{1,9})")

# Scores


def steps_of(text: str) -> list[str]:
    """Cut an answer into its steps: lines without blank lines and fences, with single spaces, whatever the white space."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("```")]


def score_steps(prediction: str, answers: Sequence[str]) -> float:
    """Compute the share of the steps that are right before the first wrong one.

    Returns:
        0 to 1; steps behind the last right one cost nothing.
    """
    right = 0
    for written, step in zip(steps_of(prediction), answers, strict=False):
        if written != " ".join(step.split()):
            break
        right += 1
    return right / len(answers)


def score_result(prediction: str, answers: Sequence[str]) -> float:
    """Score the result alone: 1.0 if the answer ends with the right last step, else 0.0."""
    written = steps_of(prediction)
    return float(bool(written) and written[-1] == " ".join(answers[-1].split()))


def score_lines(prediction: str, answers: Sequence[str]) -> float:
    """Compute the share of the right lines that an answer has in order; other lines cost nothing."""
    written = steps_of(prediction)[: 4 * len(answers)]
    return common_length(written, [" ".join(answer.split()) for answer in answers]) / len(answers)


def score_sums(prediction: str, answers: Sequence[str]) -> float:
    """Compute the share of the right bookings that an answer has in order, with a sum that is right.

    A sum is right if it is the account's last balance in the answer, plus the change. So a wrong sum costs one booking, and
    not the bookings behind it.
    """
    right = _booked(answers)
    balances: dict[str, int] = {}
    for _, account, change, after in right:
        balances.setdefault(account, after - change)
    kept = []
    for head, account, change, after in _booked(steps_of(prediction)):
        if balances.get(account) == after - change:
            kept.append(head)
        balances[account] = after
    return score_lines("\n".join(kept), [head for head, *_ in right])


def score_edges(prediction: str, answers: Sequence[str]) -> float:
    """Compute the share of the right assignments that an answer has behind an assignment that leads to it.

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
    return sum(edge in followed for edge in right) / len(right)


def _edge(line: str) -> tuple[str, str]:
    """Read where an assignment of a walk begins and ends, whatever its number; two empty names for another line."""
    match = _ROAD.fullmatch(line)
    return (match.group(1), match.group(2)) if match else ("", "")


def _booked(lines: Sequence[str]) -> list[tuple[str, str, int, int]]:
    """Read lines of a ledger: the line up to the change, its account, its change, the balance after it; skip other lines."""
    matches = (_LINE.fullmatch(line) for line in lines)
    return [(one.group(1), one.group(2), int(one.group(3)), int(one.group(4))) for one in matches if one]


# Texts


def _document(request: Request, asked: dict[str, object], steps: Sequence[str], given: Sequence[str] = ()) -> Document:
    """Make the document of a procedure; there is room for more than the right steps, for a model that writes other lines.

    Args:
        request: its prompt has places for what is ``asked``.
        asked: texts and numbers by place.
        steps: the lines of the right answer.
        given: lines that the answer begins with.
    """
    prompt, target = request.prompt, "\n".join(steps)
    tokens = request.count_tokens(target) + 1  # end of sequence
    prefix = prompt.prefix + "".join(f"{line}\n" for line in given)
    question = Question(prompt.question.format(**asked), prefix, tuple(steps), target)
    return Document(request.task, prompt.context.format(**asked), (question,), tokens + tokens // 16 + _SLACK)


def _fitted(
    request: Request, build: Callable[[random.Random, int], Document], least: int = 1, most: int = _MOST_STEPS
) -> Document:
    """Fit the number of steps, ``least`` to ``most``, to the length; the same draws make a procedure of any size."""
    seed = request.rng.getrandbits(64)
    most = max(min(request.length // _STEP_TOKENS, most) - least + 1, 1)
    return fit_steps(request, lambda more: build(random.Random(seed), least + more - 1), most)


def _runs(rng: random.Random, count: int, longest: int) -> list[bool]:
    """Draw for each line of a merged list whether it comes from the first list; runs have at most ``longest`` lines."""
    in_first = [rng.random() < 0.5]
    while len(in_first) < count:
        in_first += [not in_first[-1]] * rng.randint(1, longest)
    return in_first[:count]


def _two_lists(lines: Sequence[str], in_first: Sequence[bool]) -> dict[str, object]:
    """Divide lines into two texts, "a" and "b"."""
    return {
        name: "\n".join(line for line, first in zip(lines, in_first, strict=True) if first == (name == "a")) for name in "ab"
    }


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def merge(request: Request) -> Document:
    """Draw the entries of two logs, which share no number, to be merged; up to seven entries of a log follow each other."""

    def build(rng: random.Random, count: int) -> Document:
        first = rng.randint(100, 199)
        steps = [f"{number} {rng.choice(request.words.plain_nouns)}" for number in range(first, first + count)]
        asked = {"first": first, "last": first + count - 1}
        return _document(request, asked | _two_lists(steps, _runs(rng, count, _LONGEST_RUN)), steps)

    return _fitted(request, build, least=2)


def merge_lists(request: Request, level: int) -> Document:
    """Draw two lists of assignments to be merged: in turn (1), or by number with at most two of a list behind each other (2).

    The first lines of the merged list are given.
    """
    nouns = request.words.plain_nouns

    def build(rng: random.Random, pairs: int) -> Document:
        drawn = rng.sample(nouns, 2 * pairs)
        if level == 1:
            lines = [f'{"ab"[at % 2]}[{at // 2 + 1}] = "{noun}"' for at, noun in enumerate(drawn)]
            in_a = [True, False] * pairs
        else:
            lines = [f'log[{number}] = "{noun}"' for number, noun in enumerate(drawn, rng.randint(100, 199))]
            in_a = _runs(rng, len(lines), 2)
        asked = {"first": lines[0].partition(" = ")[0], "last": lines[-1].partition(" = ")[0]}
        return _document(request, asked | _two_lists(lines, in_a), lines[_GIVEN:], lines[:_GIVEN])

    return _fitted(request, build, least=_GIVEN, most=len(nouns) // 2)


def table(request: Request, columns: Sequence[str], kept: Sequence[str] = ()) -> Document:
    """Draw a table of some columns, to be written as TSV with those that are ``kept``, or with all of them."""
    words, kept = request.words, kept or columns

    def build(rng: random.Random, count: int) -> Document:
        rows, steps = [_row("th", columns)], []
        for _ in range(count):
            cells = {"name": words.word(rng), "city": rng.choice(words.nouns).capitalize()}
            cells |= {
                "price": str(rng.randint(10, 999)),
                "colour": rng.choice(_COLOURS),
                "number": str(rng.randint(100, 999)),
            }
            rows.append(_row("td", [cells[column] for column in columns]))
            steps.append("\t".join(cells[column] for column in kept))
        return _document(request, {"rows": "\n".join(rows)}, steps, ["\t".join(kept)])

    return _fitted(request, build)


def walk(request: Request) -> Document:
    """Draw a graph with one edge from each node, to be walked; as many edges again lie off the path."""
    nouns = request.words.plain_nouns
    single = request.length <= _NOUNS_UP_TO

    def build(rng: random.Random, count: int) -> Document:
        number = 2 * count + 1
        names = rng.sample(nouns, number) if single else request.words.distinct("words", number, rng)
        path, aside = names[: count + 1], names[count + 1 :]
        steps = [f"{one} -> {other}" for one, other in zip(path, path[1:], strict=False)]
        roads = [*steps, *(f"{name} -> {rng.choice(names)}" for name in aside)]
        rng.shuffle(roads)
        return _document(request, {"roads": "\n".join(roads), "start": path[0], "count": count}, steps)

    return _fitted(request, build, most=(len(nouns) - 1) // 2 if single else _MOST_STEPS)


def circle(request: Request, level: int) -> Document:
    """Draw a circle of assignments, to be followed all around; at level 2 as many assignments lie beside it.

    The first lines of the answer are given.
    """
    nouns = request.words.plain_nouns

    def build(rng: random.Random, count: int) -> Document:
        names = rng.sample(nouns, level * count)
        path, aside = names[:count], names[count:]
        roads = [f'after["{one}"] = "{other}"' for one, other in zip(path, [*path[1:], path[0]], strict=True)]
        steps = [f"{number}. {road}" for number, road in enumerate(roads, 1)]
        roads += [f'after["{name}"] = "{rng.choice(names)}"' for name in aside]
        rng.shuffle(roads)
        asked = {"roads": "\n".join(roads), "start": path[0], "count": count}
        return _document(request, asked, steps[_GIVEN:], steps[:_GIVEN])

    return _fitted(request, build, least=_GIVEN + 1, most=len(nouns) // level)


def ledger(request: Request) -> Document:
    """Draw bookings on four accounts; balances stay between 100 and 999."""

    def build(rng: random.Random, count: int) -> Document:
        names = rng.sample(request.words.plain_nouns, 4)
        balances = {name: rng.randint(20, 90) * 10 for name in names}
        opening = ", ".join(f"{name} {balance}" for name, balance in balances.items())
        booked, steps = [], []
        for number in range(1, count + 1):
            name = rng.choice(names)
            amount = rng.randint(1, 9) * rng.choice((1, 10))
            before = balances[name]
            up = before < 100 + amount or (before + amount <= 999 and rng.random() < 0.5)
            balances[name] = before + amount if up else before - amount
            booked.append(f"{number}. {name} {'receives' if up else 'pays'} {amount}")
            steps.append(f"{number}. {name}: {before} {'+' if up else '-'} {amount} = {balances[name]}")
        return _document(request, {"balances": opening, "bookings": "\n".join(booked), "count": count}, steps)

    return _fitted(request, build)


def bookings(request: Request, level: int) -> Document:
    """Draw bookings of one digit on one or two accounts; balances stay between 100 and 999."""
    nouns = request.words.plain_nouns

    def build(rng: random.Random, count: int) -> Document:
        balances = {account: rng.randint(20, 90) * 10 for account in ("cash", "bank")[:level]}
        opening = ", ".join(f"{account} {balance}" for account, balance in balances.items())
        booked, steps = [], []
        for number, item in enumerate(rng.sample(nouns, count), 1):
            account, amount = rng.choice(sorted(balances)), rng.randint(1, 9)
            up = balances[account] < 110 or (balances[account] < 990 and rng.random() < 0.5)
            balances[account] += amount if up else -amount
            booked.append(f"{number}. {item}: {account} {'+' if up else '-'}{amount}")
            steps.append(f"{booked[-1]} = {balances[account]}")
        return _document(request, {"balances": opening, "bookings": "\n".join(booked), "count": count}, steps)

    return _fitted(request, build, most=len(nouns))


def lookup(request: Request) -> Document:
    """Draw a dictionary of numbers, half of whose keys are asked for in an order of their own."""
    nouns = request.words.plain_nouns

    def build(rng: random.Random, count: int) -> Document:
        keys = rng.sample(nouns, 2 * count)
        entries = {key: f'value["{key}"] = {rng.randint(100, 999)}' for key in keys}
        drawn = rng.sample(keys, count)
        asked = {"entries": "\n".join(entries.values()), "count": count, "keys": ", ".join(drawn)}
        return _document(request, asked, [entries[key] for key in drawn])

    return _fitted(request, build, most=len(nouns) // 2)
