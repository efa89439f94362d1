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
"""

from __future__ import annotations

import html
import random
from collections.abc import Callable, Sequence

from experiments.tasks.base import Document, Question, Request
from experiments.tasks.fitting import fit_steps

MOST_TOKENS = 16_384  # of an answer
_MOST_STEPS = 1024
_STEP_TOKENS = 8  # fewer than a step takes in prompt and answer
_NOUNS_UP_TO = 4096  # tokens of a walk whose villages are named by single nouns; longer ones need more names than nouns
_LONGEST_RUN = 7  # entries of a log that follow each other in the merged log
_SLACK = 16  # tokens of an answer beyond the right steps, a sixteenth of them more

MERGE = (
    "Merge two logs. Each is sorted by the numbers of its entries. Write one log that has the entries of both, sorted by "
    "number, with one entry in each line. No number is missing in the end.\n\n"
    "Example\nLog A\n11 oak\n13 ash\n14 elm\n\nLog B\n12 fir\n15 yew\n\nMerged\n11 oak\n12 fir\n13 ash\n14 elm\n15 yew\n\n"
    "Now the real logs\nLog A\n{a}\n\nLog B\n{b}"
)
MERGE_QUESTION = "\n\nWrite the merged log, from number {first} to number {last}, and nothing else."
TABLE = (
    "Convert the rows of an HTML table to TSV. Each row becomes a line with three of its values, separated by tabs: the "
    "name, the city and the price. Keep the order of the rows, and leave none out.\n\n"
    "Example\n<tr><th>name</th><th>colour</th><th>city</th><th>number</th><th>price</th></tr>\n"
    "<tr><td>old-oak</td><td>red</td><td>Rome</td><td>712</td><td>31</td></tr>\n"
    "<tr><td>tall-elm</td><td>blue</td><td>Oslo</td><td>405</td><td>28</td></tr>\nTSV:\nold-oak\tRome\t31\n"
    "tall-elm\tOslo\t28\n\nNow the real table\n<table>\n"
    "<tr><th>name</th><th>colour</th><th>city</th><th>number</th><th>price</th></tr>\n{rows}\n</table>"
)
TABLE_QUESTION = "\n\nWrite the TSV lines of all rows of the table, in order, and nothing else."
WALK = (
    "Each line below names a road, which leads from one village to another. Only one road leaves a village.\n\n"
    "Example of a walk of three roads from oak, if the roads are elm -> ash, oak -> fir, ash -> oak, fir -> elm:\n"
    "oak -> fir\nfir -> elm\nelm -> ash\n\nNow the real roads\n{roads}"
)
WALK_QUESTION = (
    "\n\nStart in {start} and follow {count} roads. Write each road that you take, one in each line, and nothing else."
)
LEDGER = (
    "Keep the balances of four accounts. Every booking changes one account. For each booking write one line: its number, the "
    "account, the balance before it, the change, and the balance after it.\n\n"
    "Example\nBalances: ann 100, bob 250\n1. bob receives 30\n2. ann pays 4\n3. bob pays 20\nLines:\n"
    "1. bob: 250 + 30 = 280\n2. ann: 100 - 4 = 96\n3. bob: 280 - 20 = 260\n\n"
    "Now the real bookings\nBalances: {balances}\n{bookings}"
)
LEDGER_QUESTION = "\n\nWrite the lines of all {count} bookings, in order, and nothing else."
COLOURS = ("red", "blue", "green", "black", "white", "brown", "grey", "pink")


def steps_of(text: str) -> list[str]:
    """Cut an answer into its steps: lines without blank lines and fences, with single spaces, whatever the white space."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("```")]


def share_of(right_steps: Callable[[str, Sequence[str]], Sequence[bool]]) -> Callable[[str, Sequence[str]], float]:
    """Return the scorer of what ``right_steps`` tells of a prediction: the share of the steps that are right."""
    return lambda prediction, answers: sum(right_steps(prediction, answers)) / len(answers)


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


def step_document(request: Request, context: str, question: str, prefix: str, steps: Sequence[str]) -> Document:
    """Make the document of a procedure; there is room for more than the right steps, for a model that writes other lines."""
    target = "\n".join(steps)
    tokens = request.count_tokens(target) + 1  # end of sequence
    most = tokens + tokens // 16 + _SLACK
    return Document(request.task, context, (Question(question, prefix, tuple(steps), target),), most)


def fitted(
    request: Request, build: Callable[[random.Random, int], Document], least: int = 1, most: int = _MOST_STEPS
) -> Document:
    """Fit the number of steps, ``least`` to ``most``, to the length; the same draws make a procedure of any size."""
    seed = request.rng.getrandbits(64)
    most = max(min(request.length // _STEP_TOKENS, most) - least + 1, 1)
    return fit_steps(request, lambda more: build(random.Random(seed), least + more - 1), most)


def runs(rng: random.Random, count: int, longest: int) -> list[bool]:
    """Draw for each line of a merged list whether it comes from the first list; runs have at most ``longest`` lines."""
    in_first = [rng.random() < 0.5]
    while len(in_first) < count:
        in_first += [not in_first[-1]] * rng.randint(1, longest)
    return in_first[:count]


def two_lists(lines: Sequence[str], in_first: Sequence[bool]) -> dict[str, str]:
    """Divide lines into two texts, "a" and "b"."""
    return {
        name: "\n".join(line for line, first in zip(lines, in_first, strict=True) if first == (name == "a")) for name in "ab"
    }


def table_row(tag: str, cells: Sequence[str]) -> str:
    """Write a row of an HTML table; the tag is "th" or "td"."""
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def merge(request: Request) -> Document:
    """Draw the entries of two logs, which share no number, to be merged; up to seven entries of a log follow each other."""

    def build(rng: random.Random, count: int) -> Document:
        first = rng.randint(100, 199)
        steps = [f"{number} {rng.choice(request.words.plain_nouns)}" for number in range(first, first + count)]
        context = MERGE.format(**two_lists(steps, runs(rng, count, _LONGEST_RUN)))
        question = MERGE_QUESTION.format(first=first, last=first + count - 1)
        return step_document(request, context, question, "Merged\n", steps)

    return fitted(request, build, least=2)


def table(request: Request) -> Document:
    """Draw a table of five columns, to be written as TSV with three of them."""
    words = request.words

    def build(rng: random.Random, count: int) -> Document:
        rows, steps = [], []
        for _ in range(count):
            name, city = words.word(rng), rng.choice(words.nouns).capitalize()
            price, colour = rng.randint(10, 999), rng.choice(COLOURS)
            rows.append(table_row("td", (name, colour, city, str(rng.randint(100, 999)), str(price))))
            steps.append(f"{name}\t{city}\t{price}")
        context = TABLE.format(rows="\n".join(rows))
        return step_document(request, context, TABLE_QUESTION, "TSV:\nname\tcity\tprice\n", steps)

    return fitted(request, build)


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
        question = WALK_QUESTION.format(start=path[0], count=count)
        return step_document(request, WALK.format(roads="\n".join(roads)), question, "Roads:\n", steps)

    return fitted(request, build, most=(len(nouns) - 1) // 2 if single else _MOST_STEPS)


def ledger(request: Request) -> Document:
    """Draw bookings on four accounts; balances stay between 100 and 999."""

    def build(rng: random.Random, count: int) -> Document:
        names = rng.sample(request.words.plain_nouns, 4)
        balances = {name: rng.randint(20, 90) * 10 for name in names}
        opening = ", ".join(f"{name} {balance}" for name, balance in balances.items())
        bookings, steps = [], []
        for number in range(1, count + 1):
            name = rng.choice(names)
            amount = rng.randint(1, 9) * rng.choice((1, 10))
            before = balances[name]
            up = before < 100 + amount or (before + amount <= 999 and rng.random() < 0.5)
            after = before + amount if up else before - amount
            bookings.append(f"{number}. {name} {'receives' if up else 'pays'} {amount}")
            steps.append(f"{number}. {name}: {before} {'+' if up else '-'} {amount} = {after}")
            balances[name] = after
        context = LEDGER.format(balances=opening, bookings="\n".join(bookings))
        return step_document(request, context, LEDGER_QUESTION.format(count=count), "Lines:\n", steps)

    return fitted(request, build)
