"""Questions about many dated entries of a log: which most often, which more often, how many, how much in all, which next.

In the manner of Oolong (Bertsch et al. 2025, arXiv:2511.02817): the answer is in no place, because many entries decide it. A
task's `share` is the part of the entries that decide, from a sixteenth, which are those of one town, to all. They are spread
over the whole text. A method that attends to fewer tokens than decide must lose, and the tables show where it does. One to
ten entries decide the other tasks.

The words are ours. Scores are exact.
"""

import datetime
import random
from collections.abc import Sequence

from experiments.tasks.associations import PEOPLE
from experiments.tasks.base import Document, Question, Request
from experiments.tasks.fitting import fit_steps

THINGS = (
    "tea", "salt", "rice", "ink", "soap", "wool", "glue", "paint", "coal", "sugar", "paper", "honey", "glass", "cloth", "wax",
    "corn", "milk", "oil", "rope", "sand",
)  # fmt: skip
TOWNS = ("Rome", "Oslo", "Lima", "Cairo", "Delhi", "Paris", "Tokyo", "Quito")
COMMON = 6  # things of most entries
COUNTS = (1, 3, 10)  # entries that are to be counted
MOST = 0.5  # the most frequent thing's part of the entries that decide
FIRST_DAY = datetime.date(2031, 1, 1)
LARGEST = 9  # amount
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December",
)  # fmt: skip


def entries(request: Request, asks: str, share: float = 1.0, few: int = 0) -> Document:
    """Draw a log and a question about it.

    Args:
        request: what to make.
        asks: "most" and "compare" (which thing, which of two), "count", "sum" or "next"; forms of the prompt have the words.
        share: the part of the entries that decides; below 1 these are the entries of one town.
        few: things that decide instead of a share, each in one entry ("sum"; "next", which asks for the entry behind it), or
            in as many entries as are counted ("count").
    """
    seed = request.rng.getrandbits(64)

    def build(steps: int) -> Document:
        rng = random.Random(seed)
        things, towns = rng.sample(THINGS, len(THINGS)), rng.sample(TOWNS, len(TOWNS))
        common, rare = things[:COMMON], things[COMMON:]
        count = steps + COMMON + few
        if few:
            named = rare[:1] * rng.choice(COUNTS) if asks == "count" else rare[:few]
            facts = [(rng.choice(towns), thing) for thing in named]
        else:
            named = common[:1]
            facts = [(towns[0], thing) for thing in _often(rng, common, max(COMMON, round(share * count)))]
        facts += [(rng.choice(towns[1:]), rng.choice(common)) for _ in range(count - len(facts))]
        if share == 1:
            facts = [(rng.choice(towns), thing) for _, thing in facts]
        rng.shuffle(facts)
        if few and facts[-1][1] == named[0]:  # so that an entry follows
            facts.insert(0, facts.pop())
        amounts = [rng.randint(1, LARGEST) for _ in facts]
        mine = [(thing, amount) for (_, thing), amount in zip(facts, amounts, strict=True) if thing in named]
        at = [thing for _, thing in facts].index(named[0])
        found = {"count": len(mine), "sum": sum(amount for _, amount in mine), "next": amounts[(at + 1) % count]}
        answer = str(found.get(asks, named[0]))
        offered = [named[0], common[1]] if asks == "compare" else named
        offered = rng.sample(offered, len(offered))
        lines = _lines(rng, prompt.forms["few" if few else "entry"], facts, amounts)
        asked = {
            "town": prompt.forms["town"].format(town=towns[0]) if share < 1 else prompt.forms["everywhere"],
            "thing": offered[0],
            "entry": lines[at],
            "choice": " or ".join(offered),
            "both": " and ".join(offered),
        }
        question, prefix = (prompt.forms[f"{asks}{end}"].format(**asked) for end in ("", "_prefix"))
        questions = (Question(prompt.question.format(question=question), prefix, (answer,), f" {answer}."),)
        return Document(request.task, prompt.context.format(context="\n".join(lines)), questions, prompt.tokens)

    prompt = request.prompt
    return fit_steps(request, build, request.length // 8)


def _often(rng: random.Random, common: Sequence[str], count: int) -> list[str]:
    """Draw the things of ``count`` entries: half of them are of the first, and the others are about equally frequent."""
    first = round(MOST * count)
    others = [common[1 + at % (len(common) - 1)] for at in range(count - first)]
    return rng.sample([common[0]] * first + others, count)


def _lines(rng: random.Random, form: str, facts: Sequence[tuple[str, str]], amounts: Sequence[int]) -> list[str]:
    """Write the entries, whose dates ascend."""
    day, lines = FIRST_DAY, []
    for (town, thing), amount in zip(facts, amounts, strict=True):
        day += datetime.timedelta(rng.randint(1, 2))
        date = f"{day.day} {MONTHS[day.month - 1]} {day.year}"
        lines.append(form.format(date=date, name=rng.choice(PEOPLE), town=town, amount=amount, thing=thing))
    return lines
